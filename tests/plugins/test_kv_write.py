"""kv_write, run by the interpreter, against float64: what is written, and that nothing else is."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from plansmith.plugins.kv_write import run, spec
from plansmith.plugins.kv_write.reference import kv_write, rotate
from plansmith.plugins.kv_write.spec import KvWrite
from plansmith.plugins.paged_attention.reference import quantize_kv

from .attention_case import HELD, HELD_TORCH, NUMPY, TORCH, to_torch

STEP = {"fp16": 2.0**-10, "bf16": 2.0**-7, "fp32": 2.0**-23}  # between numbers from 1 to 2
REFERENCE: dict[str, Literal["float", "fp8", "int8"]] = {"same": "float", "fp8": "fp8", "int8": "int8"}
SCALES = {
    "same": (1.0, 1.0),
    "fp8": (0.004, 0.3),
    "int8": (0.02, 0.011),
}  # some of K and V is beyond the range
ROWS, LENS = [1, 9, 3, 0, 2, 1], [17, 9, 0, 5, 130, 64]  # 3 rows of padding in the middle


class Step:
    """A mixed step: arrays in numpy, pools full of a marker."""

    def __init__(self, write: KvWrite, block_size: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.write, dtype = write, NUMPY[write.dtype]
        rows = sum(ROWS) + 2  # two rows behind the last sequence: a bucket's
        widths = (write.num_heads, write.kv_num_heads, write.kv_num_heads)
        self.q, self.k, self.v = (
            rng.standard_normal((rows, n * write.head_dim)).astype(dtype) for n in widths
        )
        self.cu = np.cumsum([0, *ROWS]).astype(np.int32)
        self.lens = np.array(LENS, np.int32)
        needed = [-(-n // block_size) for n in LENS]
        self.table = np.full((len(LENS), max(needed) + 2), -1, np.int32)
        free = rng.permutation(sum(needed) + 1).tolist()
        for b, n in enumerate(needed):
            self.table[b, :n] = [free.pop() for _ in range(n)]
        held = dtype if write.kv == "same" else HELD[write.kv]
        shape = (sum(needed) + 1, write.kv_num_heads, block_size, write.head_dim)
        self.pools = [np.full(shape, 77, held) for _ in range(2)]
        self.positions = np.zeros(rows, np.int32)
        for b, n in enumerate(ROWS):
            self.positions[self.cu[b] : self.cu[b + 1]] = np.maximum(0, LENS[b] - n + np.arange(n))
        angle = rng.uniform(0, 6, (131, max(1, write.rotary_dim // 2)))
        self.cos, self.sin = (f(angle).astype(NUMPY[write.tables]) for f in (np.cos, np.sin))

    def real_rows(self) -> np.ndarray:
        """Return a mask of the rows that are not padding."""
        owner = np.repeat(np.arange(len(ROWS)), ROWS)
        return np.concatenate([self.lens[owner] > 0, [False, False]])

    def run(self, in_place: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (q_out, k_pool, v_pool) of the kernel."""
        write = self.write
        held = TORCH[write.dtype] if write.kv == "same" else HELD_TORCH[write.kv]
        q, k, v = (to_torch(x, TORCH[write.dtype]) for x in (self.q, self.k, self.v))
        pools = [to_torch(pool, held) for pool in self.pools]
        q_out = q if in_place else torch.full_like(q, 77)
        scales = [torch.tensor(x) for x in SCALES[write.kv]]
        rope: dict[str, Any] = {}
        if write.rotary_dim:
            rope = {"q": q, "q_out": q_out, "position_ids": torch.from_numpy(self.positions)}
            rope |= {name: to_torch(getattr(self, name), TORCH[write.tables]) for name in ("cos", "sin")}
        run.kv_write(
            write, k, v, *pools, *(torch.from_numpy(x) for x in (self.cu, self.lens, self.table)),
            k_scale=scales[0], v_scale=scales[1], **rope,
        )  # fmt: skip
        got = [x.view(torch.uint8).numpy() for x in pools]
        k_pool, v_pool = (x.view(pool.dtype) for x, pool in zip(got, self.pools, strict=True))
        return q_out.to(torch.float64).numpy(), k_pool, v_pool

    def reference(self, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the pools with k, as it is after rotation."""
        k_scale, v_scale = SCALES[self.write.kv]
        return kv_write(
            k, self.v, *self.pools, self.cu, self.lens, self.table,
            kv=REFERENCE[self.write.kv], k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip


def bits(x: np.ndarray) -> np.ndarray:
    """Return the bytes, which tell -0 from 0."""
    return np.ascontiguousarray(x).view(np.uint8)


@pytest.mark.parametrize("kv", ["same", "fp8", "int8"])
@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "block_size"),
    [
        ("fp16", (6, 3), 64, 16),
        ("bf16", (4, 1), 80, 32),
        ("fp32", (9, 9), 128, 64),
        ("fp16", (2, 2), 256, 128),
    ],
)
def test_rotated_already_is_written_bit_for_bit(
    kv: spec.Kv, dtype: spec.Dtype, heads: tuple[int, int], dim: int, block_size: int
) -> None:
    step = Step(KvWrite(dtype, kv, *heads, dim), block_size)
    _q, k_pool, v_pool = step.run()
    for got, wanted in zip((k_pool, v_pool), step.reference(step.k), strict=True):
        np.testing.assert_array_equal(bits(got), bits(wanted))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("dtype", "kv", "tables", "dim", "rotary_dim"),
    [
        ("fp16", "same", "fp32", 64, 64),
        ("bf16", "same", "bf16", 96, 24),
        ("fp32", "same", "fp32", 80, 32),
        ("fp16", "fp8", "fp16", 112, 112),
        ("bf16", "int8", "fp32", 256, 64),
        ("fp32", "fp8", "fp32", 128, 126),
    ],
)
def test_q_and_k_are_rotated(
    dtype: spec.Dtype, kv: spec.Kv, tables: spec.Dtype, dim: int, rotary_dim: int, in_place: bool
) -> None:
    """A rotated number x1 c - x2 s is off by its rounding (half a step) and 3 * 2^-24 of |x1 c| + |x2 s| in float32.

    A number so far from the reference's can be rounded to the other of two neighbouring codes.
    """
    step = Step(KvWrite(dtype, kv, 4, 2, dim, rotary_dim, tables), 32)
    q_out, k_pool, v_pool = step.run(in_place)
    real = step.real_rows()
    tables_and_sizes = (step.cos, step.sin, step.positions, dim, rotary_dim)
    wanted = rotate(step.q, *tables_and_sizes)
    magnitudes = np.abs(step.q), np.abs(step.cos), np.abs(step.sin)
    size = np.maximum(  # x1 c + x2 s in the first half, x2 c + x1 s in the second
        rotate(magnitudes[0], magnitudes[1], -magnitudes[2], *tables_and_sizes[2:]),
        rotate(*magnitudes, *tables_and_sizes[2:]),
    )
    error = STEP[dtype] * (1.0 if dtype == "bf16" else 0.5)  # the interpreter cuts bfloat16 off
    bound = np.exp2(np.floor(np.log2(np.abs(wanted) + 1e-30))) * error + 3 * 2.0**-24 * size
    assert (np.abs(q_out - wanted)[real] <= bound[real]).all()
    untouched = step.q.astype(np.float64) if in_place else np.full_like(wanted, 77)
    np.testing.assert_array_equal(q_out[~real], untouched[~real])

    k = rotate(step.k, *tables_and_sizes)
    k_wanted, v_wanted = step.reference(k.astype(NUMPY[dtype]))
    np.testing.assert_array_equal(bits(v_pool), bits(v_wanted))
    got, wanted = k_pool.astype(np.float64), k_wanted.astype(np.float64)
    one_step = {"same": STEP[dtype], "fp8": 2.0**-3, "int8": 0.0}[kv] * np.abs(wanted)
    least = {"same": 2.0**-24 * 8, "fp8": 2.0**-9, "int8": 1.0}[kv]
    assert (np.abs(got - wanted) <= one_step + least).all()
    assert dtype == "bf16" or (got != wanted).mean() < 0.02  # hardly any is rounded to the neighbour


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_nan_and_infinity(kv: spec.Kv) -> None:
    step = Step(KvWrite("fp16", kv, 1, 1, 64), 16)
    step.k[0, :4] = [np.nan, np.inf, -np.inf, -0.0]
    _q, k_pool, _v = step.run()
    got = k_pool[step.table[0, 1], 0, 0, :4].astype(np.float64)  # position 16
    wanted = {"fp8": [np.nan, 448, -448, 0], "int8": [0, 127, -128, 0]}[kv]
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_codes_are_of_a_division_and_not_of_a_product(kv: spec.Kv) -> None:
    """Numbers that a division puts on a tie between two codes, or beside it, and 1 / scale on the other side."""
    step = Step(KvWrite("fp32", kv, 1, 1, 64), 16)
    scale = np.float32(SCALES[kv][0])
    ties = np.arange(16, 120, dtype=np.float32) + (
        1.0 if kv == "fp8" else 0.5
    )  # E4M3 has even numbers from 16 on
    x = np.concatenate([np.nextafter(ties * scale, np.float32(n)) for n in (-np.inf, 0, np.inf)])
    held = REFERENCE[kv]
    x = x[quantize_kv(x, float(scale), held) != quantize_kv(x * (np.float32(1) / scale), 1.0, held)]
    assert len(x) >= 2
    step.k[0] = np.resize(x, 64)
    _q, k_pool, _v = step.run()
    got = k_pool[step.table[0, 1], 0, 0].astype(np.float32)  # position 16
    np.testing.assert_array_equal(got, quantize_kv(step.k[0], float(scale), held))


def test_many_sequences_are_found() -> None:
    """More than the 256 that are looked at in one go."""
    write = KvWrite("fp16", "same", 1, 1, 16)
    rng = np.random.default_rng(5)
    count, owners = 600, [0, 3, 255, 256, 257, 511, 512, 599]  # those with a row
    lens = np.full(count, 5, np.int32)
    lens[owners] = rng.integers(1, 17, len(owners))
    k, v = (rng.standard_normal((len(owners), 16)).astype(np.float16) for _ in range(2))
    cu = np.concatenate([[0], np.cumsum(np.isin(np.arange(count), owners))]).astype(np.int32)
    table = rng.permutation(count).astype(np.int32)[:, None]
    pools = [np.zeros((count, 1, 16, 16), np.float16) for _ in range(2)]
    wanted = kv_write(k, v, *pools, cu, lens, table)
    tensors = [torch.from_numpy(x) for x in (k, v, *pools, cu, lens, table)]
    run.kv_write(write, *tensors)
    for got, expected in zip(tensors[2:4], wanted, strict=True):
        np.testing.assert_array_equal(got.numpy(), expected)
    assert (wanted[0] != 0).any(axis=(1, 2, 3)).sum() == len(owners)


def test_cost_counts_each_number_once() -> None:
    assert spec.cost(KvWrite("fp16", "fp8", 8, 2, 64), 10).num_bytes == 10 * 2 * 2 * 64 * (2 + 1)
    cost = spec.cost(KvWrite("fp16", "same", 8, 2, 64, 32), 10)
    assert cost.num_bytes == 10 * (2 * 2 * 64 * 4 + 2 * 8 * 64 * 2 + 32 * 4)
    assert cost.num_operations == 10 * 3 * 10 * 32


def test_odd_rotary_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="rotary_dim 33 with head size 64"):
        KvWrite("fp16", "same", 8, 2, 64, 33)
