"""The double's driver: like the real module, and each wrong program is caught."""

from __future__ import annotations

import ctypes
import inspect
import re
from collections.abc import Iterator
from typing import Any

import cuda.bindings.driver as real
import numpy as np
import pytest
from fake_cuda import FakeCuda
from fake_memory import DoubleError

OK = real.CUresult.CUDA_SUCCESS
NON_BLOCKING = int(real.CUstream_flags.CU_STREAM_NON_BLOCKING)
GLOBAL = real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
THREAD_LOCAL = real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

DRIVER_CALLS = [name for name, one in vars(FakeCuda).items() if name.startswith("cu")] + [
    name for base in FakeCuda.__mro__[1:] for name in vars(base) if name.startswith("cu")
]


def ok(result: tuple[Any, ...]) -> Any:
    """Return what a call gave."""
    assert result[0] == OK, result
    return result[1] if len(result) == 2 else result[1:]


class Program:
    """A driver whose mistakes are wanted: what is made is not looked at in the end."""

    def __init__(self, **options: Any) -> None:
        self.cuda = FakeCuda(**options)
        ok(self.cuda.cuInit(0))
        ok(self.cuda.cuCtxPushCurrent(ok(self.cuda.cuDevicePrimaryCtxRetain(0))))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cuda, name)

    def device(self, size: int = 1024) -> int:
        return int(ok(self.cuda.cuMemAlloc(size)))

    def host(self, size: int = 1024) -> tuple[int, Any]:
        address = ok(self.cuda.cuMemHostAlloc(size, 0))
        return address, np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)

    def stream(self) -> Any:
        return ok(self.cuda.cuStreamCreate(NON_BLOCKING))

    def event(self) -> Any:
        return ok(self.cuda.cuEventCreate(2))

    def caught(self, words: str) -> bool:
        return any(re.search(words, one) for one in self.cuda.memory.violations)


@pytest.fixture
def program() -> Iterator[Program]:
    yield Program()


@pytest.mark.parametrize("name", DRIVER_CALLS)
def test_calls_have_the_real_parameters(name: str) -> None:
    mine = list(inspect.signature(getattr(FakeCuda, name)).parameters)[1:]
    assert mine == list(inspect.signature(getattr(real, name)).parameters)


