"""What a plan takes of a GPU's memory, how much of the rest the KV pools get, what to change where it is too little.

Numbers only: nothing is allocated here. All sizes are bytes.
"""

from __future__ import annotations

import dataclasses

from ...sizing.memory import VALUE_BYTES, blocks_for
from ...sizing.memory import size_text as size_text
from ..errors import OutOfMemoryError
from ..manifest import Manifest
from .pools import BlockShape

# Left to CUDA for modules, local memory of kernels and graphs, on large devices.
MARGIN = 256 << 20
# Bytes a weight, scales included, of the precisions that make a plan smaller.
_SMALLER = {"int8": 1.03, "int4": 0.57}


def block_shape(manifest: Manifest, target: str) -> BlockShape:
    """Return a KV block of a target's plan."""
    model = manifest.model
    kv = VALUE_BYTES[manifest.target(target).kv_dtype]
    return BlockShape(
        model.num_layers, model.num_kv_heads, manifest.limits.tokens_per_block, model.head_dim, kv
    )


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What a plan takes besides its KV pools: weights, the contexts' scratch, staging, logits and sampling."""

    weights: int
    scratch: int
    staging: int
    logits: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.scratch + self.staging + self.logits

    def words(self) -> str:
        """Say what takes how much."""
        parts = (
            ("weights", self.weights),
            ("scratch", self.scratch),
            ("staging", self.staging),
            ("logits", self.logits),
        )
        return ", ".join(f"{name} {size_text(size)}" for name, size in parts)


@dataclasses.dataclass(frozen=True)
class Demand:
    """A plan that wants to fit onto a device.

    device : for messages, e.g. "NVIDIA L4 (device 0)"
    free, total : of the device, before the plan takes anything
    """

    manifest: Manifest
    target: str
    device: str
    free: int
    total: int
    footprint: Footprint
    shape: BlockShape
    num_reserve_blocks: int

    @property
    def left(self) -> int:
        """What KV pools may have, without the blocks of padding; below 0 where the plan alone is too large."""
        return self.free - self.footprint.total - self.shape.pool_bytes(self.num_reserve_blocks)

    @property
    def sequence_bytes(self) -> int:
        """KV pools of one sequence of full length: the least that an engine can serve its limits with."""
        limits = self.manifest.limits
        return blocks_for(limits.max_seq_len, limits.tokens_per_block) * self.shape.block_bytes

    def check(self, kv_cache_bytes: int) -> None:
        """Raise OutOfMemoryError when the plan and its pools do not fit, with what would.

        kv_cache_bytes : as asked for; 0 = whatever is left, at least one block
        """
        if self.left < max(kv_cache_bytes, self.shape.block_bytes):
            raise OutOfMemoryError(self.explain(kv_cache_bytes))

    def explain(self, kv_cache_bytes: int) -> str:
        """Say what takes how much, and what would fit."""
        return f"{self._problem(kv_cache_bytes)}; {self._advice()}"

    def _problem(self, kv_cache_bytes: int) -> str:
        kv = f", KV cache {size_text(kv_cache_bytes)}" if kv_cache_bytes else ""
        return (
            f"target {self.target} of {self.manifest.root} does not fit on {self.device}: {size_text(self.free)} of "
            f"{size_text(self.total)} are free, and it takes {self.footprint.words()}{kv}"
        )

    def _advice(self) -> str:
        ways = []
        if self.left >= self.shape.block_bytes:
            tokens = self.left // self.shape.block_bytes * self.shape.tokens_per_block
            ways.append(f"open it with kv_cache_bytes of at most {self.left} (room for {tokens} tokens)")
        ways += self._smaller_plans()
        if self.total - self.free > MARGIN:
            ways.append(
                f"free some of the {size_text(self.total - self.free)} that are in use on that device"
            )
        return "what helps: " + (" or ".join(ways) or "a GPU with more memory")

    def _smaller_plans(self) -> list[str]:
        ways = []
        limits, own = self.manifest.limits, self.footprint
        # Scratch and logits grow with the batch and the tokens of a step.
        half = own.weights + (own.scratch + own.logits) // 2 + own.staging
        if limits.max_batch_size > 1 and half + self.sequence_bytes <= self.free:
            smaller = dataclasses.replace(
                limits,
                max_batch_size=limits.max_batch_size // 2,
                max_num_tokens=max(1, limits.max_num_tokens // 2),
            )
            command = dataclasses.replace(self.manifest, limits=smaller).build_command(self.target)
            ways.append(f"a smaller max_batch_size: {command}")
        for precision, weight_bytes in _SMALLER.items():
            weights = int(self.manifest.model.num_parameters * weight_bytes)
            fits = own.total - own.weights + weights + self.sequence_bytes <= self.free
            if weights < own.weights and fits:
                command = dataclasses.replace(self.manifest, precision=precision).build_command(self.target)
                ways.append(f"another precision: {command}")
                break
        return ways


def kv_budget(
    free: int, fraction: float, kv_cache_bytes: int, block_bytes: int, reserve_bytes: int, max_blocks: int
) -> int:
    """Return the bytes that the core may make KV blocks of.

    free : of the device, once everything else is allocated; fraction : of it, (0, 1], where kv_cache_bytes is 0
    reserve_bytes : pools of the blocks that padding writes into, which come on top
    max_blocks : what the plan takes at most
    raises OutOfMemoryError where not even one block fits, or less than kv_cache_bytes
    """
    room = max(0, free - reserve_bytes)
    if kv_cache_bytes > room:
        raise OutOfMemoryError(
            f"kv_cache_bytes is {kv_cache_bytes} ({size_text(kv_cache_bytes)}), {size_text(room)} of the device's "
            f"memory are free beside the plan; give at most {room}, or 0 for a share of what is free"
        )
    wanted = kv_cache_bytes or int(room * fraction)
    if wanted < block_bytes:
        raise OutOfMemoryError(
            f"a KV block takes {size_text(block_bytes)}, the pools may have {size_text(wanted)}; raise kv_cache_bytes "
            "or kv_cache_free_gpu_mem_fraction, or free memory of the device"
        )
    return min(wanted, max_blocks * block_bytes)


def weight_budget(streamable: int, free: int, others: int, kv_bytes: int, margin: int) -> int:
    """Return how many bytes of the streamable weights stay on the device; the rest comes over in every run.

    free : of the device, with no streamable weight on it; others : scratch, staging and what else is fixed
    kv_bytes : what the pools must have; margin : what stays free
    raises OutOfMemoryError where not even the rest fits
    """
    room = free - others - kv_bytes - margin
    if room < 0:
        raise OutOfMemoryError(
            f"even with all weights on the host the plan takes {size_text(others)} beside {size_text(kv_bytes)} of KV "
            f"cache, and {size_text(free)} are free; lower kv_cache_bytes, or build with a smaller max_batch_size"
        )
    return min(streamable, room)
