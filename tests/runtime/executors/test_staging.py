"""Staging: layout, one copy a run, and buffers that are not written while the device may read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plansmith.runtime.batch import BlockCopy
from plansmith.runtime.errors import CudaError, InternalError, InvalidArgumentError, OutOfMemoryError
from plansmith.runtime.executors.cuda import Context, Driver
from plansmith.runtime.executors.pools import BlockShape, Pools
from plansmith.runtime.executors.staging import NUM_BUFFERS, Staging, aligned, offsets_of


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    made = FakeCuda()
    yield made
    assert made.problems() == []


@pytest.fixture
def context(fake: FakeCuda) -> Iterator[Context]:
    driver = Driver(fake)
    made = driver.open(driver.devices()[0])
    with made.current():
        yield made
    made.close()


@pytest.fixture
def stream(context: Context) -> Iterator[Any]:
    made = context.stream()
    yield made
    context.destroy_stream(made)


def read(context: Context, address: int, num_bytes: int, stream: Any) -> np.ndarray:
    """Return what is in device memory once the stream's work is done."""
    pinned = context.alloc_pinned(num_bytes)
    context.copy_to_host(pinned.address, address, num_bytes, stream)
    context.wait(stream)
    found = pinned.bytes.copy()
    context.free_pinned(pinned)
    return found


def write(context: Context, address: int, data: np.ndarray, stream: Any) -> None:
    pinned = context.alloc_pinned(data.nbytes)
    pinned.bytes[:] = data.view(np.uint8).ravel()
    context.copy_to_device(address, pinned.address, data.nbytes, stream)
    context.wait(stream)
    context.free_pinned(pinned)


@settings(suppress_health_check=[HealthCheck.too_slow])  # of a machine that is busy with something else
@given(st.lists(st.integers(0, 5000), max_size=12))
def test_arrays_lie_aligned_behind_each_other(sizes: list[int]) -> None:
    offsets, end = offsets_of(sizes)
    assert len(offsets) == len(sizes)
    last = 0
    for offset, size in zip(offsets, sizes, strict=True):
        assert offset % 256 == 0 and last <= offset < last + 256
        last = offset + size
    assert end == last and aligned(end) % 256 == 0 and 0 <= aligned(end) - end < 256


def test_a_run_is_one_copy_and_waiting_ones_keep_what_they_were_given(
    fake: FakeCuda, context: Context, stream: Any
) -> None:
    staging = Staging(context, 4096)
    target = context.alloc(4096 * 10)
    for run in range(10):
        arrays = {"ids": np.arange(run, run + 7, dtype=np.int32), "table": np.full((3, 100), run, np.int32)}
        copies = fake.calls.counts["cuMemcpyHtoDAsync"]
        addresses = staging.send(arrays, stream)
        assert fake.calls.counts["cuMemcpyHtoDAsync"] == copies + 1
        assert list(addresses) == ["ids", "table"] and all(one % 256 == 0 for one in addresses.values())
        # What a run would do: use it, in the stream, long after this call.
        fake.cuMemcpyDtoDAsync(target + 4096 * run, addresses["ids"], 7 * 4, stream)
        fake.cuMemcpyDtoDAsync(target + 4096 * run + 256, addresses["table"], 1200, stream)
        for array in arrays.values():
            array[:] = -1
    found = read(context, target, 4096 * 10, stream).view(np.int32).reshape(10, 1024)
    for run in range(10):
        assert found[run, :7].tolist() == list(range(run, run + 7))
        assert (found[run, 64 : 64 + 300] == run).all()
    assert staging.pinned_bytes == NUM_BUFFERS * 4096
    context.free(target)
    staging.close()
    staging.close()


def test_equal_sizes_have_equal_addresses(context: Context, stream: Any) -> None:
    staging = Staging(context, 4096)
    one = {"a": np.zeros(5, np.int32), "b": np.zeros(9, np.int32)}
    assert staging.send(one, stream) == staging.send(one, stream)
    assert staging.send({"none": np.zeros(0, np.int32)}, stream)["none"] % 256 == 0
    with pytest.raises(InternalError, match="staging has 4096"):
        staging.send({"a": np.zeros(1025, np.int32)}, stream)
    context.wait(stream)
    staging.close()


