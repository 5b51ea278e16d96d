"""Known tokens run through a cpu plan, and the logits that follow them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..builder.batch import StepBatch
from ..builder.checkpoint import WeightSource
from ..builder.graph import build_graph
from ..builder.limits import Limits
from ..builder.precision import Precision
from ..builder.spec import DecoderSpec
from ..builder.targets.cpu import compile_plan
from ..builder.targets.cpu.session import CpuSession
from ..builder.targets.registry import Target, recipe_for
from ..runtime.errors import ExecutorError, InvalidArgumentError

Logits = npt.NDArray[np.float32]
LogProbs = npt.NDArray[np.float64]

_CPU = Target("cpu", "cpu", ())

MAX_SLICE_ELEMENTS = 1 << 22  # of float64 logits worked on at a time

CHUNK_TOKENS = 64  # of a step: enough rows for a product, few enough that R x V logits stay small


@dataclasses.dataclass(frozen=True)
class TokenRun:
    """Tokens to be run.

    tokens : their ids
    first : position of the first token whose logits (of the token behind it) are wanted
    """

    tokens: tuple[int, ...]
    first: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """Logits (n, V) that follow the tokens at positions start..start+n-1 of a sequence."""

    sequence: int
    start: int
    logits: Logits


@dataclasses.dataclass(frozen=True)
class _Part:
    """Tokens start..start+count-1 of a sequence, in one step."""

    sequence: int
    start: int
    count: int


class PlanRunner:
    """A cpu plan that tokens are run through; one thread at a time.

    plan : a file of the cpu target
    limits : the plan's own
    label : who it is, for errors
    num_threads : 0 = one a core
    weights : where they lie, as cpu_executor takes it
    """

    def __init__(
        self, plan: pathlib.Path, limits: Limits, label: str, num_threads: int = 0, weights: str = "auto"
    ) -> None:
        self.plan, self.limits, self.label, self.num_threads = plan, limits, label, num_threads
        self.weights = weights

    def open(self, num_blocks: int) -> CpuSession:
        """Return the plan, opened with pools of so many blocks."""
        return CpuSession(self.plan, num_blocks, num_threads=self.num_threads, weights=self.weights)

    def run(self, sequences: Sequence[TokenRun]) -> Iterator[Piece]:
        """Yield the wanted logits, sequences in order, positions ascending; chunks go through the KV cache.

        The pieces of two plans with the same limits come alike. Long sequences take several steps, short ones share
        one. raises InvalidArgumentError for a sequence beyond the limits, ExecutorError for logits that are not numbers
        """
        limits = self.limits
        for one in sequences:
            if not 1 <= len(one.tokens) <= limits.max_seq_len:
                raise InvalidArgumentError(
                    f"a sequence has {len(one.tokens)} tokens, {self.label} takes 1 to max_seq_len "
                    f"{limits.max_seq_len}; give shorter --contexts, or build with a larger --max-seq-len"
                )
        steps = _cut(sequences, min(limits.max_num_tokens, CHUNK_TOKENS), limits.max_batch_size)
        each = [-(-len(one.tokens) // limits.tokens_per_block) for one in sequences]
        num_blocks = max((sum(each[part.sequence] for part in step) for step in steps), default=1)
        with self.open(num_blocks) as session:
            blocks = _Blocks(num_blocks)
            for step in steps:
                tables = [blocks.of(part.sequence, each[part.sequence]) for part in step]
                logits = session.step(_batch(step, sequences, tables))
                at = 0
                for part in step:
                    start = max(part.start, sequences[part.sequence].first)
                    count = part.start + part.count - start
                    if count > 0:
                        piece = Piece(part.sequence, start, logits[at : at + count])
                        self._check(piece)
                        yield piece
                        at += count
                    if part.start + part.count == len(sequences[part.sequence].tokens):
                        blocks.release(part.sequence)

    def _check(self, piece: Piece) -> None:
        bad = ~np.isfinite(piece.logits).all(axis=1)
        if bad.any():
            raise ExecutorError(
                f"the logits of {self.label} are not finite numbers behind token {piece.start + int(bad.argmax())} of "
                f"sequence {piece.sequence}; the model overflows at this precision or its weights are damaged: "
                "evaluate another --precision, or get the checkpoint again"
            )


class _Blocks:
    """Blocks of the pools, handed out by sequence and used again."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks))
        self._held: dict[int, list[int]] = {}

    def of(self, sequence: int, count: int) -> list[int]:
        if sequence not in self._held:
            self._held[sequence] = [self._free.pop() for _ in range(count)]
        return self._held[sequence]

    def release(self, sequence: int) -> None:
        self._free += self._held.pop(sequence)


def _cut(sequences: Sequence[TokenRun], chunk: int, batch: int) -> list[list[_Part]]:
    """Return steps of at most `chunk` tokens of at most `batch` sequences; at most one sequence spans two steps."""
    steps: list[list[_Part]] = [[]]
    room = chunk
    for idx, one in enumerate(sequences):
        done = 0
        while done < len(one.tokens):
            if room == 0 or len(steps[-1]) == batch:
                steps.append([])
                room = chunk
            count = min(room, len(one.tokens) - done)
            steps[-1].append(_Part(idx, done, count))
            done += count
            room -= count
    return [step for step in steps if step]


def _batch(step: Sequence[_Part], sequences: Sequence[TokenRun], tables: Sequence[list[int]]) -> StepBatch:
    counts = np.array([part.count for part in step], np.int32)
    cu = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    table = np.full((len(step), max(map(len, tables))), -1, np.int32)
    for row, blocks in enumerate(tables):
        table[row, : len(blocks)] = blocks
    ids, positions, rows = [], [], []
    for part, begin in zip(step, cu[:-1].tolist(), strict=True):
        span = np.arange(part.start, part.start + part.count, dtype=np.int32)
        ids.append(np.array(sequences[part.sequence].tokens[part.start : part.start + part.count], np.int32))
        positions.append(span)
        rows.append(begin + np.flatnonzero(span >= sequences[part.sequence].first))
    return StepBatch(
        input_ids=np.concatenate(ids),
        position_ids=np.concatenate(positions),
        query_lens=counts,
        kv_lens=np.array([part.start + part.count for part in step], np.int32),
        cu_query_lens=cu,
        block_table=table,
        logits_rows=np.concatenate(rows).astype(np.int32),
    )


def row_slices(logits: npt.NDArray[Any]) -> Iterator[slice]:
    """Yield slices of the rows (n, V), few enough that float64 copies of them stay small whatever V is."""
    step = max(1, MAX_SLICE_ELEMENTS // logits.shape[1])
    for at in range(0, len(logits), step):
        yield slice(at, at + step)


def log_softmax(logits: npt.NDArray[Any]) -> LogProbs:
    """Return log-probabilities (n, V) in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def kl_divergence(p: LogProbs, q: LogProbs) -> npt.NDArray[np.float64]:
    """Return KL(p || q) of each row of log-probabilities (n, V), in nats, at least 0."""
    result: npt.NDArray[np.float64] = np.maximum((np.exp(p) * (p - q)).sum(axis=1), 0.0)
    return result


def compile_cpu(
    spec: DecoderSpec, weights: WeightSource, recipe: Precision, limits: Limits, plan: pathlib.Path
) -> pathlib.Path:
    """Write the cpu plan of a decoder to `plan` and return it; raises BuildError or CheckpointError as a build does."""
    model = build_graph(spec, weights, recipe_for(_CPU, recipe), limits)
    compile_plan(model, spec, limits, plan)
    return plan
