"""Executors for tests: one whose logits are a function of the token history alone, one that records another's.

Both keep the tokens of the KV pool and read a sequence's history back through its block table, so a wrong block,
position or length shows as another history.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.random  # NumPy loads it late; a fork beside an import on the engine's thread leaves a lock in the child
from plansmith.runtime.executor import (
    AdapterModule,
    Batch,
    BlockCopy,
    Executor,
    Float32Array,
    ModelInfo,
    PythonExecutor,
)

History = tuple[int, ...]
INFO = ModelInfo(
    vocab_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_batch_size=8,
    max_num_tokens=32,
    max_input_len=48,
    max_seq_len=64,
    tokens_per_block=4,
    kv_bytes_per_block=1024,
    max_logits_rows=32,
    max_adapters=2,
    max_adapter_rank=4,
)


def logits_of(history: Sequence[int], vocab_size: int = INFO.vocab_size) -> Float32Array:
    """Return the fake model's logits after `history`: random, but the same for the same tokens. (V,) float32."""
    digest = hashlib.blake2b(np.asarray(history, np.int32).tobytes(), digest_size=8).digest()
    random = np.random.default_rng(int.from_bytes(digest, "little"))
    return (random.standard_normal(vocab_size) * 3).astype(np.float32)


def greedy(prompt: Sequence[int], count: int, info: ModelInfo = INFO) -> list[int]:
    """Return what the fake model generates greedily."""
    history = list(prompt)
    for _ in range(count):
        history.append(int(np.argmax(logits_of(history, info.vocab_size))))
    return history[len(prompt) :]


