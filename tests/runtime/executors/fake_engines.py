"""Real builds of tiny checkpoints for TensorRT-RTX, with the graphs that were compiled kept for the double."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import pytest
from fake_plans import Plan, rtx_plan
from plansmith.builder import device_kernels
from plansmith.builder.build import build_engine, plan_build
from plansmith.builder.limits import Limits
from plansmith.builder.spec import DecoderSpec
from plansmith.builder.targets.rtx import schedule

TARGET = "sm89"


@dataclasses.dataclass(frozen=True)
class RtxEngine:
    """An engine directory with the targets cpu and sm89, and the lowered graphs of its plans by folder."""

    path: Path
    spec: DecoderSpec
    limits: Limits
    graph: Path
    draft_graph: Path | None = None

    @property
    def plan_bytes(self) -> bytes:
        """The plan file."""
        return (self.path / "targets" / TARGET / "model.plan").read_bytes()

    @property
    def draft_plan_bytes(self) -> bytes:
        """The draft's plan file."""
        return (self.path / "targets" / TARGET / "draft" / "model.plan").read_bytes()

    def plan(self, **options: Any) -> Plan:
        """Return what the plan file holds; options : fields of it that are to be other ones."""
        return dataclasses.replace(_plan(self.graph, self.spec, self.limits), **options)

    def draft_plan(self, **options: Any) -> Plan:
        """Return what the draft's plan file holds."""
        assert self.draft_graph is not None
        return dataclasses.replace(_plan(self.draft_graph, self.spec, self.limits), **options)


@functools.cache
def _plan(graph: Path, spec: DecoderSpec, limits: Limits) -> Plan:
    return rtx_plan(onnx.load(graph), spec, limits, sms=(TARGET,))


def build_rtx(
    checkpoint: Path, out: Path, limits: dict[str, Any], *, precision: str = "fp16", draft: str | None = None
) -> RtxEngine:
    """Build cpu and sm89 of a checkpoint with the real compilers, and return the engine."""
    plan = plan_build(checkpoint, ["cpu", TARGET], precision=precision, limits=limits, draft=draft)
    kept = out.with_name(out.name + "_graphs")
    kept.mkdir(parents=True)
    with _keep_graphs(kept), _keep_kernels(out.parent.parent / "kernels"):
        report = build_engine(plan, out, workers=2)
    # Without its kernels an engine would pass most tests, and test less.
    assert report.targets[TARGET].notes == ()
    graphs = sorted(kept.glob("*.onnx"))
    return RtxEngine(out, plan.checkpoint.spec, plan.limits, *graphs)


@contextmanager
def _keep_kernels(folder: Path) -> Iterator[None]:
    """Compile each device kernel once for all engines of a session."""
    compile_tasks = device_kernels.compile_tasks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_kernels, "compile_tasks", functools.partial(compile_tasks, cache_dir=folder))
        yield


@contextmanager
def _keep_graphs(kept: Path) -> Iterator[None]:
    """Copy every lowered graph that is compiled into `kept`, in the order in which they are written."""
    save = schedule.save_lowered

    def save_and_keep(model: Any, path: Any, **options: Any) -> None:
        save(model, path, **options)
        onnx.save(onnx.load(path), kept / f"{len(list(kept.iterdir()))}.onnx")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "save_lowered", save_and_keep)
        yield
