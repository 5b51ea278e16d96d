"""How long greedy decoding goes the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..builder.batch import StepBatch
from .scoring import PlanRunner, TokenRun


@dataclasses.dataclass(frozen=True)
class GreedyAgreement:
    """Tokens until greedy outputs part, a number a prompt; `most` is where they were no longer followed."""

    most: int
    lengths: tuple[int, ...]
    mean: float


def greedy_agreement(
    engine: PlanRunner, original: PlanRunner, prompts: Sequence[tuple[int, ...]], most: int
) -> GreedyAgreement:
    """Return how many tokens of the original's greedy output the engine's has too.

    prompts : token ids; all of one length
    most : tokens followed at most, fewer where max_seq_len is reached

    The engine need not decode: up to where it parts it sees the original's tokens.
    """
    most = min(most, original.limits.max_seq_len - len(prompts[0]))
    if most < 1:
        return GreedyAgreement(0, tuple(0 for _ in prompts), 0.0)
    prompts = prompts[: original.limits.max_batch_size]
    outputs = _decode(original, prompts, most)
    runs = [
        TokenRun((*prompt, *output[:-1]), len(prompt) - 1)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    best: list[list[int]] = [[] for _ in prompts]
    for piece in engine.run(runs):
        best[piece.sequence] += piece.logits.argmax(axis=1).tolist()
    lengths = tuple(_common(one, two) for one, two in zip(best, outputs, strict=True))
    return GreedyAgreement(most, lengths, float(np.mean(lengths)))


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), len(one))


def _decode(runner: PlanRunner, prompts: Sequence[tuple[int, ...]], count: int) -> list[list[int]]:
    """Return `count` greedy tokens behind each prompt; end tokens end nothing."""
    limits = runner.limits
    length = len(prompts[0])
    each = -(-(length + count) // limits.tokens_per_block)
    chunk = max(1, limits.max_num_tokens // len(prompts))
    outputs: list[list[int]] = [[] for _ in prompts]
    table = np.arange(each * len(prompts), dtype=np.int32).reshape(len(prompts), each)
    with runner.open(table.size) as session:
        done = 0
        while done < length + count - 1:
            step = min(chunk, length - done) if done < length else 1
            known = np.array(
                [
                    (*prompt, *output)[done : done + step]
                    for prompt, output in zip(prompts, outputs, strict=True)
                ],
                np.int32,
            )
            done += step
            logits = session.step(_step(known, done, table))
            if done >= length:
                for output, token in zip(outputs, logits.argmax(axis=1).tolist(), strict=True):
                    output.append(token)
    return outputs


def _step(
    known: np.ndarray[tuple[int, int], np.dtype[np.int32]],
    done: int,
    table: np.ndarray[tuple[int, int], np.dtype[np.int32]],
) -> StepBatch:
    """Return the step of tokens (B, n) that bring each sequence to `done` positions; a row of logits each."""
    batch, count = known.shape
    cu = np.arange(0, (batch + 1) * count, count, dtype=np.int32)
    return StepBatch(
        input_ids=known.ravel(),
        position_ids=np.tile(np.arange(done - count, done, dtype=np.int32), batch),
        query_lens=np.full(batch, count, np.int32),
        kv_lens=np.full(batch, done, np.int32),
        cu_query_lens=cu,
        block_table=table,
        logits_rows=cu[1:] - 1,
    )
