"""The CUDA driver of the test double: the functions of cuda.bindings.driver over host memory and lazy streams.

Names, parameters and result tuples are the real module's (a test compares them), its enums and structures are used as
they are, and what the double lacks is an error. What the real driver reports, it reports; what is undefined behaviour
there (use after free, races, unpinned memory in asynchronous copies, buffers changed too early) raises DoubleError and
is noted in `memory.violations`.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import cuda.bindings.driver as real
from fake_calls import Calls, Handles, driver_call
from fake_copies import Copies
from fake_graphs import Graphs
from fake_kernels import Kernels
from fake_memory import Memory, caller
from fake_streams import DeviceFault, Event, Stream, Streams, Work

_KINDS = {
    "stream": real.CUstream,
    "event": real.CUevent,
    "graph": real.CUgraph,
    "exec": real.CUgraphExec,
    "module": real.CUmodule,
    "library": real.CUlibrary,
    "kernel": real.CUkernel,
    "function": real.CUfunction,
}
_NON_BLOCKING = int(real.CUstream_flags.CU_STREAM_NON_BLOCKING)
_DISABLE_TIMING = int(real.CUevent_flags.CU_EVENT_DISABLE_TIMING)


class FakeCuda(Copies, Graphs, Kernels):
    """The module object. All functions may be called from any thread.

    sm : compute capability, e.g. (8, 9)
    total_bytes, reserved_bytes : the device's memory, and what is not to be had of it
    num_devices : of the machine; all alike, only device 0 can be used
    version : the driver's, as cuDriverGetVersion tells it
    missing : the machine has no driver library at all
    """

    def __init__(
        self,
        *,
        sm: tuple[int, int] = (8, 9),
        name: str = "NVIDIA Double",
        total_bytes: int = 64 << 20,
        reserved_bytes: int = 0,
        num_devices: int = 1,
        version: int = 13000,
        missing: bool = False,
        uuid: bytes = bytes(range(16)),
    ) -> None:
        self.sm, self.name, self.version, self.missing, self.uuid = sm, name, version, missing, uuid
        self.num_devices = num_devices
        self.lock = threading.RLock()
        self.calls = Calls()
        self.memory = Memory(total_bytes, reserved_bytes)
        self.streams = Streams(self.memory)
        self.handles = Handles()
        self.retained = 0
        self.attributes = _attributes(sm)
        self.trt_objects: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_initialized = False
        self._thread = threading.local()
        Kernels.__init__(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu") and hasattr(real, name):
            raise AttributeError(f"the double has no {name}; add it to tests/runtime/executors/fake_cuda.py")
        if name.startswith("CU"):
            return getattr(real, name)
        raise AttributeError(f"cuda.bindings.driver has no attribute {name!r}")

    # ---- what the calls need

    def error(self, name: str) -> Any:
        """Return a CUresult by name."""
        return getattr(real.CUresult, name) if isinstance(name, str) else name

    def check_present(self) -> None:
        """Raise what the real bindings raise where there is no driver library."""
        if self.missing:
            from cuda.pathfinder import DynamicLibNotFoundError

            raise DynamicLibNotFoundError(
                '"cuda" is an NVIDIA driver library and can only be found via system search. Ensure the NVIDIA '
                "display driver is installed."
            )

    def state_error(self, needs: str, unsafe: bool) -> str | None:
        """Return the error of a call that cannot be made now."""
        if needs != "nothing" and not self._is_initialized:
            return "CUDA_ERROR_NOT_INITIALIZED"
        if needs == "context" and not self._contexts:
            return "CUDA_ERROR_INVALID_CONTEXT"
        if needs == "context" and (fault := self.fault_error()):
            return fault
        if unsafe:
            return self.capture_error()
        return None

    def fault_error(self) -> str | None:
        """Return the error that broke the context."""
        fault = self.streams.fault
        return None if fault is None else str(fault.error)

    def handle(self, kind: str, given: Any) -> int:
        """Return a handle's number; TypeError for another kind's, which the real bindings cannot tell apart."""
        wanted = _KINDS[kind]
        if given is None:
            return 0
        if isinstance(given, tuple(one for one in _KINDS.values() if one is not wanted)):
            raise self.memory.violate(f"{type(given).__name__} given where {wanted.__name__} is wanted")
        return int(given)

    def stream(self, given: Any) -> Stream | None:
        """Return the stream of a handle; DoubleError for one that was destroyed."""
        number = self.handle("stream", given)
        if number == 0:
            return self.streams.default
        found: Stream | None = self._object("stream", number)
        return found

    def _object(self, kind: str, given: Any) -> Any:
        number = self.handle(kind, given)
        found = self.handles.get(kind, number)
        if found is None and self.handles.was(kind, number):
            raise self.memory.violate(f"a {kind} was used after it was destroyed")
        return found

    @property
    def _contexts(self) -> list[int]:
        if not hasattr(self._thread, "contexts"):
            self._thread.contexts = []
        stack: list[int] = self._thread.contexts
        return stack

    def fault_at(self, nth: int, error: str = "CUDA_ERROR_ILLEGAL_ADDRESS") -> None:
        """Let the nth work that runs from now on (1 = the next) break the context."""
        left = nth

        def before_run(work: Work) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise DeviceFault(error)

        self.streams.before_run = before_run

    # ---- the end of a test

    def problems(self) -> list[str]:
        """Run what is queued and return every violation and everything that was not released."""
        with self.lock:
            if self.streams.fault is None:
                try:
                    self.streams.synchronize_all()
                    self.memory.check_guards()
                except AssertionError:
                    pass  # it is among the violations
            found = [*self.memory.violations, *self.memory.leaks()]
            found += [
                f"leak: {kind} made at {one.made_at}"
                for kind, _, one in self.handles.live()
                if kind in _OWNED
            ]
            if self.retained:
                found.append(f"the primary context is retained {self.retained} times too often")
            return found

    # ---- devices and contexts

    @driver_call(needs="nothing")
    def cuInit(self, Flags):
        if self.num_devices == 0:
            return "CUDA_ERROR_NO_DEVICE"
        self._is_initialized = True

    @driver_call(1, needs="nothing")
    def cuDriverGetVersion(self):
        return self.version

    @driver_call(1, needs="nothing")
    def cuGetErrorName(self, error):
        return real.CUresult(error).name.encode()

    @driver_call(1, needs="nothing")
    def cuGetErrorString(self, error):
        return real.CUresult(error).name.removeprefix("CUDA_ERROR_").replace("_", " ").lower().encode()

    @driver_call(1, needs="init")
    def cuDeviceGetCount(self):
        return self.num_devices

    @driver_call(1, needs="init")
    def cuDeviceGet(self, ordinal):
        if not 0 <= int(ordinal) < self.num_devices:
            return "CUDA_ERROR_INVALID_DEVICE"
        return real.CUdevice(ordinal)

    @driver_call(1, needs="init")
    def cuDeviceGetAttribute(self, attrib, dev):
        if attrib not in self.attributes:
            raise AttributeError(f"the double has no device attribute {attrib}; add it to fake_cuda.py")
        return self.attributes[attrib]

    @driver_call(1, needs="init")
    def cuDeviceGetName(self, length, dev):
        # The real binding gives the whole buffer, zeros behind the name included.
        return self.name.encode()[: length - 1].ljust(length, b"\0")

    @driver_call(1, needs="init")
    def cuDeviceGetUuid(self, dev):
        # CUuuid.bytes cannot be written from Python.
        return _Uuid(self.uuid)

    @driver_call(1, needs="init")
    def cuDeviceTotalMem(self, dev):
        return self.memory.total_bytes

    @driver_call(1, needs="init")
    def cuDevicePrimaryCtxRetain(self, dev):
        self.retained += 1
        return real.CUcontext(_CONTEXT)

    @driver_call(needs="init", release=True)
    def cuDevicePrimaryCtxRelease(self, dev):
        if self.retained == 0:
            return "CUDA_ERROR_INVALID_CONTEXT"
        self.retained -= 1
        if self.retained == 0 and self.memory.leaks():
            raise self.memory.violate("the primary context was released before its memory was freed")

    @driver_call(needs="init")
    def cuCtxSetCurrent(self, ctx):
        if self._contexts:
            self._contexts.pop()
        if ctx is not None and int(ctx) != 0:
            return self._push(ctx)

    @driver_call(1, needs="init")
    def cuCtxGetCurrent(self):
        return real.CUcontext(self._contexts[-1] if self._contexts else 0)

    @driver_call(needs="init")
    def cuCtxPushCurrent(self, ctx):
        return self._push(ctx)

    @driver_call(1, needs="init")
    def cuCtxPopCurrent(self):
        if not self._contexts:
            return "CUDA_ERROR_INVALID_CONTEXT"
        return real.CUcontext(self._contexts.pop())

    @driver_call(1)
    def cuCtxGetDevice(self):
        return real.CUdevice(0)

    @driver_call(unsafe=True)
    def cuCtxSynchronize(self):
        self.streams.synchronize_all()

    def _push(self, ctx: Any) -> str | None:
        if int(ctx) != _CONTEXT or not self.retained:
            return "CUDA_ERROR_INVALID_CONTEXT"
        self._contexts.append(int(ctx))
        return None

    # ---- memory

    @driver_call(1, unsafe=True)
    def cuMemAlloc(self, bytesize):
        return self._allocate(int(bytesize), "device")

    @driver_call(release=True, unsafe=True)
    def cuMemFree(self, dptr):
        if int(dptr) and not self.memory.free(int(dptr), "device"):
            return "CUDA_ERROR_INVALID_VALUE"

    @driver_call(1, unsafe=True)
    def cuMemHostAlloc(self, bytesize, Flags):
        return self._allocate(int(bytesize), "host")

    @driver_call(1, unsafe=True)
    def cuMemAllocHost(self, bytesize):
        return self._allocate(int(bytesize), "host")

    @driver_call(release=True, unsafe=True)
    def cuMemFreeHost(self, p):
        if not self.memory.free(self.host_address(p), "host"):
            return "CUDA_ERROR_INVALID_VALUE"

    @driver_call(2)
    def cuMemGetInfo(self):
        return self.memory.free_bytes, self.memory.total_bytes

    def _allocate(self, size: int, kind: str) -> Any:
        if size <= 0:
            return "CUDA_ERROR_INVALID_VALUE"
        made = self.memory.allocate(size, kind)
        if made is None:
            return "CUDA_ERROR_OUT_OF_MEMORY"
        return real.CUdeviceptr(made.address) if kind == "device" else made.address

    # ---- streams and events

    @driver_call(1, unsafe=True)
    def cuStreamCreate(self, Flags):
        return self._new("stream", self.streams.create(not int(Flags) & _NON_BLOCKING))

    @driver_call(1, unsafe=True)
    def cuStreamCreateWithPriority(self, flags, priority):
        return self._new("stream", self.streams.create(not int(flags) & _NON_BLOCKING))

    @driver_call(release=True)
    def cuStreamDestroy(self, hStream):
        return self._remove("stream", hStream)

    @driver_call()
    def cuStreamSynchronize(self, hStream):
        if (stream := self.stream(hStream)) is None:
            return "CUDA_ERROR_INVALID_HANDLE"
        if error := self.capture_error(stream):
            return error
        self.streams.synchronize(stream)

    @driver_call()
    def cuStreamQuery(self, hStream):
        if (stream := self.stream(hStream)) is None:
            return "CUDA_ERROR_INVALID_HANDLE"
        if error := self.capture_error(stream):
            return error
        return self._query(stream, stream.last, stream.clock)

    @driver_call()
    def cuStreamWaitEvent(self, hStream, hEvent, Flags):
        stream, event = self.stream(hStream), self._object("event", hEvent)
        if stream is None or event is None:
            return "CUDA_ERROR_INVALID_HANDLE"
        if stream.capture is not None:
            return self.wait_in_capture(stream, event)
        self.streams.wait_event(stream, event)

    @driver_call(1, unsafe=True)
    def cuEventCreate(self, Flags):
        return self._new("event", Event(timing=not int(Flags) & _DISABLE_TIMING))

    @driver_call(release=True)
    def cuEventDestroy(self, hEvent):
        return self._remove("event", hEvent)

    @driver_call()
    def cuEventRecord(self, hEvent, hStream):
        stream, event = self.stream(hStream), self._object("event", hEvent)
        if stream is None or event is None:
            return "CUDA_ERROR_INVALID_HANDLE"
        if stream.capture is not None:
            return self.record_in_capture(stream, event)
        self.streams.record(event, stream)

    @driver_call(unsafe=True)
    def cuEventSynchronize(self, hEvent):
        if (event := self._object("event", hEvent)) is None:
            return "CUDA_ERROR_INVALID_HANDLE"
        if event.record is not None:
            self.streams.wait(*event.record)

    @driver_call(unsafe=True)
    def cuEventQuery(self, hEvent):
        if (event := self._object("event", hEvent)) is None:
            return "CUDA_ERROR_INVALID_HANDLE"
        return None if event.record is None else self._query(*event.record)

    @driver_call(1)
    def cuEventElapsedTime(self, hStart, hEnd):
        events = [self._object("event", one) for one in (hStart, hEnd)]
        if any(one is None or not one.timing or one.record is None for one in events):
            return "CUDA_ERROR_INVALID_HANDLE"
        if any(one.record[0].done < one.record[1] for one in events):
            return "CUDA_ERROR_NOT_READY"
        return max(0.0, 0.01 * (events[1].record[1] - events[0].record[1]))

    def _query(self, stream: Stream, seq: int, clock: dict[int, int]) -> str | None:
        """Not ready as long as work is left; each look lets one more be done, so that a loop of looks ends."""
        if stream.done >= seq:
            self.streams.wait(stream, seq, clock)
            return None
        self.streams.run(stream, stream.done + 1)
        return "CUDA_ERROR_NOT_READY"

    def _new(self, kind: str, one: Any) -> Any:
        one.made_at = caller()
        return _KINDS[kind](self.handles.add(kind, one))

    def _remove(self, kind: str, given: Any) -> str | None:
        if self._object(kind, given) is None:
            return "CUDA_ERROR_INVALID_HANDLE"
        self.handles.remove(kind, self.handle(kind, given))
        return None


_CONTEXT = 0x4000_0000
_OWNED = ("stream", "event", "graph", "exec", "module", "library")


class _Uuid:
    """A CUuuid with bytes of our own."""

    def __init__(self, data: bytes) -> None:
        self.bytes = data


def _attributes(sm: tuple[int, int]) -> dict[Any, int]:
    a = real.CUdevice_attribute
    shared = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227}.get(sm, 99) << 10
    return {
        a.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: sm[0],
        a.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: sm[1],
        a.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 4,
        a.CU_DEVICE_ATTRIBUTE_WARP_SIZE: 32,
        a.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: 1024,
        a.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: 48 << 10,
        a.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: shared,
        a.CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: 1,
        a.CU_DEVICE_ATTRIBUTE_MAX_PITCH: (1 << 31) - 1,
        a.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: 4 << 20,
        a.CU_DEVICE_ATTRIBUTE_INTEGRATED: 0,
        a.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE: 0,
        a.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: 1_000_000,
        a.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: 256,
        a.CU_DEVICE_ATTRIBUTE_CLOCK_RATE: 1_000_000,
        a.CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: 1,
        a.CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID: 0,
        a.CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: 0,
    }
