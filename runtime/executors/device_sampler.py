"""Tokens drawn on the device: the sampling kernels of an engine's bundle, launched behind the logits.

Which kernels, over what grids, in which workspace: plugins/sampling/spec.py. What goes there is one copy a step, what
comes back another.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...plugins.sampling import spec
from ..batch import ROW_SAMPLE, SAMPLING_ROW, Int32Array, RecordArray, StepSampling
from ..errors import CudaError
from .cuda import Context, PinnedMemory
from .kernel_bundle import EXTRA_POINTERS, KernelBundle, LoadedKernel
from .staging import Staging

# Shared memory that every kernel may have without being asked for.
_PLAIN_SHARED_BYTES = 48 << 10
_FIRST_STAGING_BYTES = 1 << 20
_C_TYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float, "fp64": ctypes.c_double}


def device_bytes(max_rows: int, vocab_size: int) -> int:
    """Return the device memory that a sampler allocates at first."""
    return spec.workspace_bytes(max_rows, vocab_size) + max_rows * ROW_SAMPLE.itemsize + _FIRST_STAGING_BYTES


class DeviceSampler:
    """The kernels, loaded, and their memory. All methods need the CUDA context current.

    max_rows : rows of logits at most
    raises OutOfMemoryError, EngineFileError for a bundle without a kernel of sampling
    """

    def __init__(self, context: Context, bundle: KernelBundle, max_rows: int, vocab_size: int) -> None:
        self._context = context
        self._vocab_size = vocab_size
        self._modules: list[Any] = []
        self._kernels: dict[str, tuple[Any, LoadedKernel]] = {}
        self._addresses: list[int] = []
        self._pinned: PinnedMemory | None = None
        self._staging: Staging | None = None
        try:
            for kernel in spec.catalog():
                self._load(bundle.kernel(kernel.name))
            self._workspace = self._alloc(spec.workspace_bytes(max_rows, vocab_size))
            self._samples = self._alloc(max_rows * ROW_SAMPLE.itemsize)
            self._pinned = context.alloc_pinned(max_rows * ROW_SAMPLE.itemsize)
            self._staging = Staging(context, _FIRST_STAGING_BYTES)
        except BaseException:
            self.close()
            raise

    def _alloc(self, num_bytes: int) -> int:
        self._addresses.append(self._context.alloc(num_bytes))
        return self._addresses[-1]

    def _load(self, kernel: LoadedKernel) -> None:
        module = self._context.load_module(kernel.cubin)
        self._modules.append(module)
        function = self._context.function(module, kernel.symbol)
        if kernel.shared_bytes > _PLAIN_SHARED_BYTES:
            self._context.allow_shared_memory(function, kernel.shared_bytes)
        self._kernels[kernel.name] = (function, kernel)

    def launch(self, logits: int, row_idx: Int32Array, sampling: StepSampling, stream: Any) -> None:
        """Draw from logits on the device, in the stream; `collect` waits for it.

        logits : address of [N, V] float32
        row_idx : (N,) which of sampling's rows each is, -1 = it is drawn from too, and nobody asks for the result
        """
        rows = np.zeros(row_idx.size, SAMPLING_ROW)
        rows["mask_idx"] = -1
        rows["top_p"] = 1.0
        wanted = row_idx >= 0
        rows[wanted] = sampling.rows[row_idx[wanted]]
        sent = self._send({"rows": rows, "edits": sampling.edits, "masks": sampling.masks}, stream)
        regions = _regions(row_idx.size, self._vocab_size)
        values: dict[str, int] = {
            **{name: self._workspace + region.offset for name, region in regions.items()},
            **spec.scalars(self._vocab_size),
            **sent,
            "logits": logits,
            "samples": self._samples,
        }
        steps = spec.steps(
            row_idx.size,
            self._vocab_size,
            sampled=bool((rows["temperature"] > 0).any()),
            filtered=bool(((rows["top_k"] > 0) | (rows["top_p"] < 1)).any()),
            logprobs=bool((rows["num_logprobs"] > 0).any()),
        )
        for step in steps:
            self._run(step.kernel.name, step.grid, values, stream)

    def _send(self, arrays: Mapping[str, Any], stream: Any) -> dict[str, int]:
        """Copy what the kernels read; the buffers grow to what a step brings: its edits have no bound."""
        assert self._staging is not None
        needed = sum(array.nbytes + 256 for array in arrays.values())
        if needed > self._staging.capacity:
            self._context.wait(stream)
            self._staging.close()
            self._staging = Staging(self._context, 2 * needed)
        return self._staging.send(arrays, stream)

    def _run(self, name: str, grid: tuple[int, int, int], values: Mapping[str, int], stream: Any) -> None:
        function, kernel = self._kernels[name]
        arguments = [values[one.name] for one in kernel.arguments] + [0] * EXTRA_POINTERS
        types = [
            ctypes.c_void_p if one.is_pointer else _C_TYPES[one.type.split(":")[0]]
            for one in kernel.arguments
        ]
        types += [ctypes.c_void_p] * EXTRA_POINTERS
        self._context.launch(
            function,
            grid,
            32 * kernel.num_warps,
            kernel.shared_bytes,
            (tuple(arguments), tuple(types)),
            stream,
        )

    def collect(self, num_rows: int, stream: Any) -> RecordArray:
        """Wait for what was launched and return it: (num_rows,) ROW_SAMPLE, valid until the next launch."""
        assert self._pinned is not None
        num_bytes = num_rows * ROW_SAMPLE.itemsize
        self._context.copy_to_host(self._pinned.address, self._samples, num_bytes, stream)
        self._context.wait(stream)
        samples: RecordArray = self._pinned.bytes[:num_bytes].view(ROW_SAMPLE)
        return samples

    def close(self) -> None:
        """Release everything, when the stream's work is done. Never fails; twice is fine."""
        if self._staging is not None:
            self._staging.close()
        with contextlib.ExitStack() as stack:
            for module in self._modules:
                stack.callback(_quietly, self._context.unload_module, module)
            for address in self._addresses:
                stack.callback(_quietly, self._context.free, address)
            if self._pinned is not None:
                stack.callback(_quietly, self._context.free_pinned, self._pinned)
        self._staging, self._pinned = None, None
        self._modules, self._addresses = [], []


@functools.lru_cache(maxsize=64)
def _regions(num_rows: int, vocab_size: int) -> dict[str, spec.Region]:
    return spec.regions(num_rows, vocab_size)


def _quietly(release: Any, what: Any) -> None:
    with contextlib.suppress(CudaError):
        release(what)
