"""The CUDA driver's calls that the executor uses, each checked; the only door to cuda.bindings.driver.

`Driver` takes the module itself, or an object with the same functions (a test's double): each returns a tuple whose
first element is the CUresult. Handles stay the driver's own objects; addresses are ints.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CudaError, OutOfMemoryError, UnsupportedError

ByteArray = npt.NDArray[np.uint8]

OUT_OF_MEMORY = 2
NO_DEVICE = 100
# After these the context is lost: every later call of this process fails with the same error.
STICKY = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721})

_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_CAPTURE_THREAD_LOCAL = "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL"


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU that this process may use; `index` counts those that CUDA_VISIBLE_DEVICES leaves.

    uuid : "GPU-..." as nvidia-smi -L prints it
    sm : "sm89"
    """

    index: int
    name: str
    uuid: str
    sm: str
    total_bytes: int


class StickyCudaError(CudaError):
    """A CUDA call failed and took the context with it: nothing on this device works any more in this process."""


class CudaOutOfMemoryError(CudaError, OutOfMemoryError):
    """The device, or what can be page-locked, has no memory left for a CUDA call; any of them may say so."""


@dataclasses.dataclass(frozen=True)
class PinnedMemory:
    """Page-locked host memory: its address and its bytes, valid until it is freed."""

    address: int
    bytes: ByteArray


@dataclasses.dataclass(frozen=True)
class Copy3D:
    """A box of bytes between two pitched layouts: `depth` slices of `height` rows of `width` bytes.

    pitch : bytes from row to row; rows : rows from slice to slice
    """

    source: int
    source_is_host: bool
    source_pitch: int
    source_rows: int
    target: int
    target_is_host: bool
    target_pitch: int
    target_rows: int
    width: int
    height: int
    depth: int


def load_bindings() -> Any:
    """Return cuda.bindings.driver; UnsupportedError names the extra to install."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise UnsupportedError(
            f"running a plan on a GPU needs cuda-python, which cannot be loaded ({error}); "
            "run: pip install 'plansmith[gpu]', or open the cpu target of an engine that has it"
        ) from error


class Driver:
    """The driver, initialized. Any thread, but most calls need a current context (`Context.current`)."""

    def __init__(self, bindings: Any) -> None:
        """Initialize it; UnsupportedError when this machine has no working driver."""
        self._api = bindings
        try:
            self.call("cuInit", 0)
        except (CudaError, RuntimeError) as error:  # bindings raise RuntimeError where libcuda is missing
            text = (
                "this machine has no working NVIDIA driver"
                if not _is(error, NO_DEVICE)
                else "the driver sees no GPU"
            )
            why = error if isinstance(error, CudaError) else "libcuda.so.1 cannot be loaded"
            raise UnsupportedError(
                f"{text} ({why}); check that `nvidia-smi` lists a GPU, in a container that it was started with "
                "--gpus all, and that CUDA_VISIBLE_DEVICES names one; or open the cpu target of an engine that has it"
            ) from error

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver and return what it gives: nothing, a value, or a tuple.

        raises CudaError with the driver's name and text of the error: a CudaOutOfMemoryError, a StickyCudaError, or
            neither
        """
        result = getattr(self._api, name)(*arguments)
        if int(result[0]) != 0:
            raise self._error(name, result[0])
        if len(result) == 1:
            return None
        return result[1] if len(result) == 2 else result[1:]

    def _error(self, name: str, status: Any) -> CudaError:
        code = int(status)
        words = [
            self._text(getattr(self._api, function)(status))
            for function in ("cuGetErrorName", "cuGetErrorString")
        ]
        text = f"{name} failed: {words[0] or code}, {words[1] or 'unknown error'}"
        if code == OUT_OF_MEMORY:
            return CudaOutOfMemoryError(text)
        error = StickyCudaError if code in STICKY else CudaError
        made = error(
            f"{text}; the GPU's context is lost, so every request fails from here on: restart the process, and if it "
            "happens again report it with the request that caused it"
            if code in STICKY
            else text
        )
        made.code = code  # type: ignore[attr-defined]
        return made

    @staticmethod
    def _text(result: tuple[Any, ...]) -> str:
        text = result[1] if len(result) > 1 else None
        return text.decode(errors="replace") if isinstance(text, bytes) else str(text or "")

    @property
    def version(self) -> tuple[int, int]:
        """The CUDA version that the driver supports, e.g. (13, 0)."""
        number = int(self.call("cuDriverGetVersion"))
        return number // 1000, number % 1000 // 10

    def devices(self) -> list[Device]:
        """Return the GPUs that this process may use, in the driver's order."""
        return [self._device(index) for index in range(int(self.call("cuDeviceGetCount")))]

    def _device(self, index: int) -> Device:
        handle = self.call("cuDeviceGet", index)
        attributes = self._api.CUdevice_attribute
        major, minor = (
            int(
                self.call(
                    "cuDeviceGetAttribute",
                    getattr(attributes, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{which}"),
                    handle,
                )
            )
            for which in ("MAJOR", "MINOR")
        )
        name = self.call("cuDeviceGetName", 256, handle).split(b"\0", 1)[0].decode(errors="replace")
        uuid = bytes(self.call("cuDeviceGetUuid", handle).bytes).hex()
        parts = (uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:])
        total = int(self.call("cuDeviceTotalMem", handle))
        return Device(index, name, "GPU-" + "-".join(parts), f"sm{major}{minor}", total)

    def open(self, device: Device) -> Context:
        """Retain the device's primary context, which other libraries of the process share."""
        handle = self.call("cuDeviceGet", device.index)
        return Context(self, device, handle, self.call("cuDevicePrimaryCtxRetain", handle))

    def copy_struct(self, copy: Copy3D) -> Any:
        """Return a Copy3D as the driver takes it."""
        api = self._api
        struct = api.CUDA_MEMCPY3D()
        for side, is_host, address, pitch, rows in (
            ("src", copy.source_is_host, copy.source, copy.source_pitch, copy.source_rows),
            ("dst", copy.target_is_host, copy.target, copy.target_pitch, copy.target_rows),
        ):
            kind = api.CUmemorytype.CU_MEMORYTYPE_HOST if is_host else api.CUmemorytype.CU_MEMORYTYPE_DEVICE
            setattr(struct, f"{side}MemoryType", kind)
            setattr(struct, f"{side}{'Host' if is_host else 'Device'}", address)
            setattr(struct, f"{side}Pitch", pitch)
            setattr(struct, f"{side}Height", rows)
        struct.WidthInBytes, struct.Height, struct.Depth = copy.width, copy.height, copy.depth
        return struct

    def capture_mode(self) -> Any:
        """Return the mode in which other threads' calls do not disturb a capture."""
        return getattr(self._api.CUstreamCaptureMode, _CAPTURE_THREAD_LOCAL)


