"""Packed layouts: element by element against plan_format.h's words, and round trips."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plansmith.builder.targets.cpu import packing
from plansmith.builder.targets.cpu.plan_file import DType, Layout
from plansmith.runtime.errors import BuildError

# E2M1 by its value: exponent and mantissa bits.
FP4_BITS = {0.0: 0, 0.5: 1, 1.0: 2, 1.5: 3, 2.0: 4, 3.0: 5, 4.0: 6, 6.0: 7}


def random_matrix(rng: np.random.Generator, dtype: DType, rows: int, cols: int) -> np.ndarray:
    if dtype is DType.I4:
        return rng.integers(-8, 8, (rows, cols)).astype(ml_dtypes.int4)
    if dtype is DType.I8:
        return rng.integers(-128, 128, (rows, cols)).astype(np.int8)
    return rng.standard_normal((rows, cols)).astype(packing.FLOATS[dtype])


def packed(parts: list[np.ndarray], dtype: DType, *, zero_points: bool = False) -> np.ndarray:
    blocks = packing.pack_matrix(parts, dtype, parts[0].shape[1], zero_points=zero_points)
    return np.concatenate([b.reshape(-1) for b in blocks])


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(list(DType)),
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    cols=st.integers(1, 45),
    transposed=st.booleans(),
    block_bytes=st.sampled_from([1, 16 * 4 * 40, 8 << 20]),
    seed=st.integers(0, 1000),
)
def test_round_trip(
    dtype: DType, sizes: list[int], cols: int, transposed: bool, block_bytes: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    parts = [random_matrix(rng, dtype, n, cols) for n in sizes]
    given_parts = [np.ascontiguousarray(p.T).T for p in parts] if transposed else parts
    before, packing._BLOCK_BYTES = packing._BLOCK_BYTES, block_bytes
    try:
        got = packed(given_parts, dtype)
    finally:
        packing._BLOCK_BYTES = before
    layout = packing.PACKED[dtype]
    assert got.nbytes == packing.data_bytes(dtype, layout, sum(sizes), cols)
    whole = np.concatenate(parts)
    back = packing.unpack(got, dtype, layout, sum(sizes), cols)
    np.testing.assert_array_equal(back.astype(np.float32), whole.astype(np.float32))


def test_layouts_are_what_the_header_says() -> None:
    rng = np.random.default_rng(0)
    rows, cols = 37, 24
    for dtype in DType:
        matrix = random_matrix(rng, dtype, rows, cols)
        data = packed([matrix], dtype)
        for n, k in ((0, 0), (17, 13), (36, 23), (15, 6), (16, 4)):
            tile, lane = divmod(n, 16)
            if dtype in (DType.F32, DType.BF16, DType.F16):
                assert data.reshape(3, cols, 16)[tile, k, lane] == matrix[n, k]
            elif dtype is DType.F8:
                assert data.reshape(3, cols, 16)[tile, k, lane] == int(matrix[n, k].view(np.uint8))
            elif dtype is DType.I8:
                assert data.reshape(3, cols // 4, 16, 4)[tile, k // 4, lane, k % 4] == matrix[n, k]
            else:
                byte = int(data.reshape(3, cols // 8, 16, 4)[tile, k // 8, lane, k % 4])
                nibble = byte >> 4 if k % 8 >= 4 else byte & 15
                if dtype is DType.I4:
                    assert nibble - 8 == int(matrix[n, k])
                else:
                    assert nibble == FP4_BITS[abs(float(matrix[n, k]))] | 8 * bool(np.signbit(matrix[n, k]))


def test_int4_codes_of_zero_points_are_stored_as_they_are() -> None:
    rng = np.random.default_rng(2)
    matrix = rng.integers(0, 16, (19, 16)).astype(np.int8)
    data = packed([matrix], DType.I4, zero_points=True)
    byte = int(data.reshape(2, 2, 16, 4)[1, 1, 2, 3])
    assert byte & 15 == matrix[18, 11] and byte >> 4 == matrix[18, 15]
    back = packing.unpack(data, DType.I4, Layout.PACKED_N16_K8, 19, 16, zero_points=True)
    np.testing.assert_array_equal(back, matrix)


def test_padding_is_zero_and_an_int4_zero_is_8() -> None:
    ones = np.ones((17, 5), np.int8)
    eight = packed([ones], DType.I8).reshape(2, 2, 16, 4)
    assert eight.sum() == 17 * 5 and not eight[1, :, 1:].any() and not eight[:, 1, :, 1:].any()
    four = packed([ones], DType.I4).reshape(2, 1, 16, 4)
    assert set(four[1, 0, 1:].reshape(-1)) == {0x88} and four[0, 0, 0].tolist() == [0x99, 0x89, 0x89, 0x89]


def test_scales() -> None:
    rng = np.random.default_rng(1)
    parts = [rng.random((n, 2)).astype(np.float32) for n in (9, 31)]
    scales = packing.pack_scales(parts)
    assert scales.shape == (3, 2, 16) and not scales[2, :, 8:].any()
    np.testing.assert_array_equal(packing.unpack_scales(scales.reshape(-1), 40, 2), np.concatenate(parts))


def test_wrong_shapes_and_values_are_refused() -> None:
    with pytest.raises(BuildError, match=r"shape \[4, 6\], \[N, 5\] is wanted"):
        list(packing.pack_matrix([np.zeros((4, 6), np.float32)], DType.F32, 5))
    with pytest.raises(BuildError, match=r"int4 weights lie in 0..9"):
        list(packing.pack_matrix([np.arange(10, dtype=np.int8).reshape(1, 10)], DType.I4, 10))
    assert packing.data_bytes(DType.F32, Layout.ROW_MAJOR, 3, 5) == 60
