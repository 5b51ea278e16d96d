"""Compiling a graph into a TensorRT 11 plan on this machine's GPU, in a process of its own."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ....runtime.manifest_entries import WEIGHT_STREAMING
from ...limits import Limits
from ...spec import DecoderSpec
from ..compiler_process import Compiler, CompileResult, Progress, run_child, save_for_compiler
from ..rtx.contract import TensorSpec
from ..rtx.profiles import as_json
from . import contract, lowering, profiles, targets

CHILD_MODULE = f"{__package__}.child"
COMPILER = targets.COMPILER


def compile_plan(
    model: ir.Model,
    limits: Limits,
    spec: DecoderSpec,
    target: targets.TensorRtTarget,
    out_path: str | Path,
    log_path: str | Path,
    progress: Progress | None = None,
    *,
    weight_streaming: bool = False,
    stop: threading.Event | None = None,
    python: str = sys.executable,
) -> CompileResult:
    """Compile one plan into `out_path` and return how it went; blocks until the child process has ended.

    Only one compile at a time: the compiler times kernels on the GPU, and chooses wrongly where others use it.

    model : the graph of build_graph with float16 or bfloat16 activations
    log_path : every line of the compiler, kept whether it succeeds or not
    weight_streaming : weights may stay in host memory, and come over in every step
    stop : once set, by any thread, the child is killed and Stopped raised
    raises : UnsupportedError before any work if this machine cannot compile for the target; BuildError with the log's
        last lines if the compiler refuses, crashes or drops an input; OutOfMemoryError if it was killed. No plan and no
        temporary file is left then, nor on KeyboardInterrupt.
    """
    targets.check_available(target)
    out_path, log_path = Path(out_path).absolute(), Path(log_path).absolute()
    with tempfile.TemporaryDirectory(prefix=".tensorrt-", dir=out_path.parent) as scratch:
        onnx_path, plan = Path(scratch) / "graph.onnx", Path(scratch) / "model.plan"
        save_lowered(model, limits, onnx_path)
        job = make_job(model, limits, spec, target, onnx_path, plan, weight_streaming)
        compiler = Compiler(CHILD_MODULE, "TensorRT", target.name, python)
        done = run_child(compiler, job, Path(scratch), log_path, progress, stop)
        plan.replace(out_path)
    return dataclasses.replace(done, flags=flags_of(target, weight_streaming))


def save_lowered(model: ir.Model, limits: Limits, path: str | Path) -> None:
    """Lower a graph and write it with its weights beside it, one weight in memory at a time.

    Needs neither TensorRT nor a GPU: the file is what the compiler would parse.
    """
    save_for_compiler(lowering.lower(model, limits), path)


def flags_of(target: targets.TensorRtTarget, weight_streaming: bool = False) -> tuple[str, ...]:
    """Return what the compiler is told, as the manifest lists it."""
    return (
        f"compute_capability={target.sm}",
        "strongly_typed",
        "aliased_plugin_io",
        *([WEIGHT_STREAMING] if weight_streaming else []),
        f"profiles={profiles.NAME}",
    )


def make_job(
    model: ir.Model,
    limits: Limits,
    spec: DecoderSpec,
    target: targets.TensorRtTarget,
    onnx_path: Path,
    plan: Path,
    weight_streaming: bool = False,
) -> dict[str, Any]:
    """Return what child.py compiles, as JSON values."""
    kv_type = lowering.kv_type_of(model)
    inputs = contract.plan_inputs(spec, limits, kv_type)
    return {
        "onnx": str(onnx_path),
        "plan": str(plan),
        "sm": target.sm,
        "inputs": _listed(inputs),
        "outputs": _listed(contract.plan_outputs(spec, limits, kv_type)),
        "profiles": as_json([profiles.make_profile(spec, limits)], inputs),
        "plugins": lowering.count_plugins(spec, limits),
        "weight_streaming": weight_streaming,
        "parent_pid": os.getpid(),
    }


def _listed(tensors: list[TensorSpec]) -> list[dict[str, Any]]:
    return [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in tensors]
