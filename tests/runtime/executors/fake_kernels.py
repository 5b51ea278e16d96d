"""Modules and kernel launches of the double's driver: the Triton language's interpreter on the double's memory.

A module's image is a real cubin. Its parameter layout decides how the launch's parameters are read, as in the driver;
what the kernel does is run from its description (plugins/kernel.py). Every load and store is checked.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections.abc import Iterator
from typing import Any

import cuda.bindings.driver as real
import numpy as np
from fake_calls import driver_call
from fake_cubin import image_size, is_cubin, kernel_parameters
from fake_memory import caller
from fake_streams import Reach, Work
from plansmith.plugins.kernel import Kernel

_NUMBERS = {
    "i1": np.int8, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "fp32": np.float32, "fp64": np.float64,
}  # fmt: skip
_SCRATCH_POINTERS = 2  # Triton adds them behind the signature
_MAX_SHARED = real.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_STATIC_SHARED = 48 << 10


class Module:
    """A loaded image."""

    def __init__(self, image: bytes) -> None:
        self.digest = hashlib.sha256(image).hexdigest()
        self.parameters = kernel_parameters(image)
        self.made_at = caller()


class Function:
    """A kernel of a module."""

    def __init__(self, module: Module, symbol: str) -> None:
        self.module, self.symbol = module, symbol
        self.parameters = module.parameters[symbol]
        self.max_shared = _STATIC_SHARED
        self.made_at = caller()


class Kernels:
    """The functions of modules, libraries and launches."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], Kernel] = {}
        self.num_launches = 0

    def know(self, kernel: Kernel, image: bytes, symbol: str) -> None:
        """Say which kernel a symbol of an image is."""
        self.known[(hashlib.sha256(image).hexdigest(), symbol)] = kernel

    @driver_call(1, unsafe=True)
    def cuModuleLoadData(self: Any, image):
        return self._load("module", image)

    @driver_call(1, unsafe=True)
    def cuLibraryLoadData(
        self: Any,
        code,
        jitOptions,
        jitOptionsValues,
        numJitOptions,
        libraryOptions,
        libraryOptionValues,
        numLibraryOptions,
    ):
        return self._load("library", code)

    @driver_call(release=True, unsafe=True)
    def cuModuleUnload(self: Any, hmod):
        return self._unload("module", hmod)

    @driver_call(release=True, unsafe=True)
    def cuLibraryUnload(self: Any, library):
        return self._unload("library", library)

    @driver_call(1)
    def cuModuleGetFunction(self: Any, hmod, name):
        return self._get("module", hmod, name, "function")

    @driver_call(1)
    def cuLibraryGetKernel(self: Any, library, name):
        return self._get("library", library, name, "kernel")

    @driver_call()
    def cuFuncSetAttribute(self: Any, hfunc, attrib, value):
        function = self._function(hfunc)
        if function is None:
            return "CUDA_ERROR_INVALID_HANDLE"
        optin = self.attributes[real.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN]
        if attrib == _MAX_SHARED:
            if not 0 <= value <= optin:
                return "CUDA_ERROR_INVALID_VALUE"
            function.max_shared = max(value, _STATIC_SHARED)

    @driver_call()
    def cuLaunchKernel(
        self: Any,
        f,
        gridDimX,
        gridDimY,
        gridDimZ,
        blockDimX,
        blockDimY,
        blockDimZ,
        sharedMemBytes,
        hStream,
        kernelParams,
        extra,
    ):
        function, stream = self._function(f), self.stream(hStream)
        if function is None or stream is None:
            return "CUDA_ERROR_INVALID_HANDLE"
        grid = (int(gridDimX), int(gridDimY), int(gridDimZ))
        if not (0 < grid[0] < 1 << 31 and 0 < grid[1] < 1 << 16 and 0 < grid[2] < 1 << 16):
            return "CUDA_ERROR_INVALID_VALUE"
        if sharedMemBytes > function.max_shared:
            return "CUDA_ERROR_INVALID_VALUE"
        kernel = self.known.get((function.module.digest, function.symbol))
        if kernel is None:
            raise self.memory.violate(
                f"nobody said what kernel {function.symbol} of this image is; call know()"
            )
        threads = (blockDimX, blockDimY, blockDimZ)
        if threads != (kernel.num_warps * 32, 1, 1):
            raise self.memory.violate(
                f"{kernel.name} was compiled for {kernel.num_warps} warps and is launched with {threads} threads"
            )
        values = self._decode(function, kernel, kernelParams, extra)
        self.num_launches += 1
        work = Work(f"kernel {kernel.name}", lambda reach: self._run_kernel(kernel, grid, values, reach))
        for name, type_name in kernel.signature.items():
            if type_name.startswith("*") and values[name]:
                self.memory.find(int(values[name]), 1, f"{work.label}, argument {name}", "device", "host")
        self.streams.enqueue(stream, work)

    def _load(self: Any, kind: str, given: Any) -> Any:
        image = bytes(given) if not isinstance(given, int) else _image_at(given)
        if not is_cubin(image):
            return "CUDA_ERROR_INVALID_IMAGE"
        return self._new(kind, Module(image))

    def _unload(self: Any, kind: str, given: Any) -> str | None:
        module = self._object(kind, given)
        error: str | None = self._remove(kind, given)
        for one_kind, number, one in self.handles.live():
            if isinstance(one, Function) and one.module is module:
                self.handles.remove(one_kind, number)
        return error

    def _get(self: Any, kind: str, given: Any, name: Any, made: str) -> Any:
        module = self._object(kind, given)
        if module is None:
            return "CUDA_ERROR_INVALID_HANDLE"
        symbol = name.decode()  # the real binding takes bytes alone
        if symbol not in module.parameters:
            return "CUDA_ERROR_NOT_FOUND"
        return self._new(made, Function(module, symbol))

    def _function(self: Any, given: Any) -> Function | None:
        kind = "kernel" if isinstance(given, real.CUkernel) else "function"
        found: Function | None = self._object(kind, given)
        return found

    def _decode(self: Any, function: Function, kernel: Kernel, params: Any, extra: Any) -> dict[str, Any]:
        """Return argument -> number, read from memory at the sizes that the kernel has."""
        wanted = len(kernel.signature) + _SCRATCH_POINTERS
        if len(function.parameters) != wanted:
            raise self.memory.violate(
                f"{function.symbol} has {len(function.parameters)} parameters, {kernel.name} describes {wanted}"
            )
        if isinstance(params, tuple) and params:
            self._check_sizes(function, kernel, *params)
        if extra:
            raise self.memory.violate("cuLaunchKernel got both kernelParams and extra")
        helper = real._HelperKernelParams(params)
        pointers = np.ctypeslib.as_array((ctypes.c_uint64 * wanted).from_address(helper.ckernelParams))
        raw = [
            ctypes.string_at(int(p), size) for p, (_, size) in zip(pointers, function.parameters, strict=True)
        ]
        if any(int.from_bytes(one, "little") for one in raw[-_SCRATCH_POINTERS:]):
            raise self.memory.violate(f"{kernel.name} takes two null pointers behind its arguments")
        return {
            name: self._value(kernel, name, type_name, data)
            for (name, type_name), data in zip(kernel.signature.items(), raw, strict=False)
        }

    def _check_sizes(self: Any, function: Function, kernel: Kernel, values: Any, types: Any) -> None:
        sizes = [size for _, size in function.parameters]
        given = [8 if one is None else ctypes.sizeof(one) for one in types]
        if sizes != given or len(values) != len(sizes):
            raise self.memory.violate(
                f"{kernel.name} takes parameters of {sizes} bytes, the launch gives {len(values)} of {given}"
            )

    def _value(self: Any, kernel: Kernel, name: str, type_name: str, data: bytes) -> Any:
        base, _, promise = type_name.partition(":")
        if base.startswith("*"):
            number: Any = int.from_bytes(data, "little")
        else:
            number = np.frombuffer(data, _NUMBERS[base])[0].item()
        if promise and number % int(promise):
            raise self.memory.violate(
                f"argument {name} of {kernel.name} is {number:#x}, no multiple of {promise} as it was compiled for"
            )
        return number

    def _run_kernel(
        self: Any, kernel: Kernel, grid: tuple[int, int, int], values: dict[str, Any], reach: Reach
    ) -> None:
        from plansmith.plugins.torch_launch import launch

        arguments = {
            name: self._tensor(int(values[name]), type_name) if type_name.startswith("*") else values[name]
            for name, type_name in kernel.signature.items()
        }
        with _watched(self.memory, reach):
            launch(kernel, grid, arguments)

    def _tensor(self: Any, address: int, type_name: str) -> Any:
        """Return a torch tensor over an allocation from an address on; an empty one for a null pointer."""
        import torch

        dtype = _torch_dtypes(torch)[type_name[1:].partition(":")[0]]
        if address == 0:
            return torch.empty(0, dtype=dtype)
        found = self.memory.find(address, 1, "a kernel's argument", "device", "host")
        data = found.bytes[address - found.address :]
        whole = data[: data.size // dtype.itemsize * dtype.itemsize]
        return torch.from_numpy(whole).view(dtype)


def _torch_dtypes(torch: Any) -> dict[str, Any]:
    return {
        "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64,
        "i1": torch.bool, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
        "u8": torch.uint8, "u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64,
        "fp8e4nv": torch.float8_e4m3fn,
    }  # fmt: skip


def _image_at(address: int) -> bytes:
    header = ctypes.string_at(address, 64)
    return ctypes.string_at(address, image_size(header)) if is_cubin(header) else header


@contextlib.contextmanager
def _watched(memory: Any, reach: Reach) -> Iterator[None]:
    """Check each load and store of the interpreter; at the end tell `reach` what was read and written."""
    from triton.runtime import interpreter
    from triton.runtime.errors import InterpreterError

    real_one = interpreter._interpreter
    proxy = _Watch(real_one, memory, reach)
    interpreter._interpreter = proxy
    try:
        yield
    except InterpreterError as error:
        raise error.__cause__ or error from None
    finally:
        interpreter._interpreter = real_one
    for writes, address, size in proxy.ranges():
        (reach.write if writes else reach.read)(address, size)


class _Watch:
    """The interpreter's loads and stores, each address looked up before it is used."""

    def __init__(self, real_one: Any, memory: Any, reach: Reach) -> None:
        self._real, self._memory, self._reach = real_one, memory, reach
        self._seen: dict[tuple[bool, int], list[Any]] = {}  # (writes, element bytes) -> arrays of addresses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        """Check and load."""
        self._check(pointers, mask, np.dtype(dtype).itemsize, False)
        return self._real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        """Check and store."""
        self._check(pointers, mask, values.dtype.itemsize, True)
        return self._real.store(pointers, values, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, values: Any, mask: Any, order: Any) -> Any:
        """Check and change."""
        self._check(pointers, mask, values.dtype.itemsize, True)
        return self._real.atomic_rmw(operation, pointers, values, mask, order)

    def atomic_cas(self, pointers: Any, expected: Any, values: Any, order: Any) -> Any:
        """Check and exchange."""
        self._check(pointers, np.ones(np.shape(pointers), bool), values.dtype.itemsize, True)
        return self._real.atomic_cas(pointers, expected, values, order)

    def _check(self, pointers: Any, mask: Any, size: int, writes: bool) -> None:
        pointers, mask = np.broadcast_arrays(pointers, mask)
        used = np.unique(pointers[mask.astype(bool)])
        rest = used
        while rest.size:
            at = int(rest[0])
            found = self._memory.find(at, size, self._reach.what, "device", "host")
            inside = int(np.searchsorted(rest, found.end))
            last = int(rest[inside - 1])
            self._memory.find(last, size, self._reach.what, "device", "host")
            rest = rest[inside:]
        if used.size:
            self._seen.setdefault((writes, size), []).append(used)

    def ranges(self) -> list[tuple[bool, int, int]]:
        """Return (writes, address, bytes) of what was touched, ranges that touch put together."""
        out = []
        for (writes, size), arrays in self._seen.items():
            used = np.unique(np.concatenate(arrays)).astype(np.int64)
            starts = np.flatnonzero(np.diff(used, prepend=used[0] - size - 1) > size)
            ends = np.append(starts[1:], used.size) - 1
            out += [
                (writes, int(used[a]), int(used[b]) + size - int(used[a]))
                for a, b in zip(starts, ends, strict=True)
            ]
        return out
