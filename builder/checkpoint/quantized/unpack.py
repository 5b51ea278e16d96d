"""Codes of 4 and 8 bits taken out of the bytes and 32-bit words that checkpoints pack them into.

Rows are handled in slices and the packed pages of a mapped file let go of, so that little more than the result is held.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...mapped import release_pages

Array = npt.NDArray[Any]

SLICE_ELEMENTS = 1 << 20  # codes handled at a time: 1 MB

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of a word's 8 columns lies in bits 0..3, 4..7, ...


def words_along_columns(words: Array, bits: int) -> Array:
    """Return (N, K) uint8 of words (N, K * bits / 32) int32: code i of a word is in its bits i * bits and up."""
    codes = _little_endian(words).view(np.uint8)
    return codes if bits == 8 else nibbles_along_columns(codes)


def words_along_rows(words: Array, bits: int) -> Array:
    """Return (N, K) uint8 of words (K * bits / 32, N) int32: a word holds neighbours of the first axis (GPTQ)."""
    per_word, mask = 32 // bits, (1 << bits) - 1
    out = np.empty((words.shape[1], words.shape[0] * per_word), np.uint8)
    step = max(1, SLICE_ELEMENTS // max(1, out.shape[1]))
    for first in range(0, len(out), step):
        part = np.ascontiguousarray(words[:, first : first + step].T).view(np.uint32)
        for n in range(per_word):
            out[first : first + step, n::per_word] = (part >> np.uint32(n * bits)) & np.uint32(mask)
    release_pages(words)
    return out


def awq_words(words: Array) -> Array:
    """Return (N, R) uint8 of words (R, N / 8) int32 in AWQ's order of columns; N are the outputs."""
    out = np.empty((words.shape[1], 8, words.shape[0]), np.uint8)
    step = max(1, SLICE_ELEMENTS // max(1, 8 * words.shape[0]))
    for first in range(0, len(out), step):
        part = np.ascontiguousarray(words[:, first : first + step].T).view(np.uint32)
        for place, column in enumerate(AWQ_ORDER):
            out[first : first + step, column] = (part >> np.uint32(place * 4)) & np.uint32(15)
    release_pages(words)
    return out.reshape(-1, words.shape[0])


def nibbles_along_columns(packed: Array) -> Array:
    """Return (N, 2 M) uint8 0..15 of bytes (N, M): the lower half of a byte comes first."""
    out = np.empty((packed.shape[0], packed.shape[1] * 2), np.uint8)
    np.bitwise_and(packed, 15, out=out[:, 0::2])
    np.right_shift(packed, 4, out=out[:, 1::2])
    release_pages(packed)
    return out


def nibbles_along_rows(packed: Array) -> Array:
    """Return (2 M, K) int8 -8..7 of bytes (M, K): the lower half is the row before, two's complement (ModelOpt)."""
    out = np.empty((packed.shape[0] * 2, packed.shape[1]), np.int8)
    signed = packed.view(np.int8)
    np.right_shift(np.left_shift(signed, 4), 4, out=out[0::2])
    np.right_shift(signed, 4, out=out[1::2])
    release_pages(packed)
    return out


def fp4(codes: Array) -> Array:
    """Return the E2M1 numbers of codes 0..15, in place."""
    return codes.view(ml_dtypes.float4_e2m1fn)


def _little_endian(words: Array) -> Array:
    return np.ascontiguousarray(words).view(np.dtype(np.int32).newbyteorder("<"))