def test_what_was_allocated_goes_when_the_rest_does_not_fit(context: Context) -> None:
    with pytest.raises(OutOfMemoryError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        Staging(context, 1 << 40)


SHAPE = BlockShape(num_layers=3, num_kv_heads=2, tokens_per_block=4, head_dim=5, value_bytes=2)


@pytest.mark.parametrize("seed", range(6))
def test_block_copies_are_what_numpy_copies(context: Context, stream: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pools = Pools(context, SHAPE, 7, 2, stream)
    pools.open_host(5)
    assert pools.tensor_shape == (9, 2, 4, 5)
    plane = SHAPE.plane_blocks(9)
    device = rng.integers(0, 256, (6, plane, 2, 4, 10)).astype(np.uint8)
    host = np.zeros((5, 6, 2, 4, 10), np.uint8)
    write(context, pools.address(0, False), device, stream)
    assert pools.address(2, True) == pools.address(0, False) + 5 * plane * SHAPE.slab_bytes
    copies = []
    for _ in range(12):
        kind = str(rng.choice(["device", "to_host", "from_host"]))
        num = int(rng.integers(1, 5))
        src = int(rng.integers(0, 5 if kind == "from_host" else 7))
        dst = int(rng.integers(0, 5 if kind == "to_host" else 7))
        if kind == "device" and src == dst:
            continue
        if kind == "from_host" and not any(one.kind == "to_host" and one.dst == src for one in copies):
            continue
        copies.append(BlockCopy(kind, src, dst, num))
        source = host[src] if kind == "from_host" else device[:, src]
        target = host[dst] if kind == "to_host" else device[:, dst]
        if kind == "from_host":  # only what was put there before
            put = [one for one in copies if one.kind == "to_host" and one.dst == src]
            num = min(one.num_tokens for one in put)
            copies[-1] = BlockCopy(kind, src, dst, num)
        target[:, :, :num] = source[:, :, :num]
    pools.copy(copies, stream)
    found = read(context, pools.address(0, False), device.nbytes, stream)
    assert np.array_equal(found.reshape(device.shape)[:, :7], device[:, :7])
    pools.close()
    pools.close()


def test_blocks_that_are_not_there_are_not_copied(context: Context, stream: Any) -> None:
    pools = Pools(context, SHAPE, 7, 2, stream)
    with pytest.raises(InvalidArgumentError, match="block 7 is copied, there are 7"):
        pools.copy([BlockCopy("device", 7, 0, 4)], stream)
    with pytest.raises(InvalidArgumentError, match="host block 0 is copied, there are 0"):
        pools.copy([BlockCopy("to_host", 0, 0, 4)], stream)
    context.wait(stream)
    pools.close()


@pytest.mark.parametrize("error", [None, "CUDA_ERROR_OUT_OF_MEMORY"])
@pytest.mark.parametrize("num_failed_waits", [0, 1, 2])
def test_a_buffer_without_its_event_is_not_written_before_it_was_read(
    fake: FakeCuda, context: Context, stream: Any, num_failed_waits: int, error: str | None
) -> None:
    """The event behind a copy fails, and waits for the stream: its buffer is left alone until one has succeeded."""
    staging = Staging(context, 256)
    fake.calls.fail("cuEventRecord", error=error)
    with pytest.raises(CudaError, match="cuEventRecord"):
        staging.send({"a": np.full(64, 7, np.int32)}, stream)
    for n in range(num_failed_waits):
        fake.calls.fail("cuStreamSynchronize", nth=n + 1, error=error)
    num_failed = 0
    for n in range(NUM_BUFFERS * (num_failed_waits + 1)):
        try:
            address = staging.send({"a": np.full(64, n, np.int32)}, stream)["a"]
        except CudaError as failure:
            assert "cuStreamSynchronize" in str(failure)
            num_failed += 1
    assert num_failed == num_failed_waits
    assert (read(context, address, 256, stream).view(np.int32) == n).all()
    staging.close()


def test_a_driver_without_memory_is_both_kinds_of_error(fake: FakeCuda, context: Context) -> None:
    """Any call may say so, and whoever handles what the driver refuses must not miss it."""
    fake.calls.fail("cuEventCreate", error="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(CudaError, match="CUDA_ERROR_OUT_OF_MEMORY") as raised:
        context.event()
    assert isinstance(raised.value, OutOfMemoryError)