def test_results_have_the_real_number_of_values() -> None:
    # A real function's docstring lists what it returns behind the CUresult, in the numpy form.
    for name in DRIVER_CALLS:
        text = inspect.cleandoc(getattr(real, name).__doc__)
        found = re.search(r"^Returns\n-+\n(.*?)(\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
        if found is None:  # cuStreamSynchronize's docstring is broken
            assert getattr(FakeCuda, name).num_results == 0
            continue
        listed = re.findall(r"^\w+ : ", found[1], re.MULTILINE)
        assert getattr(FakeCuda, name).num_results == len(listed), (name, found[1])


def test_enums_and_structures_are_the_real_ones(program: Program) -> None:
    assert program.cuda.CUDA_MEMCPY3D is real.CUDA_MEMCPY3D
    assert program.cuda.CUresult is real.CUresult
    with pytest.raises(AttributeError, match="the double has no cuTexRefCreate"):
        _ = program.cuda.cuTexRefCreate
    with pytest.raises(AttributeError, match="no attribute 'cuNothing'"):
        _ = program.cuda.cuNothing
    with pytest.raises(TypeError):
        program.cuda.cuMemAlloc(1, 2)


def test_nothing_works_before_init_and_without_a_context() -> None:
    cuda = FakeCuda()
    assert cuda.cuDeviceGetCount()[0].name == "CUDA_ERROR_NOT_INITIALIZED"
    ok(cuda.cuInit(0))
    assert cuda.cuMemAlloc(4) == (real.CUresult.CUDA_ERROR_INVALID_CONTEXT, None)
    assert cuda.cuCtxPushCurrent(5)[0] == real.CUresult.CUDA_ERROR_INVALID_CONTEXT
    assert FakeCuda(num_devices=0).cuInit(0)[0] == real.CUresult.CUDA_ERROR_NO_DEVICE
    with pytest.raises(RuntimeError, match="driver library"):
        FakeCuda(missing=True).cuInit(0)


def test_copies_go_there_and_back(cuda: Any) -> None:
    program = Program.__new__(Program)
    program.cuda = cuda
    stream, a, b = program.stream(), program.device(), program.device()
    source, out = program.host(), program.host()
    source[1][:] = np.arange(1024) % 251
    ok(cuda.cuMemcpyHtoDAsync(a, source[0], 1024, stream))
    ok(cuda.cuMemcpyDtoDAsync(b, a, 1024, stream))
    ok(cuda.cuMemsetD8Async(a, 3, 512, stream))
    ok(cuda.cuMemcpyDtoHAsync(out[0], b, 1024, stream))
    assert (out[1] == 0xFF).all()  # nothing has run
    ok(cuda.cuStreamSynchronize(stream))
    assert (out[1] == source[1]).all()
    plain = np.zeros(512, np.uint8)
    ok(cuda.cuMemcpyDtoH(plain, a, 512))
    assert (plain == 3).all()
    for one in (a, b):
        ok(cuda.cuMemFree(one))
    for one, _ in (source, out):
        ok(cuda.cuMemFreeHost(one))
    ok(cuda.cuStreamDestroy(stream))


def test_a_box_is_copied_row_by_row(program: Program) -> None:
    stream, pool, (address, host) = program.stream(), program.device(4096), program.host(4096)
    host[:] = np.arange(4096) % 251
    ok(program.cuMemcpyHtoDAsync(pool, address, 4096, stream))
    box = real.CUDA_MEMCPY3D()
    kinds = real.CUmemorytype
    box.srcMemoryType, box.dstMemoryType = kinds.CU_MEMORYTYPE_DEVICE, kinds.CU_MEMORYTYPE_DEVICE
    box.srcDevice, box.dstDevice = pool + 64, pool + 128
    box.srcPitch = box.dstPitch = 256
    box.srcHeight = box.dstHeight = 4
    box.WidthInBytes, box.Height, box.Depth = 32, 4, 4
    ok(program.cuMemcpy3DAsync(box, stream))
    out, values = program.host(4096)
    ok(program.cuMemcpyDtoHAsync(out, pool, 4096, stream))
    ok(program.cuStreamSynchronize(stream))
    wanted = host.copy().reshape(16, 256)
    wanted[:, 128:160] = wanted[:, 64:96]
    assert (values.reshape(16, 256) == wanted).all()
    box.srcPitch = 16  # narrower than a row
    assert program.cuMemcpy3DAsync(box, stream)[0] == real.CUresult.CUDA_ERROR_INVALID_VALUE
    box.srcPitch = 1 << 31
    assert program.cuMemcpy3DAsync(box, stream)[0] == real.CUresult.CUDA_ERROR_INVALID_VALUE
    box.srcPitch, box.Depth = 256, 5
    with pytest.raises(DoubleError, match="outside device memory of 4096"):
        program.cuMemcpy3DAsync(box, stream)


@pytest.mark.parametrize("offset,size", [(0, 1025), (1000, 25), (1024, 1), (5000, 1)])
def test_an_access_outside_an_allocation_is_caught(program: Program, offset: int, size: int) -> None:
    address = program.device()
    with pytest.raises(DoubleError, match=r"outside|no address"):
        program.cuMemsetD8Async(address + offset, 0, size, program.stream())


def test_a_stray_write_of_the_host_is_caught(program: Program) -> None:
    address, _ = program.host()
    ctypes.memset(address + 1024, 0, 1)
    assert any("byte 1024 was written, outside host" in one for one in program.problems())


def test_use_after_free_is_caught(program: Program) -> None:
    stream, address = program.stream(), program.device()
    ok(program.cuMemsetD8Async(address, 0, 4, stream))
    ok(program.cuMemFree(address))  # while it is queued
    with pytest.raises(
        DoubleError, match=r"use after free .* allocated at test_fake_cuda.*, freed at test_fake"
    ):
        program.cuStreamSynchronize(stream)
    with pytest.raises(DoubleError, match="use after free"):
        program.cuMemsetD8Async(address, 0, 4, stream)


def test_a_double_free_is_caught(program: Program) -> None:
    address = program.device()
    ok(program.cuMemFree(address))
    with pytest.raises(DoubleError, match="double free"):
        program.cuMemFree(address)
    assert program.cuMemFree(12345)[0] == real.CUresult.CUDA_ERROR_INVALID_VALUE
    host, _ = program.host()
    assert program.cuMemFree(host)[0] == real.CUresult.CUDA_ERROR_INVALID_VALUE


def test_what_is_left_is_named(program: Program) -> None:
    program.device()
    program.stream()
    program.event()
    text = "\n".join(program.problems())
    assert re.search(r"leak: device memory of 1024 bytes allocated at test_fake_cuda.py:\d+ device", text)
    assert "leak: stream made at test_fake_cuda.py" in text and "leak: event made at" in text
    assert "the primary context is retained 1 times too often" in text


def test_a_context_is_not_released_before_its_memory(program: Program) -> None:
    program.device()
    with pytest.raises(DoubleError, match="released before its memory"):
        program.cuDevicePrimaryCtxRelease(0)


def test_async_copies_need_pinned_memory(program: Program) -> None:
    pageable = np.zeros(64, np.uint8)
    with pytest.raises(DoubleError, match=r"is no address of host memory|is not host memory"):
        program.cuMemcpyHtoDAsync(program.device(), pageable.ctypes.data, 64, program.stream())
    with pytest.raises(DoubleError, match="is not host memory"):
        program.cuMemcpyHtoDAsync(program.device(), program.device(), 64, program.stream())


def test_a_staging_buffer_changed_too_early_is_caught(program: Program) -> None:
    stream, target, (address, host) = program.stream(), program.device(), program.host()
    host[:] = 1
    ok(program.cuMemcpyHtoDAsync(target, address, 1024, stream))
    host[5] = 2
    with pytest.raises(DoubleError, match="changed the source before the copy ran"):
        program.cuStreamSynchronize(stream)


def test_an_event_behind_the_copy_makes_the_staging_buffer_free(program: Program) -> None:
    stream, event, target, (address, host) = (
        program.stream(),
        program.event(),
        program.device(),
        program.host(),
    )
    for value in range(3):
        ok(program.cuEventSynchronize(event))
        host[:] = value
        ok(program.cuMemcpyHtoDAsync(target, address, 1024, stream))
        ok(program.cuEventRecord(event, stream))
    ok(program.cuStreamSynchronize(stream))
    assert not program.memory.violations


def test_a_result_read_too_early_is_garbage(program: Program) -> None:
    stream, source, (address, out) = program.stream(), program.device(), program.host()
    ok(program.cuMemsetD8Async(source, 1, 1024, stream))
    for _ in range(2):
        ok(program.cuMemcpyDtoHAsync(address, source, 1024, stream))
        assert (out == 0xFF).all()
        ok(program.cuStreamSynchronize(stream))
        assert (out == 1).all()


def test_streams_without_an_order_race(program: Program) -> None:
    a, b, memory = program.stream(), program.stream(), program.device()
    ok(program.cuMemsetD8Async(memory, 1, 1024, a))
    ok(program.cuMemsetD8Async(memory + 512, 2, 8, b))
    ok(program.cuStreamSynchronize(a))
    with pytest.raises(DoubleError, match=r"race: fill .* writes bytes 512..520 of device memory"):
        program.cuStreamSynchronize(b)


@pytest.mark.parametrize("how", ["event", "host", "host event"])
def test_an_order_between_streams_is_none(program: Program, how: str) -> None:
    a, b, memory, event = program.stream(), program.stream(), program.device(), program.event()
    ok(program.cuMemsetD8Async(memory, 1, 1024, a))
    ok(program.cuEventRecord(event, a))
    if how == "event":
        ok(program.cuStreamWaitEvent(b, event, 0))
    elif how == "host":
        ok(program.cuStreamSynchronize(a))
    else:
        ok(program.cuEventSynchronize(event))
    ok(program.cuMemsetD8Async(memory, 2, 1024, b))
    out, values = program.host()
    ok(program.cuMemcpyDtoHAsync(out, memory, 1024, b))
    ok(program.cuStreamSynchronize(b))
    assert (values == 2).all() and not program.memory.violations


def test_an_event_recorded_too_early_orders_nothing(program: Program) -> None:
    a, b, memory, event = program.stream(), program.stream(), program.device(), program.event()
    ok(program.cuEventRecord(event, a))
    ok(program.cuMemsetD8Async(memory, 1, 1024, a))
    ok(program.cuStreamWaitEvent(b, event, 0))
    ok(program.cuMemsetD8Async(memory, 2, 1024, b))
    ok(program.cuStreamSynchronize(b))
    with pytest.raises(DoubleError, match="race"):
        program.cuStreamSynchronize(a)


def test_readers_side_by_side_do_not_race(program: Program) -> None:
    a, b, memory = program.stream(), program.stream(), program.device()
    for stream in (a, b):
        out, _ = program.host()
        ok(program.cuMemcpyDtoHAsync(out, memory, 1024, stream))
    ok(program.cuCtxSynchronize())
    assert not program.memory.violations


def test_destroyed_handles_are_caught(program: Program) -> None:
    stream, event = program.stream(), program.event()
    ok(program.cuStreamDestroy(stream))
    ok(program.cuEventDestroy(event))
    with pytest.raises(DoubleError, match="a stream was used after it was destroyed"):
        program.cuStreamSynchronize(stream)
    with pytest.raises(DoubleError, match="a event was used after"):
        program.cuEventRecord(event, program.stream())
    with pytest.raises(DoubleError, match="CUevent given where CUstream"):
        program.cuStreamSynchronize(program.event())


def test_queries_tell_that_work_is_left(program: Program) -> None:
    stream, memory = program.stream(), program.device()
    ok(program.cuMemsetD8Async(memory, 1, 1024, stream))
    ok(program.cuMemsetD8Async(memory, 1, 1024, stream))
    looks = [program.cuStreamQuery(stream)[0].name for _ in range(3)]
    assert looks == ["CUDA_ERROR_NOT_READY", "CUDA_ERROR_NOT_READY", "CUDA_SUCCESS"]


def captured(program: Program, stream: Any, mode: Any = GLOBAL) -> tuple[int, Any, Any]:
    """Return (memory, out, graph) of a captured fill and copy."""
    memory, (out, values) = program.device(), program.host()
    ok(program.cuStreamBeginCapture(stream, mode))
    ok(program.cuMemsetD8Async(memory, 7, 1024, stream))
    ok(program.cuMemcpyDtoHAsync(out, memory, 1024, stream))
    graph = ok(program.cuStreamEndCapture(stream))
    return memory, values, graph


def test_a_graph_runs_when_it_is_launched(program: Program) -> None:
    stream = program.stream()
    _, values, graph = captured(program, stream)
    ok(program.cuStreamSynchronize(stream))
    assert (values == 0xFF).all()  # nothing ran
    executable = ok(program.cuGraphInstantiate(graph, 0))
    ok(program.cuGraphDestroy(graph))
    for _ in range(2):
        values[:] = 0
        ok(program.cuGraphLaunch(executable, stream))
        ok(program.cuStreamSynchronize(stream))
        assert (values == 7).all()


def test_a_graph_over_freed_memory_is_caught(program: Program) -> None:
    stream = program.stream()
    memory, _, graph = captured(program, stream)
    executable = ok(program.cuGraphInstantiate(graph, 0))
    ok(program.cuMemFree(memory))
    ok(program.cuGraphLaunch(executable, stream))
    with pytest.raises(DoubleError, match="use after free"):
        program.cuStreamSynchronize(stream)


@pytest.mark.parametrize(
    "call",
    [
        lambda p, s: p.cuStreamSynchronize(s),
        lambda p, s: p.cuCtxSynchronize(),
        lambda p, s: p.cuMemAlloc(4),
        lambda p, s: p.cuMemHostAlloc(4, 0),
        lambda p, s: p.cuStreamQuery(s),
    ],
)
def test_waiting_and_allocating_spoil_a_capture(program: Program, call: Any) -> None:
    stream = program.stream()
    ok(program.cuStreamBeginCapture(stream, GLOBAL))
    assert call(program, stream)[0].name == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert program.cuStreamEndCapture(stream)[0].name == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    assert program.caught("not allowed while a stream is captured")


def test_other_threads_do_not_disturb_a_thread_local_capture(program: Program) -> None:
    import threading

    stream = program.stream()
    context = ok(program.cuCtxGetCurrent())
    ok(program.cuStreamBeginCapture(stream, THREAD_LOCAL))
    results: list[Any] = []

    def other() -> None:
        ok(program.cuCtxPushCurrent(context))
        results.append(program.cuMemAlloc(4)[0])

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert results == [OK]
    assert program.cuMemAlloc(4)[0].name == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"


def test_an_event_of_before_cannot_be_waited_for_in_a_capture(program: Program) -> None:
    stream, event = program.stream(), program.event()
    ok(program.cuEventRecord(event, stream))
    ok(program.cuStreamBeginCapture(stream, GLOBAL))
    assert program.cuStreamWaitEvent(stream, event, 0)[0].name == "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"
    assert program.cuStreamEndCapture(stream)[0].name == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"


def test_a_graph_is_updated_by_one_of_the_same_form(program: Program) -> None:
    stream = program.stream()
    _, first, graph = captured(program, stream)
    _, second, other = captured(program, stream)
    executable = ok(program.cuGraphInstantiate(graph, 0))
    ok(program.cuGraphExecUpdate(executable, other))
    ok(program.cuGraphLaunch(executable, stream))
    ok(program.cuStreamSynchronize(stream))
    assert (first == 0xFF).all() and (second == 7).all()
    ok(program.cuStreamBeginCapture(stream, GLOBAL))
    empty = ok(program.cuStreamEndCapture(stream))
    result = program.cuGraphExecUpdate(executable, empty)
    assert result[0].name == "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE"


def test_memory_is_counted_and_ends() -> None:
    program = Program(total_bytes=16 << 20, reserved_bytes=4 << 20)
    assert ok(program.cuMemGetInfo()) == (12 << 20, 16 << 20)
    program.device(1)
    assert ok(program.cuMemGetInfo())[0] == 10 << 20  # the driver takes 2 MiB at a time
    big = program.device(10 << 20)
    assert program.cuMemAlloc(2 << 20) == (real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
    ok(program.cuMemFree(big))
    program.device(10 << 20)


def test_any_call_can_be_made_to_fail(program: Program) -> None:
    program.calls.fail("cuMemAlloc", nth=2)
    program.device()
    assert program.cuMemAlloc(4) == (real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
    program.calls.fail("cuMemFree", error="CUDA_ERROR_LAUNCH_FAILED")
    address = program.device()
    assert program.cuMemFree(address)[0].name == "CUDA_ERROR_LAUNCH_FAILED"  # an earlier error; it is freed
    with pytest.raises(DoubleError, match="double free"):
        program.cuMemFree(address)
    program.calls.fail(nth=3)
    program.event(), program.event()
    assert program.cuCtxSynchronize()[0] == real.CUresult.CUDA_ERROR_UNKNOWN


def test_a_fault_stays(program: Program) -> None:
    stream, memory = program.stream(), program.device()
    program.cuda.fault_at(2, "CUDA_ERROR_ILLEGAL_ADDRESS")
    for _ in range(2):
        ok(program.cuMemsetD8Async(memory, 1, 1024, stream))
    assert program.cuStreamSynchronize(stream)[0].name == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert program.cuMemAlloc(4)[0].name == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert program.cuMemFree(memory)[0].name == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert not any("device memory" in one for one in program.problems())


def test_work_may_run_at_once(program: Program) -> None:
    program.streams.eager = True
    stream, memory, (out, values) = program.stream(), program.device(), program.host()
    ok(program.cuMemsetD8Async(memory, 5, 1024, stream))
    ok(program.cuMemcpyDtoHAsync(out, memory, 1024, stream))
    assert (values == 5).all()


def test_the_default_stream_waits_for_blocking_streams(program: Program) -> None:
    blocking, memory = ok(program.cuStreamCreate(0)), program.device()
    ok(program.cuMemsetD8Async(memory, 5, 1024, blocking))
    plain = np.zeros(1024, np.uint8)
    ok(program.cuMemcpyDtoH(plain, memory, 1024))
    assert (plain == 5).all()
    other = program.stream()
    ok(program.cuMemsetD8Async(memory, 6, 1024, other))
    ok(program.cuStreamSynchronize(other))
    ok(program.cuMemsetD8Async(memory, 7, 1024, other))
    with pytest.raises(DoubleError, match="race"):  # a stream that does not wait for it
        program.cuMemcpyDtoH(plain, memory, 1024)
        program.cuStreamSynchronize(other)
