"""runtime/executors/cuda.py on a real driver: each call does to real memory what the tests' double takes it to do."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from plansmith.plugins import aot, catalog
from plansmith.runtime.errors import CudaError, OutOfMemoryError
from plansmith.runtime.executors.cuda import Context, Copy3D

pytestmark = pytest.mark.gpu
SIZE = 1 << 16


@pytest.fixture
def stream(context: Context) -> Any:
    """Return a stream of its own."""
    made = context.stream()
    yield made
    context.wait(made)
    context.destroy_stream(made)


def test_bytes_go_there_and_back(context: Context, stream: Any) -> None:
    there, back = context.alloc_pinned(SIZE), context.alloc_pinned(SIZE)
    there.bytes[:] = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
    back.bytes[:] = 0
    address = context.alloc(SIZE)
    assert address % 256 == 0
    context.copy_to_device(address, there.address, SIZE, stream)
    context.copy_to_host(back.address, address, SIZE, stream)
    event = context.event()
    context.record(event, stream)
    context.wait_event(event)
    assert (back.bytes == there.bytes).all()
    context.zero(address + 16, 100, stream)
    context.copy_to_host(back.address, address, SIZE, stream)
    context.wait(stream)
    assert not back.bytes[16:116].any() and (back.bytes[116:] == there.bytes[116:]).all()
    context.destroy_event(event)
    context.free(address)
    context.free_pinned(there)
    context.free_pinned(back)


def test_a_box_is_copied_between_pitches(context: Context, stream: Any) -> None:
    # Two slices of three rows of 8 bytes, out of rows of 32 bytes into rows of 8, from the device to the host.
    source = np.arange(2 * 4 * 32, dtype=np.uint8)
    held, back = context.alloc_pinned(source.size), context.alloc_pinned(2 * 3 * 8)
    held.bytes[:] = source
    address = context.alloc(source.size)
    context.copy_to_device(address, held.address, source.size, stream)
    context.copy_box(Copy3D(address, False, 32, 4, back.address, True, 8, 3, 8, 3, 2), stream)
    context.wait(stream)
    want = source.reshape(2, 4, 32)[:, :3, :8]
    assert (back.bytes.reshape(2, 3, 8) == want).all()
    context.free(address)
    context.free_pinned(held)
    context.free_pinned(back)


def test_a_captured_graph_runs_again_with_new_bytes(context: Context, stream: Any) -> None:
    held, back = context.alloc_pinned(64), context.alloc_pinned(64)
    address = context.alloc(64)
    held.bytes[:], back.bytes[:] = 1, 0
    context.begin_capture(stream)
    context.copy_to_device(address, held.address, 64, stream)
    context.copy_to_host(back.address, address, 64, stream)
    graph = context.end_capture(stream)
    assert not back.bytes.any(), "what is captured does not run"
    for value in (7, 9):
        held.bytes[:] = value
        context.launch_graph(graph, stream)
        context.wait(stream)
        assert (back.bytes == value).all()
    context.destroy_graph(graph)
    context.free(address)
    context.free_pinned(held)
    context.free_pinned(back)


def test_memory_is_counted_and_its_end_is_an_error(context: Context) -> None:
    free, total = context.memory()
    assert 0 < free <= total == context.device.total_bytes or free <= total
    address = context.alloc(64 << 20)
    assert context.memory()[0] <= free
    context.free(address)
    with pytest.raises(OutOfMemoryError, match="cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY"):
        context.alloc(total * 2)


def test_a_kernel_of_the_catalog_loads_and_a_wrong_name_is_told(context: Context) -> None:
    sm = int(context.device.sm.removeprefix("sm"))
    compiled = aot.compile_kernels(catalog.catalog(sm, "kv_write")[:1], [sm])[0]
    module = context.load_module(compiled.cubin)
    assert context.function(module, compiled.symbol) is not None
    with pytest.raises(CudaError, match="cuModuleGetFunction failed: CUDA_ERROR_NOT_FOUND"):
        context.function(module, "no_such_kernel")
    context.unload_module(module)
    with pytest.raises(CudaError):
        context.load_module(bytes(ctypes.create_string_buffer(256)))