class _Current(contextlib.AbstractContextManager[None]):
    """Context.current. Holds no state, so that blocks of several threads, and one in another, can share it."""

    def __init__(self, driver: Driver, context: Any) -> None:
        self._driver = driver
        self._context = context

    def __enter__(self) -> None:
        self._driver.call("cuCtxPushCurrent", self._context)

    def __exit__(self, *_error: object) -> None:
        with contextlib.suppress(CudaError):  # of a lost context; the error of the block matters
            self._driver.call("cuCtxPopCurrent")


class Context:
    """A device's primary context and what is made in it. All methods but `current` and `close` need it current.

    Whoever opens it closes it, after everything made in it has been released.
    """

    def __init__(self, driver: Driver, device: Device, handle: Any, context: Any) -> None:
        self.driver = driver
        self.device = device
        self._handle = handle
        self._current = _Current(driver, context)

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Make the context this thread's for the block, and give the thread back what it had. Any thread."""
        return self._current

    def close(self) -> None:
        """Give the context back. Never fails."""
        with contextlib.suppress(CudaError):
            self.driver.call("cuDevicePrimaryCtxRelease", self._handle)

    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes of the device."""
        free, total = self.driver.call("cuMemGetInfo")
        return int(free), int(total)

    def alloc(self, num_bytes: int) -> int:
        """Return the address of new device memory, aligned to 256 bytes at least."""
        return int(self.driver.call("cuMemAlloc", max(1, num_bytes)))

    def free(self, address: int) -> None:
        """Release device memory, when the work that uses it is done."""
        self.driver.call("cuMemFree", address)

    def alloc_pinned(self, num_bytes: int) -> PinnedMemory:
        """Return new page-locked host memory."""
        num_bytes = max(1, num_bytes)
        address = int(self.driver.call("cuMemHostAlloc", num_bytes, 0))
        array = (ctypes.c_uint8 * num_bytes).from_address(address)
        return PinnedMemory(address, np.ctypeslib.as_array(array))

    def free_pinned(self, memory: PinnedMemory) -> None:
        """Release page-locked memory; its array must not be used afterwards."""
        self.driver.call("cuMemFreeHost", memory.address)

    def stream(self) -> Any:
        """Return a new stream that does not wait for the default one."""
        return self.driver.call("cuStreamCreate", _STREAM_NON_BLOCKING)

    def destroy_stream(self, stream: Any) -> None:
        """Release a stream; work in it still ends."""
        self.driver.call("cuStreamDestroy", stream)

    def wait(self, stream: Any) -> None:
        """Wait until all work in a stream is done; raises what went wrong in it."""
        self.driver.call("cuStreamSynchronize", stream)

    def event(self) -> Any:
        """Return a new event without a time."""
        return self.driver.call("cuEventCreate", _EVENT_DISABLE_TIMING)

    def destroy_event(self, event: Any) -> None:
        """Release an event."""
        self.driver.call("cuEventDestroy", event)

    def record(self, event: Any, stream: Any) -> None:
        """Let an event happen when all work now in the stream is done."""
        self.driver.call("cuEventRecord", event, stream)

    def wait_event(self, event: Any) -> None:
        """Wait on the host for an event; at once when it was never recorded."""
        self.driver.call("cuEventSynchronize", event)

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: Any) -> None:
        """Copy pinned host memory to the device, in the stream."""
        self.driver.call("cuMemcpyHtoDAsync", target, source, num_bytes, stream)

    def copy_to_host(self, target: int, source: int, num_bytes: int, stream: Any) -> None:
        """Copy device memory to pinned host memory, in the stream."""
        self.driver.call("cuMemcpyDtoHAsync", target, source, num_bytes, stream)

    def copy_box(self, copy: Copy3D, stream: Any) -> None:
        """Copy a box of bytes, in the stream."""
        self.driver.call("cuMemcpy3DAsync", self.driver.copy_struct(copy), stream)

    def zero(self, address: int, num_bytes: int, stream: Any) -> None:
        """Set device memory to zero, in the stream."""
        self.driver.call("cuMemsetD8Async", address, 0, num_bytes, stream)

    def begin_capture(self, stream: Any) -> None:
        """Record what is given to the stream instead of running it."""
        self.driver.call("cuStreamBeginCapture", stream, self.driver.capture_mode())

    def end_capture(self, stream: Any) -> Any:
        """Return the recorded graph, instantiated."""
        graph = self.driver.call("cuStreamEndCapture", stream)
        try:
            return self.driver.call("cuGraphInstantiate", graph, 0)
        finally:
            # An error of earlier work, which every later call reports too, is no reason to lose the graph.
            with contextlib.suppress(CudaError):
                self.driver.call("cuGraphDestroy", graph)

    def launch_graph(self, graph: Any, stream: Any) -> None:
        """Run an instantiated graph in the stream."""
        self.driver.call("cuGraphLaunch", graph, stream)

    def destroy_graph(self, graph: Any) -> None:
        """Release an instantiated graph, when no run of it is left."""
        self.driver.call("cuGraphExecDestroy", graph)

    def load_module(self, image: bytes) -> Any:
        """Load a cubin or PTX."""
        return self.driver.call("cuModuleLoadData", image)

    def unload_module(self, module: Any) -> None:
        """Release a module and its functions."""
        self.driver.call("cuModuleUnload", module)

    def function(self, module: Any, symbol: str) -> Any:
        """Return a module's kernel by its name."""
        return self.driver.call("cuModuleGetFunction", module, symbol.encode())

    def allow_shared_memory(self, function: Any, num_bytes: int) -> None:
        """Let a kernel have more dynamic shared memory than the 48 KiB that are always there."""
        attribute = self.driver._api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.driver.call("cuFuncSetAttribute", function, attribute, num_bytes)

    def launch(
        self,
        function: Any,
        grid: tuple[int, int, int],
        num_threads: int,
        shared_bytes: int,
        arguments: int,
        stream: Any,
    ) -> None:
        """Launch a kernel in the stream.

        arguments : address of an array with the address of each argument, all of them read before this returns
        """
        self.driver.call(
            "cuLaunchKernel", function, *grid, num_threads, 1, 1, shared_bytes, stream, arguments, 0
        )


def _is(error: BaseException, code: int) -> bool:
    return getattr(error, "code", None) == code
