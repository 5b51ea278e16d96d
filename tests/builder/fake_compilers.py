"""Stand-ins for what compiles GPU plans and device kernels; the real ones have tests of their own."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from plansmith.builder import compile
from plansmith.builder.targets.registry import Target
from plansmith.plugins.aot import CompiledKernel, Progress
from plansmith.plugins.kernel import Kernel
from plansmith.plugins.resources import Resources


class FakeRtx:
    """Takes the place of compile._compile_rtx. errors : name of a target -> what it fails with."""

    def __init__(self) -> None:
        self.errors: dict[str, Exception | None] = {}

    def __call__(
        self,
        request: compile.CompileRequest,
        targets: list[Target],
        work: pathlib.Path,
        progress: compile.Progress,
        keep_going: bool,
    ) -> Iterator[tuple[Target, Any]]:
        for target in targets:
            error = self.errors.get(target.name)
            if error is not None:
                if not keep_going:
                    raise error
                yield target, error
                continue
            plan = request.folder(work, target) / "model.plan"
            plan.write_bytes(target.name.encode())
            yield target, compile.Compiled("fake", "1", (plan,), (), 0.0, 0, {})


class FakeKernelCompiler:
    """Takes the place of aot.compile_tasks. error : what it fails with; calls : the tasks of each call."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.calls: list[list[tuple[str, int]]] = []

    def __call__(
        self,
        tasks: Sequence[tuple[Kernel, int]],
        jobs: int | None = None,
        cache_dir: None = None,
        progress: Progress | None = None,
    ) -> list[CompiledKernel]:
        self.calls.append([(kernel.name, sm) for kernel, sm in tasks])
        if self.error is not None:
            raise self.error
        resources = Resources(32, 0, 0, 0, 0, 0)
        return [
            CompiledKernel(
                kernel, sm, "f", f"{kernel.name} {sm}".encode(), "", 256, kernel.num_warps, resources, 0.1
            )
            for kernel, sm in tasks
        ]
