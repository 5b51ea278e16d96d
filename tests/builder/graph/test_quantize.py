"""The quantizers against plain loops, and their edges."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from plansmith.builder.graph import quantize
from plansmith.builder.graph.quantize import (
    INT4_DIVISORS,
    INT8_DIVISORS,
    dequantize,
    quantize_int4,
    quantize_int8,
)
from plansmith.runtime.errors import CheckpointError


def weights(n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


def test_int8_is_the_definition_row_by_row() -> None:
    w = weights(7, 33)
    q, scale = quantize_int8(w)
    for row in range(7):
        step = np.float32(np.abs(w[row]).max() / np.float32(127))
        assert scale[row] == step
        assert q[row].tolist() == [round(float(x / step)) for x in w[row]]  # Python rounds half to even too
    assert q.dtype == np.int8 and np.abs(q).max() == 127
    assert np.abs(dequantize(q, scale) - w).max() <= scale.max() / 2 * 1.001


def test_int8_takes_the_best_of_its_scales_for_each_group() -> None:
    w = weights(5, 96)
    q, scale = quantize_int8(w, 32)
    assert q.shape == (5, 96) and scale.shape == (5, 3) and scale.min() > 0 and np.abs(q).max() <= 127
    chosen = set()
    for row in range(5):
        for g in range(3):
            group = w[row, 32 * g : 32 * g + 32].astype(np.float64)
            steps = [np.abs(group).max() / d for d in INT8_DIVISORS]
            errors = [((np.rint(group / s) * s - group) ** 2).sum() for s in steps]
            assert scale[row, g] == pytest.approx(steps[int(np.argmin(errors))], rel=1e-6)
            chosen.add(int(np.argmin(errors)))
    assert len(chosen) > 1
    assert ((dequantize(q, scale) - w) ** 2).sum() < ((dequantize(*quantize_int8(w)) - w) ** 2).sum()


def test_int8_rounds_half_to_even() -> None:
    q, scale = quantize_int8(np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]], np.float32))
    assert scale.tolist() == [1.0] and q.tolist() == [[127, 0, 2, 2, 0, -2]]


def test_int4_takes_the_best_of_its_scales_for_each_group() -> None:
    w = weights(5, 96)
    q, scale = quantize_int4(w, 32)
    assert q.shape == (5, 96) and scale.shape == (5, 3) and scale.min() > 0
    assert q.min() >= -8 and q.max() <= 7
    for row in range(5):
        for g in range(3):
            group = w[row, 32 * g : 32 * g + 32].astype(np.float64)
            steps = [np.abs(group).max() / d for d in INT4_DIVISORS]
            errors = [((np.clip(np.rint(group / s), -8, 7) * s - group) ** 2).sum() for s in steps]
            assert scale[row, g] == pytest.approx(steps[int(np.argmin(errors))], rel=1e-6)
    got = ((dequantize(q, scale) - w) ** 2).sum()
    step = np.abs(w.reshape(5, 3, 32)).max(axis=2, keepdims=True) / 7
    plain = ((np.rint(w.reshape(5, 3, 32) / step) * step - w.reshape(5, 3, 32)) ** 2).sum()
    assert got < 0.95 * plain


def test_scales_of_either_sign_give_the_largest_weight_the_code_that_is_left() -> None:
    w = np.array([[8.0, *([1.0, -1.0] * 15), 1.0], [-8.0, *([1.0, -1.0] * 15), 1.0]], np.float32)
    q, scale = quantize_int4(w, 32, signed=True)
    assert scale.tolist() == [[-1.0], [1.0]] and q[:, 0].tolist() == [-8, -8]
    np.testing.assert_array_equal(q[:, 1:3], [[-1, 1], [1, -1]])
    wide = weights(64, 96)
    one, either = (
        ((dequantize(*quantize_int4(wide, 32, signed=s)) - wide) ** 2).sum() for s in (False, True)
    )
    assert either < 0.95 * one  # measured: 0.887 of many more weights


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_codes_are_made_for_the_scale_as_it_is_stored(dtype: type) -> None:
    w = weights(64, 64)
    q, scale = quantize_int8(w, scale_dtype=dtype)
    assert scale.dtype == dtype
    inside = np.abs(q) < 127  # a rounded-down scale clips the peak
    error = np.abs(dequantize(q, scale) - w) / scale.astype(np.float32)[:, None]
    assert error[inside].max() <= 0.5001


def test_zero_rows_and_groups_have_scale_one() -> None:
    w = weights(3, 64)
    w[1] = 0
    w[2, :32] = 0
    q8, s8 = quantize_int8(w)
    grouped = quantize_int8(w, 32)
    q4, s4 = quantize_int4(w, 32)
    assert grouped[1][1].tolist() == [1, 1] and grouped[1][2, 0] == 1 and not grouped[0][1].any()
    assert s8[1] == 1 and not q8[1].any()
    assert s4[1].tolist() == [1, 1] and s4[2, 0] == 1 and s4[2, 1] != 1 and not q4[1].any()


def test_a_scale_below_float16_makes_zeros_not_nan() -> None:
    w = np.full((1, 32), 1e-9, np.float32)
    for q, scale in (
        quantize_int8(w, scale_dtype=np.float16),
        quantize_int4(w, 32, scale_dtype=np.float16),
    ):
        assert not q.any() and (scale == 1).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bits", [8, 4])
def test_weights_that_are_not_finite_are_refused_by_name(bad: float, bits: int) -> None:
    w = weights(4, 64)
    w[3, 5] = bad
    with pytest.raises(CheckpointError, match=r"layers\.1\.q\.weight has 1 .*NaN or infinite"):
        if bits == 8:
            quantize_int8(w, name="layers.1.q.weight")
        else:
            quantize_int4(w, 32, name="layers.1.q.weight")


def test_slices_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weights(50, 64).astype(ml_dtypes.bfloat16)
    whole = *quantize_int8(w), *quantize_int8(w, 32), *quantize_int4(w, 32)
    monkeypatch.setattr(quantize, "SLICE_ELEMENTS", 64 * 7)
    parts = *quantize_int8(w), *quantize_int8(w, 32), *quantize_int4(w, 32)
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(a, b)
