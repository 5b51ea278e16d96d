"""A machine with a GPU, for whoever opens an engine: the doubles of the driver and of TensorRT."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import FakeCuda
from fake_engines import TARGET, RtxEngine
from fake_tensorrt import FakeTensorRt
from plansmith.plugins.kernel import Kernel
from plansmith.plugins.sampling import spec as sampling
from plansmith.runtime.engine import Engine
from plansmith.runtime.executors import cuda as cuda_door
from plansmith.runtime.executors import kernel_bundle
from plansmith.runtime.executors import opening as gpu_opening
from plansmith.runtime.executors import trt as trt_door
from plansmith.runtime.executors.executor import TensorRtExecutor
from plansmith.runtime.manifest import load_manifest

_OPEN = gpu_opening.open_tensorrt  # which `installed` replaces

KERNELS: dict[str, Kernel] = {one.name: one for one in sampling.catalog()}


class Machine:
    """A GPU, its driver and TensorRT-RTX, found by whatever opens an engine while `installed`."""

    def __init__(
        self,
        *engines: RtxEngine,
        is_rtx: bool = True,
        device_sampling: bool = False,
        plan_options: Any = None,
        **gpu: Any,
    ) -> None:
        """Make it; device_sampling : the interpreter takes 50 ms a kernel, so only tests of that ask for it."""
        self.cuda = FakeCuda(**gpu)
        self.device_sampling = device_sampling
        # TensorRT's own plans are packed ones, see fake_packed.py.
        version = {} if is_rtx else {"version": "11.4.0"}
        self.trt = FakeTensorRt(self.cuda, is_rtx=is_rtx, **version)
        for engine in engines:
            self.know(engine, **(plan_options or {}))

    def know(self, engine: RtxEngine, **options: Any) -> None:
        """Learn an engine's plans and kernels."""
        self.trt.know(engine.plan(**options), engine.plan_bytes)
        if engine.draft_graph is not None:
            self.trt.know(engine.draft_plan(), engine.draft_plan_bytes)
        for bundle in engine.path.rglob(kernel_bundle.BUNDLE_NAME):
            for one in kernel_bundle.read_bundle(bundle.parent).kernels:
                kernel = KERNELS[one.name]
                # What a launch is made of must be what was compiled.
                assert [(a.name, a.type) for a in one.arguments] == list(kernel.signature.items())
                assert (one.num_warps, one.constants) == (kernel.num_warps, dict(kernel.constants))
                for cubin in one.cubins:
                    self.cuda.know(kernel, (bundle.parent / cubin.file).read_bytes(), one.symbol)

    @contextmanager
    def installed(self) -> Iterator[Machine]:
        """Be what `cuda.bindings.driver` and `tensorrt_rtx` are."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_door, "load_bindings", lambda: self.cuda)
            patch.setattr(trt_door, "load_library", lambda name: trt_door.Library(self.trt, name))
            patch.setattr(gpu_opening, "open_tensorrt", self._open)
            yield self

    def _open(self, manifest: Any, target: str, options: Any, **more: Any) -> TensorRtExecutor:
        options = dataclasses.replace(options, device_sampling=self.device_sampling)
        return _OPEN(manifest, target, options, **more)

    def engine(self, path: Path, *, target: str = TARGET, **options: Any) -> Engine:
        """Open an engine on this machine."""
        options = {"kv_cache_bytes": 1 << 20, **options}
        with self.installed():
            return Engine.open(path, target, **options)

    def executor(self, path: Path, *, target: str = TARGET, **options: Any) -> TensorRtExecutor:
        """Open the executor alone."""
        library = trt_door.Library(self.trt, "tensorrt_rtx" if self.trt.is_rtx else "tensorrt")
        return _OPEN(load_manifest(path), target, bindings=self.cuda, library=library, **options)

    def problems(self) -> list[str]:
        """Return every violation and leak, once the last engine is closed."""
        gc.collect()  # TensorRT's objects go with their last reference
        found = self.cuda.problems()
        return found + [f"leak: TensorRT's {type(one).__name__} is alive" for one in self.cuda.trt_objects]
