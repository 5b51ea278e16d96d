"""One step's inputs as arrays, and a small planner that cuts sequences into mixed steps over scattered blocks.

The planner exists for checking: it feeds known tokens (teacher forcing), mixes prefill chunks with decode steps,
scatters and reuses blocks, and keeps the books of which logits row belongs to which token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..runtime.errors import InvalidArgumentError, ShapeError
from .graph import contract

IntArray = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class StepBatch:
    """The int32 inputs of a step (builder/graph/contract.py): T packed tokens of B sequences, R rows of logits."""

    input_ids: IntArray  # [T]
    position_ids: IntArray  # [T]
    query_lens: IntArray  # [B], each at least 1
    kv_lens: IntArray  # [B], positions held after the step
    cu_query_lens: IntArray  # [B+1]
    block_table: IntArray  # [B, MB], -1 = unused
    logits_rows: IntArray  # [R], rows of the T tokens

    def feeds(self) -> dict[str, IntArray]:
        """Return the arrays under the graph's input names, without the pools."""
        return {
            contract.INPUT_IDS: self.input_ids,
            contract.POSITION_IDS: self.position_ids,
            contract.QUERY_LENS: self.query_lens,
            contract.KV_LENS: self.kv_lens,
            contract.CU_QUERY_LENS: self.cu_query_lens,
            contract.BLOCK_TABLE: self.block_table,
            contract.LOGITS_ROWS: self.logits_rows,
        }

    def check(self, num_blocks: int, tokens_per_block: int) -> None:
        """Raise ShapeError if the arrays contradict each other or name a block that the pool does not have."""
        num_seqs, num_tokens = self.query_lens.size, self.input_ids.size
        for name, array in self.feeds().items():
            if array.dtype != np.int32:
                raise ShapeError(
                    f"{name} is {array.dtype}, a step takes int32; convert it with astype(np.int32)"
                )
        _expect("position_ids", self.position_ids.shape, (num_tokens,))
        _expect("kv_lens", self.kv_lens.shape, (num_seqs,))
        _expect("cu_query_lens", self.cu_query_lens.shape, (num_seqs + 1,))
        _expect("rows of block_table", self.block_table.shape[:1], (num_seqs,))
        if num_seqs == 0 or (self.query_lens < 1).any() or (self.query_lens > self.kv_lens).any():
            raise ShapeError("each of a step's sequences (at least one) has 1 <= query_lens <= kv_lens")
        sums = np.concatenate(([0], np.cumsum(self.query_lens)))
        if (self.cu_query_lens != sums).any() or sums[-1] != num_tokens:
            raise ShapeError(
                f"cu_query_lens is {self.cu_query_lens.tolist()}, the sums of query_lens are {sums.tolist()} and the "
                f"step has {num_tokens} tokens; they must agree"
            )
        if self.logits_rows.size and not 0 <= self.logits_rows.min() <= self.logits_rows.max() < num_tokens:
            raise ShapeError(f"logits_rows reach outside the step's {num_tokens} tokens")
        used = -(-self.kv_lens // tokens_per_block)
        for row, count in enumerate(used.tolist()):
            blocks = self.block_table[row, :count]
            if blocks.size < count or blocks.min() < 0 or blocks.max() >= num_blocks:
                raise ShapeError(
                    f"sequence {row} holds {self.kv_lens[row]} positions, its block table {blocks.tolist()} must name "
                    f"{count} blocks below {num_blocks}"
                )


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """A step and what its logits mean: row r follows token `rows[r] = (sequence, position)`."""

    batch: StepBatch
    rows: tuple[tuple[int, int], ...]


@dataclasses.dataclass
class _Running:
    """A sequence in flight."""

    seq: int
    prompt_len: int
    blocks: list[int]
    done: int = 0


class BatchPlanner:
    """Cuts sequences into mixed steps; iterate it once for each plan, the same seed gives the same plan.

    sequences : the tokens of each sequence; all of them are fed
    num_blocks, tokens_per_block : the pool. Blocks are handed out in a shuffled order, and used again once a
        sequence has ended, so that stale keys and values lie in them
    max_blocks_per_seq : columns of the block table
    max_num_tokens, max_batch_size : limits of a step
    prompt_lens : tokens of each sequence that come in chunks, the rest one at a time; None = drawn
    logits : "all" gives a row for each token, in shuffled order; "last" one for each sequence of the step
    raises : InvalidArgumentError if a sequence can never fit
    """

    def __init__(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        num_blocks: int,
        tokens_per_block: int,
        max_blocks_per_seq: int,
        max_num_tokens: int = 32,
        max_batch_size: int = 8,
        prompt_lens: Sequence[int] | None = None,
        seed: int = 0,
        logits: Literal["all", "last"] = "all",
    ) -> None:
        self._sequences = [np.asarray(s, np.int32) for s in sequences]
        self._num_blocks = num_blocks
        self._tokens_per_block = tokens_per_block
        self._max_blocks_per_seq = max_blocks_per_seq
        self._max_num_tokens = max_num_tokens
        self._max_batch_size = max_batch_size
        self._prompt_lens = prompt_lens
        self._seed = seed
        self._logits = logits
        for idx, tokens in enumerate(self._sequences):
            need = self._blocks_of(tokens.size)
            if tokens.size == 0 or need > min(num_blocks, max_blocks_per_seq):
                raise InvalidArgumentError(
                    f"sequence {idx} has {tokens.size} tokens ({need} blocks); a sequence has 1 token or more and the "
                    f"pool {num_blocks} blocks, a table row {max_blocks_per_seq}: raise them or shorten it"
                )

    def __iter__(self) -> Iterator[PlannedStep]:
        rng = np.random.default_rng(self._seed)
        free = rng.permutation(self._num_blocks).tolist()
        waiting = self._draw(rng)
        running: list[_Running] = []
        while waiting or running:
            self._admit(rng, waiting, running, free)
            chosen = self._choose(rng, running)
            yield self._step(rng, chosen)
            for run in [r for r in running if r.done == self._sequences[r.seq].size]:
                running.remove(run)
                free.extend(run.blocks)
                rng.shuffle(free)

    def _draw(self, rng: np.random.Generator) -> list[_Running]:
        """Return all sequences, in a drawn order, each with the length of its prompt."""
        order = rng.permutation(len(self._sequences)).tolist()
        lens = self._prompt_lens or [int(rng.integers(1, s.size + 1)) for s in self._sequences]
        return [_Running(seq, min(int(lens[seq]), self._sequences[seq].size), []) for seq in order]

    def _admit(
        self, rng: np.random.Generator, waiting: list[_Running], running: list[_Running], free: list[int]
    ) -> None:
        """Start none, one or more of the waiting; at least one if nothing runs."""
        while waiting and len(running) < self._max_batch_size:
            need = self._blocks_of(self._sequences[waiting[0].seq].size)
            if need > len(free) or (running and rng.random() < 0.5):
                return
            run = waiting.pop(0)
            run.blocks = [free.pop() for _ in range(need)]
            running.append(run)

    def _choose(self, rng: np.random.Generator, running: list[_Running]) -> list[tuple[_Running, int]]:
        """Return who takes part in the step and with how many tokens; a fifth of the sequences pause."""
        order = [running[i] for i in rng.permutation(len(running))]
        budget = self._max_num_tokens
        chosen: list[tuple[_Running, int]] = []
        for run in order:
            left = run.prompt_len - run.done
            if budget == 0 or (chosen and rng.random() < 0.2):
                continue
            count = int(rng.integers(1, min(left, budget) + 1)) if left > 0 else 1
            chosen.append((run, count))
            budget -= count
        return chosen

    def _step(self, rng: np.random.Generator, chosen: list[tuple[_Running, int]]) -> PlannedStep:
        tokens, positions, owners = [], [], []
        table = np.full((len(chosen), self._max_blocks_per_seq), -1, np.int32)
        for row, (run, count) in enumerate(chosen):
            span = np.arange(run.done, run.done + count, dtype=np.int32)
            tokens.append(self._sequences[run.seq][span])
            positions.append(span)
            owners += [(run.seq, int(p)) for p in span]
            run.done += count
            used = self._blocks_of(run.done)
            table[row, :used] = run.blocks[:used]
        lens = np.array([count for _, count in chosen], np.int32)
        cu = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
        rows = rng.permutation(cu[-1]).astype(np.int32) if self._logits == "all" else cu[1:] - 1
        batch = StepBatch(
            input_ids=np.concatenate(tokens),
            position_ids=np.concatenate(positions),
            query_lens=lens,
            kv_lens=np.array([run.done for run, _ in chosen], np.int32),
            cu_query_lens=cu,
            block_table=table,
            logits_rows=rows.astype(np.int32),
        )
        return PlannedStep(batch, tuple(owners[r] for r in rows.tolist()))

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._tokens_per_block)


def _expect(name: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if got != wanted:
        raise ShapeError(
            f"{name} has shape {got}, this step's other arrays ask for {wanted}; rebuild the batch"
        )
