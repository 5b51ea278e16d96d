"""Unpacking and dequantizing in slices, at sizes that slices do not divide, against loops over single numbers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from plansmith.builder.checkpoint.quantized import dequantize as dequantize_module
from plansmith.builder.checkpoint.quantized import unpack
from plansmith.builder.checkpoint.quantized.blocks import by_output
from plansmith.builder.checkpoint.quantized.dequantize import dequantize, slice_rows, to_fp8_grid
from plansmith.builder.scheme import ROW, WHOLE, QuantizedWeight, Scheme
from tiny_packing import AWQ_ORDER, along_columns, along_rows

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack, "SLICE_ELEMENTS", 100)
    monkeypatch.setattr(dequantize_module, "_SLICE_ELEMENTS", 100)


@pytest.mark.parametrize("bits", [4, 8])
def test_words(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (56, 24))
    np.testing.assert_array_equal(unpack.words_along_columns(along_columns(codes, bits), bits), codes)
    np.testing.assert_array_equal(unpack.words_along_rows(along_rows(codes, bits), bits), codes.T)
    part = along_columns(codes, bits)[::2]  # a view that is not contiguous
    np.testing.assert_array_equal(unpack.words_along_columns(part, bits), codes[::2])


def test_awq_words() -> None:
    codes = np.random.default_rng(0).integers(0, 16, (9, 40))
    np.testing.assert_array_equal(unpack.awq_words(along_columns(codes, 4, AWQ_ORDER)), codes.T)


def test_nibbles() -> None:
    every = np.arange(256, dtype=np.uint8).reshape(2, 128)
    along_k, along_n = unpack.nibbles_along_columns(every), unpack.nibbles_along_rows(every)
    for row in range(2):
        for column in range(128):
            low, high = int(every[row, column]) % 16, int(every[row, column]) // 16
            assert along_k[row, 2 * column : 2 * column + 2].tolist() == [low, high]
            signed = [one - 16 if one > 7 else one for one in (low, high)]
            assert along_n[2 * row : 2 * row + 2, column].tolist() == signed


def test_fp4() -> None:
    numbers = unpack.fp4(np.arange(16, dtype=np.uint8)).astype(np.float32)
    np.testing.assert_array_equal(numbers, [*E2M1, *(-one for one in E2M1)])


def weight(scheme: Scheme, n: int, k: int) -> QuantizedWeight:
    random = np.random.default_rng(3)
    group = scheme.weight_group
    shape: tuple[int, ...] = {WHOLE: (), ROW: (n,)}.get(group, (n, k // max(group, 1)))
    scale = random.uniform(0.01, 0.1, shape).astype(np.float32)
    if scheme.weight == "fp4":
        codes = unpack.fp4(random.integers(0, 16, (n, k)).astype(np.uint8))
        return QuantizedWeight(codes, (scale * 100).astype(ml_dtypes.float8_e4m3fn), scale_2=0.03)
    if scheme.weight == "fp8":
        return QuantizedWeight(random.normal(0, 99, (n, k)).astype(ml_dtypes.float8_e4m3fn), scale)
    low, high = (0, 16) if scheme.zero_points else (-8, 8) if scheme.weight == "int4" else (-128, 128)
    zero = random.integers(0, 16, shape).astype(np.int8) if scheme.zero_points else None
    return QuantizedWeight(random.integers(low, high, (n, k)).astype(np.int8), scale, zero, 0.02)


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme("fp8", WHOLE),
        Scheme("fp8", ROW),
        Scheme("fp8", 16),
        Scheme("int8", ROW, pre_scale=True),
        Scheme("int4", 8),
        Scheme("int4", 8, zero_points=True),
        Scheme("int4", 8, fp8_grid=True, pre_scale=True),
        Scheme("fp4", 16),
    ],
)
def test_dequantize(scheme: Scheme) -> None:
    n, k = 23, 48
    stored = weight(scheme, n, k)
    pre_scale = np.linspace(0.5, 2, k, dtype=np.float32) if scheme.pre_scale else None
    plain = dequantize(stored, scheme, pre_scale)
    assert plain.dtype == np.float32
    for row in range(n):
        for column in range(k):
            wanted = element(stored, scheme, row, column)
            if pre_scale is not None:
                wanted *= float(pre_scale[column])
            assert plain[row, column] == pytest.approx(wanted, rel=1e-6, abs=1e-12)
    part = dequantize(slice_rows(stored, 5, 19), scheme, pre_scale)
    np.testing.assert_array_equal(part, plain[5:19])


def element(stored: QuantizedWeight, scheme: Scheme, row: int, column: int) -> float:
    place = {0: (), 1: (row,), 2: (row, column // max(scheme.weight_group, 1))}[stored.scale.ndim]
    code = float(stored.codes[row, column])
    if stored.zero is not None:
        code -= float(stored.zero[place])
    value = code * float(stored.scale[place])
    if scheme.weight == "fp4":
        value *= stored.scale_2
    if scheme.fp8_grid:
        value = (
            float(ml_dtypes.float8_e4m3fn(np.float32(value) / np.float32(stored.scale_2))) * stored.scale_2
        )
    return value


def test_the_fp8_grid_clips() -> None:
    w = np.array([1e3, -1e3, 448.0 * 0.5, 0.26, 0.0], np.float32)
    np.testing.assert_array_equal(to_fp8_grid(w, 0.5), np.array([224, -224, 224, 0.25, 0], np.float32))


def test_blocks_by_output() -> None:
    scales = np.arange(6, dtype=np.float32).reshape(3, 2)
    wide = by_output(scales, 4, 10)
    assert wide.shape == (10, 2)
    for row in range(10):
        assert wide[row].tolist() == scales[row // 4].tolist()
