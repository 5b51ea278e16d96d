"""What fits, to the byte, and what a message says where it does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plansmith.runtime.errors import OutOfMemoryError
from plansmith.runtime.executors import memory
from plansmith.runtime.executors.memory import Demand, Footprint
from plansmith.runtime.executors.pools import BlockShape
from plansmith.runtime.manifest import Manifest
from plansmith.runtime.manifest_entries import LimitsEntry

GIB = 1 << 30


class FakeManifest:
    """The parts of a manifest that sizes depend on: a 7 B model in float16."""

    root = Path("/engines/seven")
    precision = "fp16"

    class model:
        num_parameters = 7_000_000_000

    limits = LimitsEntry(64, 2048, 4096, 4096, 1, 64, "paged")


def demand(free: int, footprint: Footprint, total: int = 24 * GIB) -> Demand:
    manifest = _manifest()
    return Demand(manifest, "sm89", "NVIDIA L4 (device 0)", free, total, footprint, SHAPE, 1)


@dataclasses.dataclass(frozen=True)
class _SmallManifest:
    root: Path = FakeManifest.root
    precision: str = "fp16"
    limits: LimitsEntry = FakeManifest.limits
    model: type = FakeManifest.model

    def build_command(self, targets: str) -> str:
        return f"build {targets} {self.precision} {self.limits.max_batch_size} {self.limits.max_num_tokens}"


def _manifest() -> Manifest:
    return _SmallManifest()  # type: ignore[return-value]


SHAPE = BlockShape(num_layers=32, num_kv_heads=8, tokens_per_block=64, head_dim=128, value_bytes=2)
PLAN = Footprint(weights=14 * GIB, scratch=GIB, staging=8 << 20, logits=64 << 20)


def test_a_block_is_counted_over_all_layers() -> None:
    assert SHAPE.slab_bytes == 8 * 64 * 128 * 2
    assert SHAPE.block_bytes == 2 * 32 * SHAPE.slab_bytes
    assert SHAPE.pool_bytes(10) == 10 * SHAPE.block_bytes


@given(st.integers(1, 5), st.integers(1, 33), st.integers(1, 40), st.integers(1, 96), st.integers(1, 500))
def test_every_plane_begins_aligned(layers: int, heads: int, tokens: int, dim: int, blocks: int) -> None:
    shape = BlockShape(layers, heads, tokens, dim, 2)
    plane = shape.plane_blocks(blocks)
    assert plane >= blocks and plane * shape.slab_bytes % 256 == 0
    assert shape.pool_bytes(blocks) == 2 * layers * plane * shape.slab_bytes
    assert plane - blocks < 256


def test_what_fits_is_what_is_left() -> None:
    one = demand(22 * GIB, PLAN)
    assert one.left == 22 * GIB - PLAN.total - SHAPE.block_bytes
    one.check(0)
    one.check(one.left)
    with pytest.raises(OutOfMemoryError) as error:
        one.check(one.left + 1)
    text = str(error.value)
    tokens = one.left // SHAPE.block_bytes * 64
    assert f"kv_cache_bytes of at most {one.left} (room for {tokens} tokens)" in text
    assert (
        "22.0 GiB of 24.0 GiB are free" in text and "weights 14.0 GiB" in text and "scratch 1.0 GiB" in text
    )


def test_what_does_not_fit_is_told_what_would() -> None:
    with pytest.raises(OutOfMemoryError) as error:
        demand(12 * GIB, PLAN).check(0)
    text = str(error.value)
    assert "another precision: build sm89 int8 64 2048" in text
    assert "free some of the 12.0 GiB that are in use" in text
    assert "kv_cache_bytes of" not in text
    with pytest.raises(OutOfMemoryError, match="another precision: build sm89 int4"):
        demand(7 * GIB, PLAN, 8 * GIB).check(0)
    big_scratch = dataclasses.replace(PLAN, scratch=4 * GIB)
    with pytest.raises(OutOfMemoryError, match="a smaller max_batch_size: build sm89 fp16 32 1024"):
        demand(17 * GIB, big_scratch).check(0)
    with pytest.raises(OutOfMemoryError, match="what helps: a GPU with more memory"):
        demand(GIB, PLAN, GIB).check(0)


@given(
    free=st.integers(0, 10**9),
    fraction=st.floats(0.01, 1.0),
    asked=st.integers(0, 10**9),
    block=st.integers(1, 10**6),
    reserve=st.integers(0, 10**6),
    most=st.integers(1, 10**6),
)
def test_pools_never_get_more_than_there_is(
    free: int, fraction: float, asked: int, block: int, reserve: int, most: int
) -> None:
    try:
        given_bytes = memory.kv_budget(free, fraction, asked, block, reserve, most)
    except OutOfMemoryError:
        room = max(0, free - reserve)
        assert asked > room or (asked or int(room * fraction)) < block
        return
    assert block <= given_bytes <= max(0, free - reserve)
    assert given_bytes <= most * block
    if asked:
        assert given_bytes == min(asked, most * block)


@given(st.integers(0, 10**11), st.integers(0, 10**11), st.integers(0, 10**9), st.integers(0, 10**10))
def test_weights_stay_on_the_device_as_far_as_there_is_room(
    streamable: int, free: int, others: int, kv: int
) -> None:
    try:
        budget = memory.weight_budget(streamable, free, others, kv, memory.MARGIN)
    except OutOfMemoryError:
        assert others + kv + memory.MARGIN > free
        return
    assert 0 <= budget <= streamable and budget + others + kv + memory.MARGIN <= free
    assert budget == streamable or budget + others + kv + memory.MARGIN == free


def test_sizes_for_people() -> None:
    assert [memory.size_text(n) for n in (0, 1023, 1536, 5 << 20, 3 * GIB + GIB // 5)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "5.0 MiB",
        "3.2 GiB",
    ]
