"""Tokens drawn on the device: the sampling kernels of an engine's bundle, launched behind the logits.

Which kernels, over what grids, in which workspace: plugins/sampling/spec.py. What goes there is one copy a step, what
comes back another.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...plugins.kernel import Grid, Kernel
from ...plugins.sampling import spec
from ..batch import ROW_SAMPLE, SAMPLING_ROW, Int32Array, RecordArray, StepSampling
from ..errors import CudaError, EngineFileError
from .cuda import Context, PinnedMemory
from .kernel_bundle import EXTRA_POINTERS, ArgumentEntry, KernelBundle, LoadedKernel
from .staging import Staging, aligned

# Shared memory that every kernel may have without being asked for.
_PLAIN_SHARED_BYTES = 48 << 10
_FIRST_STAGING_BYTES = 1 << 20
_C_TYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float, "fp64": ctypes.c_double}


def check_kernel(loaded: LoadedKernel, kernel: Kernel) -> None:
    """Refuse a kernel of a bundle that is not launched as this version launches it; EngineFileError."""
    takes = [(one.name, one.type) for one in loaded.arguments]
    made = (loaded.constants, loaded.num_warps)
    if takes != list(kernel.signature.items()) or made != (dict(kernel.constants), kernel.num_warps):
        raise EngineFileError(
            f"the kernel {kernel.name} beside the plan was compiled by another version of plansmith, for other "
            "arguments; build the engine again with this one"
        )


def device_bytes(max_rows: int, vocab_size: int) -> int:
    """Return the device memory that a sampler allocates at first."""
    return (
        spec.workspace_bytes(max_rows, vocab_size)
        + max_rows * ROW_SAMPLE.itemsize
        + _first_staging_bytes(max_rows, vocab_size)
    )


def _first_staging_bytes(max_rows: int, vocab_size: int) -> int:
    """Return room for the rows, a mask for each, and the edits of ordinary requests."""
    masks = 4 * max_rows * -(-vocab_size // 32)
    return aligned(4 * spec.ROW_WORDS * max_rows) + aligned(masks) + _FIRST_STAGING_BYTES


@dataclasses.dataclass(frozen=True)
class _Launch:
    """A kernel ready to be launched: everything but its grid and stream.

    pointers : the addresses of its arguments' cells, itself at the address that a launch takes
    """

    function: Any
    num_threads: int
    shared_bytes: int
    pointers: ctypes.Array[ctypes.c_void_p]
    address: int


class DeviceSampler:
    """The kernels, loaded, and their memory. All methods need the CUDA context current.

    max_rows : rows of logits at most
    raises OutOfMemoryError, EngineFileError for a bundle whose kernels of sampling are not this version's
    """

    def __init__(self, context: Context, bundle: KernelBundle, max_rows: int, vocab_size: int) -> None:
        self._context = context
        self._vocab_size = vocab_size
        self._modules: list[Any] = []
        self._kernels: dict[str, _Launch] = {}
        # An argument is a cell that the launches of all kernels point at: a launch reads it, and is done with it.
        self._cells: dict[str, Any] = {}
        self._null = ctypes.c_void_p()
        self._num_rows = 0  # that the cells of the workspace's regions are set for
        self._addresses: list[int] = []
        self._pinned: PinnedMemory | None = None
        self._staging: Staging | None = None
        try:
            for kernel in spec.catalog():
                loaded = bundle.kernel(kernel.name)
                check_kernel(loaded, kernel)
                self._load(loaded)
            self._workspace = self._alloc(spec.workspace_bytes(max_rows, vocab_size))
            self._samples = self._alloc(max_rows * ROW_SAMPLE.itemsize)
            self._pinned = context.alloc_pinned(max_rows * ROW_SAMPLE.itemsize)
            self._staging = Staging(context, _first_staging_bytes(max_rows, vocab_size))
            self._rows = np.zeros((max_rows, spec.ROW_WORDS), np.int32)
            self._set({**spec.scalars(vocab_size), "samples": self._samples})
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
        cells = [self._cell(one) for one in kernel.arguments]
        cells += [self._null] * EXTRA_POINTERS
        pointers = (ctypes.c_void_p * len(cells))(*map(ctypes.addressof, cells))
        self._kernels[kernel.name] = _Launch(
            function, 32 * kernel.num_warps, kernel.shared_bytes, pointers, ctypes.addressof(pointers)
        )

    def _cell(self, argument: ArgumentEntry) -> Any:
        made = ctypes.c_void_p() if argument.is_pointer else _C_TYPES[argument.type.split(":")[0]]()
        return self._cells.setdefault(argument.name, made)

    def _set(self, values: Mapping[str, int]) -> None:
        for name, value in values.items():
            self._cells[name].value = value

    def launch(self, logits: int, row_idx: Int32Array, sampling: StepSampling, stream: Any) -> None:
        """Draw from logits on the device, in the stream; `collect` waits for it.

        logits : address of [N, V] float32
        row_idx : (N,) which of sampling's rows each is, -1 = it is drawn from too, and nobody asks for the result
        """
        rows = self._arranged(row_idx, sampling)
        edits, masks = sampling.edits.view(np.int32), sampling.masks.view(np.int32)
        self._set(self._send({"rows": rows, "edits": edits, "masks": masks}, stream))
        self._cells["logits"].value = logits
        if self._num_rows != row_idx.size:
            regions = spec.regions(row_idx.size, self._vocab_size)
            self._set({name: self._workspace + one.offset for name, one in regions.items()})
            self._num_rows = row_idx.size
        wanted = sampling.rows
        for name, grid in _steps(
            row_idx.size,
            self._vocab_size,
            bool((wanted["temperature"] > 0).any()),
            bool((wanted["top_k"] > 0).any() or (wanted["top_p"] < 1).any()),
            bool((wanted["num_logprobs"] > 0).any()),
        ):
            one = self._kernels[name]
            self._context.launch(one.function, grid, one.num_threads, one.shared_bytes, one.address, stream)

    def _arranged(self, row_idx: Int32Array, sampling: StepSampling) -> Int32Array:
        """Return the rows of `sampling` as words [N, 12] in the order of the logits, greedy ones where nobody asks."""
        given = sampling.rows.view(np.int32).reshape(-1, spec.ROW_WORDS)
        rows = self._rows[: row_idx.size]
        wanted = row_idx >= 0
        rows[:] = given[row_idx]
        if not wanted.all():
            rows[~wanted] = _NOBODYS
        return rows

    def _send(self, arrays: Mapping[str, Any], stream: Any) -> dict[str, int]:
        """Copy what the kernels read; the buffers grow to what a step brings: its edits have no bound."""
        assert self._staging is not None
        needed = sum(array.nbytes + 256 for array in arrays.values())
        if needed > self._staging.capacity:
            # Whichever of the two fails, the old one stays, in which copies may be waiting.
            self._context.wait(stream)
            grown = Staging(self._context, 2 * needed)
            self._staging, old = grown, self._staging
            old.close()
        return self._staging.send(arrays, stream)

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


@functools.lru_cache(maxsize=1024)
def _steps(
    num_rows: int, vocab_size: int, sampled: bool, filtered: bool, logprobs: bool
) -> list[tuple[str, Grid]]:
    """Return spec.steps as names and grids."""
    found = spec.steps(num_rows, vocab_size, sampled=sampled, filtered=filtered, logprobs=logprobs)
    return [(one.kernel.name, one.grid) for one in found]


def _nobodys_row() -> Int32Array:
    row = np.zeros(1, SAMPLING_ROW)
    row["mask_idx"], row["top_p"] = -1, 1.0
    return row.view(np.int32)


_NOBODYS = _nobodys_row()


def _quietly(release: Any, what: Any) -> None:
    with contextlib.suppress(CudaError):
        release(what)
