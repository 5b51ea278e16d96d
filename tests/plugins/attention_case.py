"""Steps of PagedAttention over scattered blocks, garbage wherever nothing may be read, and the reference's answers."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import torch
from plansmith.plugins.paged_attention import run, spec
from plansmith.plugins.paged_attention.reference import paged_attention

NUMPY = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}
TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
HELD = {"fp8": ml_dtypes.float8_e4m3fn, "int8": np.int8}
HELD_TORCH = {"fp8": torch.uint8, "int8": torch.int8}
UNIT = {"fp16": 2.0**-11, "bf16": 2.0**-7}  # half a step at 1; a whole one where the interpreter cuts off
SCALES = {"same": (1.0, 1.0), "fp8": (0.01, 0.02), "int8": (0.03, 0.02)}
UNWRITTEN = 12288.0  # a number in every type


def to_torch(x: np.ndarray, dtype: Any) -> torch.Tensor:
    """Return a copy with the same bits; torch knows no ml_dtypes."""
    return torch.from_numpy(np.ascontiguousarray(x).view(np.uint8).copy()).view(dtype).reshape(x.shape)


@dataclasses.dataclass
class Case:
    """One step: its arrays in numpy, as the reference takes them.

    A sequence with kv_len 0 is padding, whatever rows it has.
    """

    attention: spec.Attention
    block_size: int
    query_lens: list[int]
    kv_lens: list[int]
    window: int = 0
    softcap: float = 0.0
    seed: int = 0
    spare_width: int = 1

    def __post_init__(self) -> None:
        attention, rng = self.attention, np.random.default_rng(self.seed)
        dtype, kv, dim, kv_heads = (
            NUMPY[attention.dtype],
            attention.kv,
            attention.head_dim,
            attention.kv_num_heads,
        )
        self.scale = 2.0 * dim**-0.5  # few positions have most of the weight: one that is lost or added shows
        rows = sum(self.query_lens)
        self.q = rng.standard_normal((rows, attention.num_heads * dim)).astype(dtype)
        self.cu = np.cumsum([0, *self.query_lens]).astype(np.int32)
        needed = [-(-length // self.block_size) for length in self.kv_lens]
        num_blocks = sum(needed) + 2
        self.table = np.full((len(needed), max(needed) + self.spare_width), -1, np.int32)
        free = rng.permutation(num_blocks).tolist()
        held = dtype if kv == "same" else HELD[kv]
        garbage = 99 if kv == "int8" else np.nan
        self.pools = [np.full((num_blocks, kv_heads, self.block_size, dim), garbage, held) for _ in range(2)]
        for b, length in enumerate(self.kv_lens):
            past = length - self.query_lens[b]
            gone = max(0, past - self.window + 1) // self.block_size if self.window else 0
            for n in range(gone, needed[b]):  # blocks before the window have been given back
                self.table[b, n] = free.pop()
            for position in range(gone * self.block_size, length):
                block, offset = divmod(position, self.block_size)
                for pool, scale in zip(self.pools, SCALES[kv], strict=True):
                    x = rng.standard_normal((kv_heads, dim)) / scale
                    top = {"same": np.inf, "fp8": 448, "int8": 127}[kv]
                    pool[self.table[b, block], :, offset] = x.clip(-top, top).astype(held)

    def reference(self, absolute: bool = False) -> np.ndarray:
        """Return out (T, H*D) float64; absolute: of the values' magnitudes, what rounding errors are relative to."""
        attention, kv = self.attention, self.attention.kv
        values = np.abs(self.pools[1].astype(np.float64)) if absolute else self.pools[1]
        k_scale, v_scale = SCALES[kv]
        out = np.full((self.q.shape[0], attention.num_heads * attention.head_dim), UNWRITTEN)
        for b, length in enumerate(self.kv_lens):
            first, last = self.cu[b], self.cu[b + 1]
            if length == 0 or first == last:
                continue
            rows = self._last_positions(self.pools[0], b), self._last_positions(self.pools[1], b)
            step = paged_attention(
                self.q[first:last],
                *(rows if not absolute else (rows[0], np.abs(rows[1].astype(np.float64)))),
                self.pools[0],
                values,
                np.array([0, last - first], np.int32),
                np.array([length], np.int32),
                self.table[b : b + 1],
                num_heads=attention.num_heads,
                kv_num_heads=attention.kv_num_heads,
                head_dim=attention.head_dim,
                scale=self.scale,
                softcap=self.softcap,
                window=self.window,
                k_scale=k_scale,
                v_scale=v_scale,
            )
            out[first:last] = step[0]
        return out

    def _last_positions(self, pool: np.ndarray, b: int) -> np.ndarray:
        """Return what the pool holds already for the step's rows, so that the reference writes it once more."""
        rows = []
        for position in range(self.kv_lens[b] - self.query_lens[b], self.kv_lens[b]):
            block, offset = divmod(position, self.block_size)
            rows.append(pool[self.table[b, block], :, offset].reshape(-1))
        return np.stack(rows)

    def run(self, query_rows: int, split_len: int = 128, has_prefill: bool = True) -> np.ndarray:
        """Return the kernels' out, its bits as they are."""
        attention = self.attention
        held = TORCH[attention.dtype] if attention.kv == "same" else HELD_TORCH[attention.kv]
        out = torch.full((self.q.shape[0], self.q.shape[1]), UNWRITTEN, dtype=TORCH[attention.dtype])
        splits = spec.num_splits(self.table.shape[1], self.block_size, split_len)
        work = run.allocate(attention, len(self.kv_lens), max(1, query_rows), splits, "cpu")
        work.partials.fill_(float("nan"))
        work.stats.fill_(float("nan"))
        scales = [torch.tensor(x) for x in SCALES[attention.kv]]
        run.paged_attention(
            attention,
            to_torch(self.q, TORCH[attention.dtype]),
            *(to_torch(pool, held) for pool in self.pools),
            *(torch.from_numpy(x) for x in (self.cu, np.array(self.kv_lens, np.int32), self.table)),
            out,
            scale=self.scale,
            softcap=self.softcap,
            window=self.window,
            k_scale=scales[0],
            v_scale=scales[1],
            query_rows=query_rows,
            split_len=split_len,
            workspace=work,
            has_prefill=has_prefill,
        )
        return out.to(torch.float64).numpy()

    def tolerance(self, out: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
        """Return the largest error that rounding explains, for each number of out.

        unit * (2 * magnitude + |out|): a weight is rounded once to the type of the products (unit of itself; in float16
        at least 2^-25, which positions * 2^-25 * the largest V covers), the sum of weights is not, out once. In float32
        a score of size s = scale * |q| * |k| is off by at most (D + 8) * 2^-24 * s, and so is its weight, twice (above
        and below the line); what the products, rescalings and sums add is 2^-24 a step, positions of them at most.
        """
        dtype = self.attention.dtype
        longest = max(self.kv_lens)
        k_scale, v_scale = SCALES[self.attention.kv]
        used = self.table[self.table >= 0]
        keys, values = (np.nan_to_num(pool[used].astype(np.float64)) for pool in self.pools)
        q = self.q.astype(np.float64).reshape(len(self.q), -1, self.attention.head_dim)
        score = self.scale * np.linalg.norm(q, axis=-1).max() * np.linalg.norm(keys, axis=-1).max() * k_scale
        single = 2.0**-24 * (2 * (self.attention.head_dim + 8) * score + longest)
        least = longest * 2.0**-25 * np.abs(values).max() * v_scale
        return UNIT[dtype] * (2 * magnitude + np.abs(out)) + single * magnitude + least


def check(case: Case, query_rows: int, split_len: int = 128) -> None:
    """Compare a case's kernels with the reference, and see that rows of padding are left alone."""
    wanted, magnitude = case.reference(), case.reference(absolute=True)
    error = np.abs(case.run(query_rows, split_len) - wanted)
    bound = case.tolerance(wanted, magnitude)
    rows = np.repeat(np.array(case.kv_lens), case.query_lens) > 0
    assert (error[~rows] == 0).all()
    worst = np.nanmax(error[rows] / bound[rows])
    assert np.isfinite(error[rows]).all() and worst <= 1, f"{worst:.2f} of the tolerance"
