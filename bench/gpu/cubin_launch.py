"""Launches a bundle's cubins on torch tensors through the CUDA driver, in the place of the JIT: what an engine does."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from plansmith.plugins import torch_launch
from plansmith.plugins.kernel import Grid, Kernel
from plansmith.runtime.executors.cuda import Context, Driver, load_bindings
from plansmith.runtime.executors.kernel_bundle import EXTRA_POINTERS, KernelBundle

C_TYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float, "fp64": ctypes.c_double}
PLAIN_SHARED_BYTES = 48 << 10


def source_key(kernels: Sequence[Kernel]) -> str:
    """Return the hash of the kernels and of all sources of plugins/, so that no older cubin is taken for today's."""
    found = hashlib.sha256("\n".join(map(repr, kernels)).encode())
    for path in sorted(Path(torch_launch.__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


class CubinLauncher:
    """A bundle's kernels on this process's GPU, in torch's own context and stream.

    In a dry run the arguments are laid out and checked as for the driver, and the interpreter runs the kernel.
    """

    def __init__(self, bundle: KernelBundle, dry_run: bool) -> None:
        """Take the primary context, which torch has as well."""
        self.bundle, self.launched = bundle, 0
        self._functions: dict[str, Any] = {}
        self._context: Context | None = None
        if not dry_run:
            self._api = load_bindings()
            driver = Driver(self._api)
            self._context = driver.open(driver.devices()[torch.cuda.current_device()])

    def launch(self, kernel: Kernel, grid: Grid, arguments: Mapping[str, Any]) -> None:
        """Launch the bundle's kernel of this name, as torch_launch.launch would the source."""
        found = self.bundle.kernel(kernel.name)
        names = [argument.name for argument in found.arguments]
        if names != list(kernel.signature) or dict(found.constants) != dict(kernel.constants):
            raise TypeError(f"{kernel.name} of the bundle takes {names} with {found.constants}, not {kernel}")
        values, types = [], []
        for argument in found.arguments:
            value = arguments[argument.name]
            value = value.data_ptr() if argument.is_pointer else value
            if argument.multiple_of > 1 and value % argument.multiple_of:
                raise ValueError(
                    f"{kernel.name}: {argument.name} is {value}, no multiple of {argument.multiple_of}"
                )
            values.append(value)
            types.append(ctypes.c_void_p if argument.is_pointer else C_TYPES[argument.type.split(":")[0]])
        self.launched += 1
        if self._context is None:
            torch_launch.launch(kernel, grid, arguments)
        elif 0 not in grid:
            extra = (0,) * EXTRA_POINTERS
            self._launch(found, grid, (*values, *extra), (*types, *(ctypes.c_void_p for _ in extra)))

    def _launch(self, found: Any, grid: Grid, values: tuple[Any, ...], types: tuple[Any, ...]) -> None:
        """Launch it in torch's stream; a cubin is loaded when it is first used."""
        assert self._context is not None
        with self._context.current():
            if found.name not in self._functions:
                module = self._context.load_module(found.cubin)
                function = self._context.function(module, found.symbol)
                if found.shared_bytes > PLAIN_SHARED_BYTES:
                    self._context.allow_shared_memory(function, found.shared_bytes)
                self._functions[found.name] = function
            stream = self._api.CUstream(torch.cuda.current_stream().cuda_stream)
            self._context.launch(
                self._functions[found.name],
                grid,
                32 * found.num_warps,
                found.shared_bytes,
                (values, types),
                stream,
            )

    @contextlib.contextmanager
    def instead_of_jit(self, module: ModuleType) -> Iterator[None]:
        """Let an operation's run.py launch through this within the block."""
        before = module.launch
        module.launch = self.launch  # type: ignore[attr-defined]
        try:
            yield
        finally:
            module.launch = before  # type: ignore[attr-defined]