class TokenPool:
    """The tokens at each position of the KV pool, and of the host's blocks."""

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self._tokens = np.full((num_blocks, tokens_per_block), -1, np.int32)
        self._host = np.full((0, tokens_per_block), -1, np.int32)
        self._tokens_per_block = tokens_per_block

    def open_host(self, num_blocks: int) -> None:
        """Make host blocks."""
        self._host = np.full((num_blocks, self._tokens_per_block), -1, np.int32)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the first positions of blocks; the rest of a block is then unknown."""
        pools = {
            "device": (self._tokens, self._tokens),
            "to_host": (self._tokens, self._host),
            "from_host": (self._host, self._tokens),
        }
        for kind, src, dst, count in copies:
            source, target = pools[kind]
            target[dst] = -1
            target[dst, :count] = source[src, :count]

    def write(self, batch: Batch) -> None:
        """Store the step's tokens, checking that the batch is consistent."""
        assert batch.cu_query_lens[0] == 0
        assert (np.diff(batch.cu_query_lens) == batch.query_lens).all()
        assert batch.cu_query_lens[-1] == len(batch.input_ids) == len(batch.position_ids)
        written: set[tuple[int, int]] = set()
        for seq, (begin, end) in enumerate(zip(batch.cu_query_lens, batch.cu_query_lens[1:], strict=False)):
            positions = batch.position_ids[begin:end]
            assert (positions == np.arange(batch.kv_lens[seq] - (end - begin), batch.kv_lens[seq])).all()
            for token, position in zip(batch.input_ids[begin:end], positions, strict=True):
                place = self._place(batch, seq, int(position))
                assert place not in written, "two sequences write one place of the pool"
                written.add(place)
                self._tokens[place] = token

    def histories(self, batch: Batch) -> Iterator[History]:
        """Return the token history at each row with logits."""
        for history, _ in self.histories_and_slots(batch):
            yield history

    def histories_and_slots(self, batch: Batch) -> Iterator[tuple[History, int]]:
        """Return the token history at each row with logits, and the slot of its adapter, -1 = none."""
        slots = batch.adapter_slots
        for row in batch.logits_rows:
            seq = int(np.searchsorted(batch.cu_query_lens, row, side="right")) - 1
            places = [self._place(batch, seq, p) for p in range(int(batch.position_ids[row]) + 1)]
            history = tuple(int(self._tokens[place]) for place in places)
            assert -1 not in history, "the sequence has a position that was never written"
            yield history, -1 if slots is None else int(slots[seq])

    def _place(self, batch: Batch, seq: int, position: int) -> tuple[int, int]:
        block = int(batch.block_table[seq, position // self._tokens_per_block])
        assert 0 <= block < len(self._tokens), f"block {block} of {len(self._tokens)}"
        return block, position % self._tokens_per_block


class FakeModel:
    """An ExecutorModel with the fake model's logits.

    fail_at_step : the step (from 0) that raises
    step_s : how long a step takes at least, so that a test is surely faster than a whole request
    gate : a step waits for this before it runs, so that a test can hold the engine in the middle
    """

    def __init__(
        self,
        info: ModelInfo = INFO,
        fail_at_step: int = -1,
        step_s: float = 0.0,
        gate: threading.Event | None = None,
    ) -> None:
        self.info = info
        self.num_steps = 0
        self.num_entered = 0
        self.closed = 0
        self.max_num_tokens_seen = 0
        self.num_copies = 0
        self.adapters: dict[int, int] = {}  # slot -> number of modules
        self._fail_at_step = fail_at_step
        self._step_s = step_s
        self._gate = gate

    def describe(self) -> ModelInfo:
        return self.info

    def open(self, num_blocks: int) -> None:
        self._pool = TokenPool(num_blocks, self.info.tokens_per_block)

    def step(self, batch: Batch) -> Float32Array:
        self.num_entered += 1
        if self._gate is not None:
            assert self._gate.wait(30)
        time.sleep(self._step_s)
        if self.num_steps == self._fail_at_step:
            raise RuntimeError("the fake model was told to fail")
        self.num_steps += 1
        self.max_num_tokens_seen = max(self.max_num_tokens_seen, len(batch.input_ids))
        self._pool.write(batch)
        rows = [self._logits(history, slot) for history, slot in self._pool.histories_and_slots(batch)]
        return np.array(rows, np.float32).reshape(len(rows), self.info.vocab_size)

    def _logits(self, history: History, slot: int) -> Float32Array:
        """An adapter is as good as other tokens before the prompt."""
        assert slot < 0 or slot in self.adapters
        return logits_of((-7, slot, *history) if slot >= 0 else history, self.info.vocab_size)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self.num_copies += len(copies)
        self._pool.copy(copies)

    def open_host(self, num_blocks: int) -> None:
        self._pool.open_host(num_blocks)

    def load_adapter(self, slot: int, modules: Sequence[AdapterModule]) -> None:
        assert slot not in self.adapters
        self.adapters[slot] = len(modules)

    def unload_adapter(self, slot: int) -> None:
        del self.adapters[slot]

    def close(self) -> None:
        self.closed += 1


class RecordingModel:
    """Passes steps on to another executor and checks that a history always has the same logits, bit for bit.

    recorded : history -> the bytes of its logits; share it between engines to compare their schedules
    """

    def __init__(self, inner: Executor, recorded: dict[History, bytes]) -> None:
        self._inner = inner
        self.recorded = recorded
        self.num_compared = 0

    def describe(self) -> ModelInfo:
        info = self._inner.describe()
        self._tokens_per_block = info.tokens_per_block
        return info

    def open(self, num_blocks: int) -> None:
        self._pool = TokenPool(num_blocks, self._tokens_per_block)
        self._inner.open(num_blocks)

    def step(self, batch: Batch) -> Float32Array:
        self._pool.write(batch)
        logits = self._inner.step(batch)
        for history, row in zip(self._pool.histories(batch), logits, strict=True):
            before = self.recorded.setdefault(history, row.tobytes())
            self.num_compared += 1
            assert before == row.tobytes(), f"other logits after the same {len(history)} tokens"
        return logits

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self._pool.copy(copies)
        self._inner.copy_blocks(copies)

    def open_host(self, num_blocks: int) -> None:
        self._pool.open_host(num_blocks)
        self._inner.open_host(num_blocks)

    def close(self) -> None:
        self._inner.close()


def fake_executor(**changes: int) -> PythonExecutor:
    """Return an executor of the fake model; `changes` are fields of INFO."""
    return PythonExecutor(FakeModel(dataclasses.replace(INFO, **changes)))
