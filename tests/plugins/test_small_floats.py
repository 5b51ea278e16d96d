"""Codes of one byte to and from floats: all of them, and the floats that are hard to round, against ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from plansmith.plugins.paged_attention.reference import quantize_kv
from plansmith.plugins.small_floats import (
    e4m3_words_to_halves,
    float_to_e4m3,
    float_to_int8,
    int8_words_to_halves,
)

E4M3 = ml_dtypes.float8_e4m3fn


@triton.jit
def decode(words, out, N: tl.constexpr, W: tl.constexpr, IS_E4M3: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)[:, None] * W + tl.arange(0, W)[None, :]
    loaded = tl.load(words + at)
    if IS_E4M3:  # noqa: SIM108 - the branch not taken is not compiled
        halves = e4m3_words_to_halves(loaded)
    else:
        halves = int8_words_to_halves(loaded)
    tl.store(out + tl.arange(0, N)[:, None] * 4 * W + tl.arange(0, 4 * W)[None, :], halves)


@triton.jit
def encode(x, out, count, N: tl.constexpr, IS_E4M3: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * N + tl.arange(0, N)
    loaded = tl.load(x + at, mask=at < count, other=0.0)
    if IS_E4M3:  # noqa: SIM108
        codes = float_to_e4m3(loaded)
    else:
        codes = float_to_int8(loaded)
    tl.store(out + at, codes, mask=at < count)


def decoded(codes: np.ndarray, is_e4m3: bool) -> np.ndarray:
    """Return the float16 numbers of 256 codes."""
    out = torch.zeros(256, dtype=torch.float16)
    decode[(1,)](torch.from_numpy(codes.view(np.int32).copy()), out, N=8, W=8, IS_E4M3=is_e4m3)
    return out.numpy()


def encoded(x: np.ndarray, is_e4m3: bool) -> np.ndarray:
    """Return the codes of float32 x as bytes."""
    out = torch.zeros(x.size, dtype=torch.uint8 if is_e4m3 else torch.int8)
    encode[(triton.cdiv(x.size, 4096),)](torch.from_numpy(x), out, x.size, N=4096, IS_E4M3=is_e4m3)
    return out.numpy()


def hard_floats(numbers: np.ndarray) -> np.ndarray:
    """Return sorted numbers, the ties between them, what lies beside both, and what no code is near, as float32."""
    ties = (numbers[1:] + numbers[:-1]) / 2
    near = np.concatenate([numbers, ties])
    tiny = np.array(
        [0.0, -0.0, 1e-45, -1e-45, 1e-38, 2**-10, 2**-9 * 0.75, 3e38, -3e38, np.inf, -np.inf], np.float32
    )
    beside = np.concatenate([np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))])
    return np.concatenate([near, beside, tiny]).astype(np.float32)


def e4m3_numbers() -> np.ndarray:
    """Return the finite numbers of E4M3 in order, float32."""
    every = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    return np.sort(every[np.isfinite(every)])


def test_every_e4m3_code_is_its_number() -> None:
    codes = np.random.default_rng(1).permutation(256).astype(np.uint8)
    got, wanted = decoded(codes, True), codes.view(E4M3).astype(np.float16)
    assert np.isnan(got[np.isnan(wanted)]).all() and np.isnan(wanted).sum() == 2
    bits = [x[~np.isnan(wanted)].view(np.uint16) for x in (got, wanted)]  # tells -0 from 0
    np.testing.assert_array_equal(*bits)


def test_every_int8_code_is_its_number() -> None:
    codes = np.random.default_rng(2).permutation(256).astype(np.uint8).view(np.int8)
    np.testing.assert_array_equal(decoded(codes, False), codes.astype(np.float16))


def test_e4m3_rounds_as_ml_dtypes_and_saturates() -> None:
    rng = np.random.default_rng(3)
    spread = (rng.standard_normal(20000) * np.exp2(rng.integers(-14, 10, 20000))).astype(np.float32)
    x = np.concatenate([hard_floats(e4m3_numbers()), spread])
    got = encoded(x, True)
    np.testing.assert_array_equal(got, x.clip(-448, 448).astype(E4M3).view(np.uint8))
    np.testing.assert_array_equal(got.view(E4M3).astype(np.float32), quantize_kv(x, 1.0, "fp8"))


def test_int8_rounds_to_even_and_saturates() -> None:
    rng = np.random.default_rng(4)
    spread = (rng.standard_normal(20000) * 70).astype(np.float32)
    x = np.concatenate([hard_floats(np.arange(-130, 131, dtype=np.float32)), spread])
    np.testing.assert_array_equal(encoded(x, False), np.rint(x).clip(-128, 127).astype(np.int8))
    np.testing.assert_array_equal(encoded(x, False), quantize_kv(x, 1.0, "int8"))


@pytest.mark.parametrize(("is_e4m3", "wanted"), [(True, 0x7F), (False, 0)])
def test_nan_is_nan_where_there_is_one(is_e4m3: bool, wanted: int) -> None:
    x = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert (encoded(x, is_e4m3).view(np.uint8) & 0x7F == wanted).all()


def test_codes_survive_the_round_trip() -> None:
    codes = np.arange(256, dtype=np.uint8)
    again = encoded(decoded(codes, True).astype(np.float32), True)
    np.testing.assert_array_equal(again, codes)
