"""The KV pools: one device allocation [2L, NB, KVH, BS, D] for K and V of all layers, host blocks, and block copies."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ..batch import BlockCopy
from ..errors import CudaError, InvalidArgumentError
from .cuda import Context, Copy3D, PinnedMemory
from .staging import ALIGNMENT


@dataclasses.dataclass(frozen=True)
class BlockShape:
    """A block of one layer's K or V: [KVH, BS, D] values of value_bytes each, in L layers.

    num_layers : L; K and V of a layer are planes 2n and 2n + 1
    """

    num_layers: int
    num_kv_heads: int
    tokens_per_block: int
    head_dim: int
    value_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one position of one head."""
        return self.head_dim * self.value_bytes

    @property
    def slab_bytes(self) -> int:
        """Bytes of a block in one plane, contiguous."""
        return self.num_kv_heads * self.tokens_per_block * self.row_bytes

    @property
    def num_planes(self) -> int:
        """2L."""
        return 2 * self.num_layers

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers, K and V together."""
        return self.num_planes * self.slab_bytes

    def plane_blocks(self, num_blocks: int) -> int:
        """Return the blocks that a plane is allocated for, so that every plane begins aligned."""
        unit = ALIGNMENT // math.gcd(ALIGNMENT, self.slab_bytes)
        return -(-num_blocks // unit) * unit

    def pool_bytes(self, num_blocks: int) -> int:
        """Return the device memory of pools of so many blocks."""
        return self.num_planes * self.plane_blocks(num_blocks) * self.slab_bytes


class Pools:
    """The pools of an executor, zeroed. All methods need the context current.

    num_blocks : the core's blocks, 0..num_blocks-1
    num_reserve_blocks : blocks behind them that padding writes into
    """

    def __init__(
        self, context: Context, shape: BlockShape, num_blocks: int, num_reserve_blocks: int, stream: Any
    ) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.total_blocks = num_blocks + num_reserve_blocks
        self._context = context
        self._plane_blocks = shape.plane_blocks(self.total_blocks)
        self.num_bytes = shape.pool_bytes(self.total_blocks)
        self._host: PinnedMemory | None = None
        self._num_host_blocks = 0
        self._address: int | None = context.alloc(self.num_bytes)
        try:
            context.zero(self._address, self.num_bytes, stream)
        except BaseException:
            self.close()
            raise

    @property
    def tensor_shape(self) -> tuple[int, int, int, int]:
        """[NB, KVH, BS, D] of each plane as a plan is given it."""
        shape = self.shape
        return self.total_blocks, shape.num_kv_heads, shape.tokens_per_block, shape.head_dim

    def address(self, layer: int, is_v: bool) -> int:
        """Return where a layer's K or V pool begins."""
        assert self._address is not None
        return self._address + (2 * layer + is_v) * self._plane_blocks * self.shape.slab_bytes

    @property
    def host_bytes(self) -> int:
        """Page-locked memory of the host blocks."""
        return self._num_host_blocks * self.shape.block_bytes

    def open_host(self, num_blocks: int) -> None:
        """Allocate host blocks, each with its planes one after another; OutOfMemoryError where that much cannot be
        page-locked.
        """
        self._host = self._context.alloc_pinned(num_blocks * self.shape.block_bytes)
        self._num_host_blocks = num_blocks

    def copy(self, copies: Sequence[BlockCopy], stream: Any) -> None:
        """Copy blocks in order, one copy a block for all layers, K and V; waits where host blocks take part.

        A swap's time is what the core weighs against computing again, so it is waited for.
        """
        for one in copies:
            self._context.copy_box(self._box(one), stream)
        if any(one.kind != "device" for one in copies):
            self._context.wait(stream)

    def _box(self, copy: BlockCopy) -> Copy3D:
        shape = self.shape
        is_whole = copy.num_tokens == shape.tokens_per_block
        # A whole block is one row a plane, a part of one a row a head.
        pitch = shape.slab_bytes if is_whole else shape.tokens_per_block * shape.row_bytes
        rows = {False: self._plane_blocks * shape.slab_bytes // pitch, True: shape.slab_bytes // pitch}
        source_is_host, target_is_host = copy.kind == "from_host", copy.kind == "to_host"
        return Copy3D(
            source=self._block(copy.src, source_is_host),
            source_is_host=source_is_host,
            source_pitch=pitch,
            source_rows=rows[source_is_host],
            target=self._block(copy.dst, target_is_host),
            target_is_host=target_is_host,
            target_pitch=pitch,
            target_rows=rows[target_is_host],
            width=shape.slab_bytes if is_whole else copy.num_tokens * shape.row_bytes,
            height=1 if is_whole else shape.num_kv_heads,
            depth=shape.num_planes,
        )

    def _block(self, index: int, is_host: bool) -> int:
        """Return where a block's first plane lies."""
        count = self._num_host_blocks if is_host else self.num_blocks
        if not 0 <= index < count:
            raise InvalidArgumentError(
                f"{'host ' if is_host else ''}block {index} is copied, there are {count} of them"
            )
        if is_host:
            assert self._host is not None
            return self._host.address + index * self.shape.block_bytes
        assert self._address is not None
        return self._address + index * self.shape.slab_bytes

    def close(self) -> None:
        """Release everything, when the stream's work is done. Never fails; twice is fine."""
        if self._host is not None:
            with contextlib.suppress(CudaError):
                self._context.free_pinned(self._host)
        if self._address is not None:
            with contextlib.suppress(CudaError):
                self._context.free(self._address)
        self._host = self._address = None
