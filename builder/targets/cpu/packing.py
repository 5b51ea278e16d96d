"""Packed layouts of weight matrices, as runtime/src/cpu/plan_format.h describes them.

A matrix is [N outputs, K inputs]. Sixteen outputs (a tile) lie side by side, so a kernel reads one vector of
weights for each k whatever the machine's vector width. Everything here works on a run of tiles at a time, so a
table of 49152 x 576 never exists twice in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ....runtime.errors import BuildError
from .plan_file import TILE, DType, Layout

Array = npt.NDArray[Any]

K_STEP = {
    Layout.ROW_MAJOR: 1,
    Layout.PACKED_N16: 1,
    Layout.PACKED_N16_K4: 4,
    Layout.PACKED_N16_K8: 8,
}
PACKED = {
    DType.F32: Layout.PACKED_N16,
    DType.BF16: Layout.PACKED_N16,
    DType.F16: Layout.PACKED_N16,
    DType.F8: Layout.PACKED_N16,
    DType.I8: Layout.PACKED_N16_K4,
    DType.I4: Layout.PACKED_N16_K8,
    DType.F4: Layout.PACKED_N16_K8,
}
"""The packed layout of each stored type."""

FLOATS: dict[DType, Any] = {
    DType.F32: np.float32,
    DType.BF16: ml_dtypes.bfloat16,
    DType.F16: np.float16,
    DType.F8: ml_dtypes.float8_e4m3fn,
    DType.F4: ml_dtypes.float4_e2m1fn,
}
"""numpy's type of the numbers that a tensor holds, of those that are no integers."""

SCALED = frozenset({DType.I8, DType.I4, DType.F8, DType.F4})
"""The types that have scales beside them."""

_BITS = {
    DType.F32: 32,
    DType.BF16: 16,
    DType.F16: 16,
    DType.I8: 8,
    DType.F8: 8,
    DType.I4: 4,
    DType.F4: 4,
}
_BLOCK_BYTES = 8 << 20  # of float32 rows packed at a time: large enough to vectorise, small beside any weight


