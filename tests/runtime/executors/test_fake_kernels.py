"""Kernel launches in the double: parameters as a real cubin has them, every access checked."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cubin import kernel_parameters
from fake_cuda import FakeCuda
from fake_engines import TARGET
from fake_machine import KERNELS, Machine
from fake_memory import DoubleError
from plansmith.plugins.sampling import spec
from plansmith.runtime.batch import SAMPLING_ROW
from plansmith.runtime.executors import kernel_bundle

VOCAB = 320
SCAN = KERNELS["sampling_scan"]
POINTER, INT = ctypes.c_void_p, ctypes.c_int32


def bundle_of(engine: Any) -> Path:
    folder: Path = engine.path / "targets" / TARGET / "kernels"
    return folder


def test_parameters_of_cubins_are_the_signatures(rtx_engine: Callable[..., Any]) -> None:
    """What the driver reads from a cubin is the order and sizes of the description, and two pointers."""
    loaded = kernel_bundle.load(bundle_of(rtx_engine()), 89)
    assert set(loaded.kernels) == {one.name for one in spec.catalog()}
    for one in loaded.kernels.values():
        sizes = [8 if kind.startswith("*") else 4 for kind in KERNELS[one.name].signature.values()] + [8, 8]
        assert [size for _, size in kernel_parameters(one.cubin)[one.symbol]] == sizes


def test_only_cubins_have_parameters() -> None:
    with pytest.raises(ValueError, match="no cubin"):
        kernel_parameters(b"text")


class Launch:
    """A launch of the scan of one row of logits, to be spoilt before it is made."""

    def __init__(self, engine: Any) -> None:
        machine = Machine(engine)
        cuda: FakeCuda = machine.cuda
        self.cuda = cuda
        cuda.cuInit(0)
        cuda.cuCtxPushCurrent(cuda.cuDevicePrimaryCtxRetain(0)[1])
        kernel = kernel_bundle.load(bundle_of(engine), 89).kernel(SCAN.name)
        self.cubin = kernel.cubin
        module = cuda.cuModuleLoadData(kernel.cubin)[1]
        self.function = cuda.cuModuleGetFunction(module, kernel.symbol.encode())[1]
        self.stream = cuda.cuStreamCreate(1)[1]
        self.values: dict[str, Any] = {}
        regions = spec.regions(1, VOCAB)
        for name, type_name in SCAN.signature.items():
            if name in regions:
                size = 8 * int(np.prod(regions[name].shape))
            else:
                size = {"logits": VOCAB * 4, "rows": SAMPLING_ROW.itemsize}.get(name, 64)
            self.values[name] = self.device(size) if type_name.startswith("*") else 0
        self.values |= {"vocab_size": VOCAB, "mask_words": VOCAB // 32}
        row = np.zeros(1, SAMPLING_ROW)
        row["mask_idx"] = -1
        cuda.cuMemcpyHtoD(self.values["rows"], row.view(np.uint8), row.nbytes)
        self.logits = np.random.default_rng(1).standard_normal(VOCAB).astype(np.float32)
        cuda.cuMemcpyHtoD(self.values["logits"], self.logits.view(np.uint8), VOCAB * 4)
        self.types = [POINTER if kind.startswith("*") else INT for kind in SCAN.signature.values()] + [
            POINTER
        ] * 2
        self.extra = [0, 0]
        self.warps = SCAN.num_warps
        self.grid = (1, 1, 1)

    def device(self, size: int) -> int:
        return int(self.cuda.cuMemAlloc(size)[1])

    def make(self) -> Any:
        values = [*(self.values[name] for name in SCAN.signature), *self.extra]
        params = (tuple(values), tuple(self.types))
        return self.cuda.cuLaunchKernel(
            self.function, *self.grid, 32 * self.warps, 1, 1, 0, self.stream, params, 0
        )[0]

    def run(self) -> None:
        assert self.make().name == "CUDA_SUCCESS"
        self.cuda.cuStreamSynchronize(self.stream)


@pytest.fixture
def launch(rtx_engine: Callable[..., Any]) -> Launch:
    return Launch(rtx_engine())


def test_a_launch_runs_the_kernel_when_it_is_waited_for(launch: Launch) -> None:
    best = np.zeros(1, np.float32)
    assert launch.make().name == "CUDA_SUCCESS"
    launch.cuda.cuStreamSynchronize(launch.stream)
    launch.cuda.cuMemcpyDtoH(best.view(np.uint8), launch.values["chunk_best"], 4)
    assert best[0] == launch.logits.max()
    assert launch.cuda.memory.violations == []


def test_parameters_may_be_an_array_of_addresses(launch: Launch) -> None:
    held = [kind(value) for kind, value in zip(launch.types, [*launch.values.values(), 0, 0], strict=True)]
    addresses = np.array([ctypes.addressof(one) for one in held], np.uint64)
    result = launch.cuda.cuLaunchKernel(
        launch.function, 1, 1, 1, 32 * launch.warps, 1, 1, 0, launch.stream, addresses, 0
    )
    assert result[0].name == "CUDA_SUCCESS"
    launch.cuda.cuStreamSynchronize(launch.stream)
    assert launch.cuda.memory.violations == []


def spoil_type(launch: Launch) -> None:
    launch.types[-3] = ctypes.c_int64


def spoil_count(launch: Launch) -> None:
    launch.types.pop()
    launch.extra.pop()


def spoil_null(launch: Launch) -> None:
    launch.extra[0] = launch.values["logits"]


def spoil_warps(launch: Launch) -> None:
    launch.warps *= 2


def spoil_order(launch: Launch) -> None:
    launch.values["logits"], launch.values["vocab_size"] = launch.values["vocab_size"], 1


def spoil_freed(launch: Launch) -> None:
    launch.cuda.cuMemFree(launch.values["adjusted"])


def spoil_small(launch: Launch) -> None:
    launch.values["block_best"] = launch.device(64)


def spoil_rows(launch: Launch) -> None:
    launch.grid = (1, 2, 1)


@pytest.mark.parametrize(
    "spoil,words",
    [
        (spoil_type, "takes parameters of .* bytes"),
        (spoil_count, "takes parameters of .* bytes, the launch gives"),
        (spoil_null, "two null pointers behind its arguments"),
        (spoil_warps, "compiled for 4 warps and is launched with"),
        (spoil_order, "is no address of device"),
        (spoil_freed, "use after free"),
        (spoil_small, "outside device memory of 64 bytes"),
        (spoil_rows, "outside device memory of"),
    ],
)
def test_wrong_launches_are_caught(launch: Launch, spoil: Any, words: str) -> None:
    spoil(launch)
    with pytest.raises(DoubleError, match=words):
        launch.run()


def test_what_the_driver_refuses(launch: Launch) -> None:
    launch.grid = (0, 1, 1)
    assert launch.make().name == "CUDA_ERROR_INVALID_VALUE"
    launch.grid = (1, 1 << 16, 1)
    assert launch.make().name == "CUDA_ERROR_INVALID_VALUE"
    assert launch.cuda.cuModuleLoadData(b"text")[0].name == "CUDA_ERROR_INVALID_IMAGE"
    module = launch.cuda.cuModuleLoadData(launch.cubin)[1]
    assert launch.cuda.cuModuleGetFunction(module, b"nothing")[0].name == "CUDA_ERROR_NOT_FOUND"
    function = launch.cuda.cuModuleGetFunction(module, b"scan")[1]
    launch.cuda.cuModuleUnload(module)
    launch.function = function
    with pytest.raises(DoubleError, match="a function was used after it was destroyed"):
        launch.make()


def test_a_kernel_and_a_copy_on_another_stream_race(launch: Launch) -> None:
    other = launch.cuda.cuStreamCreate(1)[1]
    launch.cuda.cuMemsetD8Async(launch.values["logits"], 0, VOCAB * 4, other)
    launch.cuda.cuStreamSynchronize(launch.stream)
    assert launch.make().name == "CUDA_SUCCESS"
    launch.cuda.cuStreamSynchronize(launch.stream)
    with pytest.raises(DoubleError, match="race"):
        launch.cuda.cuStreamSynchronize(other)