def round_up(value: int, step: int) -> int:
    """Return the next multiple of step at or above value."""
    return -(-value // step) * step


def data_bytes(dtype: DType, layout: Layout, rows: int, cols: int) -> int:
    """Return the bytes of a matrix, padding included."""
    if layout is Layout.ROW_MAJOR:
        return rows * cols * _BITS[dtype] // 8
    return round_up(rows, TILE) * round_up(cols, K_STEP[layout]) * _BITS[dtype] // 8


def scales_bytes(scale_dtype: DType, rows: int, num_groups: int) -> int:
    """Return the bytes of scales, or of zero points (F32), [N/16][groups][16]."""
    return round_up(rows, TILE) * num_groups * _BITS[scale_dtype] // 8


def row_blocks(parts: Iterable[Array], cols: int, *, pad: bool = True) -> Iterator[Array]:
    """Yield [16 m, cols] blocks of the parts put under one another; `pad` fills the last tile with zeros.

    parts : [N_i, cols] arrays, any strides; an N_i need not be a multiple of 16
    """
    rows_at_a_time = max(TILE, _BLOCK_BYTES // (4 * max(cols, 1)) // TILE * TILE)
    rest: Array | None = None
    for part in parts:
        start = 0
        if rest is not None:
            start = min(TILE - len(rest), len(part))
            rest = np.concatenate([rest, part[:start]])
            if len(rest) < TILE:
                continue
            yield rest
            rest = None
        whole = start + (len(part) - start) // TILE * TILE
        for first in range(start, whole, rows_at_a_time):
            yield part[first : min(first + rows_at_a_time, whole)]
        if whole < len(part):
            rest = np.array(part[whole:])
    if rest is not None:
        yield np.concatenate([rest, np.zeros((TILE - len(rest), cols), rest.dtype)]) if pad else rest


def as_stored(block: Array, dtype: DType) -> Array:
    """Return rows in a tensor's stored float type, contiguous."""
    return np.ascontiguousarray(block, dtype=FLOATS[dtype])


def pack_block(block: Array, dtype: DType, *, zero_points: bool = False) -> Array:
    """Return the packed bytes of [16 m, K] rows as an array.

    int8 rows hold integers -128..127, int4 rows -8..7 or, with zero points, 0..15 (any integer type); F8 and F4 rows
    are of ml_dtypes.
    """
    if PACKED[dtype] is Layout.PACKED_N16:
        if dtype is DType.F8:  # plain bytes move faster
            block = np.asarray(block, FLOATS[dtype]).view(np.uint8)
            return np.ascontiguousarray(block.reshape(-1, TILE, block.shape[1]).transpose(0, 2, 1))
        return as_stored(block.reshape(-1, TILE, block.shape[1]).transpose(0, 2, 1), dtype)
    if dtype is DType.F4:
        block = np.asarray(block, FLOATS[dtype]).view(np.int8) & 15
    step = K_STEP[PACKED[dtype]]
    cols = round_up(block.shape[1], step)
    values = np.zeros((len(block), cols), np.int8)
    values[:, : block.shape[1]] = block
    tiles = values.reshape(-1, TILE, cols // step, step).transpose(0, 2, 1, 3)
    if dtype is DType.I8:
        return np.ascontiguousarray(tiles)
    symmetric = dtype is DType.I4 and not zero_points
    nibbles = (tiles + 8 if symmetric else tiles).astype(np.uint8)
    return np.ascontiguousarray(nibbles[..., :4] | (nibbles[..., 4:] << 4))


def pack_scales(parts: Iterable[Array]) -> Array:
    """Return [ceil(N / 16), groups, 16] of the [N_i, groups] scales (or zero points) put under one another."""
    scales = np.concatenate(list(parts))
    padded = np.zeros((round_up(len(scales), TILE), scales.shape[1]), scales.dtype)
    padded[: len(scales)] = scales
    return np.ascontiguousarray(padded.reshape(-1, TILE, scales.shape[1]).transpose(0, 2, 1))


def pack_matrix(
    parts: Iterable[Array], dtype: DType, cols: int, *, zero_points: bool = False
) -> Iterator[Array]:
    """Yield the packed bytes of a matrix, block by block.

    parts : [N_i, cols] matrices that lie under one another
    zero_points : int4 codes are 0..15, which have one a group
    raises BuildError when a part has another width, or values that int4 cannot hold.
    """
    low = 0 if zero_points else -8
    for block in row_blocks(_checked(parts, cols), cols):
        if dtype is DType.I4:
            block = block.astype(np.int8)
            if block.size and (block.min() < low or block.max() > low + 15):
                raise BuildError(
                    f"int4 weights lie in {block.min()}..{block.max()}, it holds {low}..{low + 15}; quantize to 4 bits"
                )
        yield pack_block(block, dtype, zero_points=zero_points)


def _checked(parts: Iterable[Array], cols: int) -> Iterator[Array]:
    for part in parts:
        if part.ndim != 2 or part.shape[1] != cols:
            raise BuildError(
                f"a weight has shape {list(part.shape)}, [N, {cols}] is wanted; the checkpoint and the graph disagree"
            )
        yield part


def unpack(
    data: Array, dtype: DType, layout: Layout, rows: int, cols: int, *, zero_points: bool = False
) -> Array:
    """Return [rows, cols] of a tensor's flat data: float32, or int8 codes for the integer types."""
    if layout is Layout.ROW_MAJOR:
        return _floats(data, dtype).reshape(rows, cols)
    step, tiles = K_STEP[layout], round_up(rows, TILE) // TILE
    steps = round_up(cols, step) // step
    if layout is Layout.PACKED_N16:
        matrix = _floats(data, dtype).reshape(tiles, cols, TILE).transpose(0, 2, 1)
    elif layout is Layout.PACKED_N16_K4:
        matrix = data.reshape(tiles, steps, TILE, 4).transpose(0, 2, 1, 3)
    else:
        pairs = data.reshape(tiles, steps, TILE, 4)
        nibbles = np.concatenate([pairs & 15, pairs >> 4], axis=-1)
        if dtype is DType.F4:
            nibbles = nibbles.view(FLOATS[dtype]).astype(np.float32)
        else:
            nibbles = nibbles.astype(np.int8) - np.int8(0 if zero_points else 8)
        matrix = nibbles.transpose(0, 2, 1, 3)
    return np.ascontiguousarray(matrix.reshape(tiles * TILE, steps * step)[:rows, :cols])


def _floats(data: Array, dtype: DType) -> Array:
    """Return float32 of stored floats, or of their bits as unsigned integers."""
    return np.asarray(data.view(FLOATS[dtype]), np.float32)


def unpack_scales(scales: Array, rows: int, num_groups: int) -> Array:
    """Return [rows, num_groups] of flat scales."""
    tiles = round_up(rows, TILE) // TILE
    matrix = scales.reshape(tiles, num_groups, TILE).transpose(0, 2, 1).reshape(tiles * TILE, num_groups)
    return np.ascontiguousarray(matrix[:rows])
