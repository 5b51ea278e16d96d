"""Compiling a graph into a TensorRT-RTX plan, in a process of its own."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ....runtime.errors import BuildError
from ....runtime.manifest_entries import WEIGHT_STREAMING
from ...limits import Limits
from ...spec import DecoderSpec
from .. import support
from ..compiler_process import Compiler, CompileResult, Progress, run_child, save_for_compiler
from . import contract, fixed_layout, lowering, profiles, targets

CHILD_MODULE = f"{__package__}.child"
COMPILER = "tensorrt_rtx"


def compile_plan(
    model: ir.Model | str | Path,
    limits: Limits,
    spec: DecoderSpec,
    sm: str,
    out_path: str | Path,
    log_path: str | Path,
    progress: Progress | None = None,
    *,
    causal: lowering.Causal = "mask",
    mixed: bool = False,
    weight_streaming: bool = False,
    stop: threading.Event | None = None,
    python: str = sys.executable,
) -> CompileResult:
    """Compile one plan into `out_path` and return how it went; blocks until the child process has ended.

    model : the graph of build_graph with float16 or bfloat16 activations, or an ONNX file that save_lowered wrote
    sm : a target of targets.py, e.g. "sm89" or "rtx"
    log_path : every line of the compiler, kept whether it succeeds or not
    causal, mixed : see lowering.lower and profiles.make_profiles
    weight_streaming : weights may stay in host memory, and come over in every step; a plan without it allocates
        nothing when it runs
    stop : once set, by any thread, the child is killed and Stopped raised
    raises : UnsupportedError before any work if the target cannot hold the graph's types or the compiler is not
        installed; what check_reproducible raises; BuildError with the log's last lines if the compiler refuses,
        crashes or drops an input;
        OutOfMemoryError if it was killed. No plan and no temporary file is left then, nor on KeyboardInterrupt.
    """
    target = targets.find_target(sm)
    if isinstance(model, ir.Model):
        support.check_types(target, lowering.types_of(model), "the graph")
    targets.check_installed()
    fixed_layout.check_reproducible()
    out_path, log_path = Path(out_path).absolute(), Path(log_path).absolute()
    with tempfile.TemporaryDirectory(prefix=".rtx-", dir=out_path.parent) as scratch:
        if isinstance(model, ir.Model):
            onnx_path = Path(scratch) / "graph.onnx"
            save_lowered(model, onnx_path, causal=causal)
        else:
            onnx_path = _linked(Path(model).absolute(), Path(scratch))
        plan = Path(scratch) / "model.plan"
        made = profiles.make_profiles(spec, limits, mixed=mixed)
        job, compute = _job(onnx_path, plan, limits, spec, target, made, weight_streaming)
        job |= {"onnx": _name_in(Path(scratch), onnx_path), "plan": _name_in(Path(scratch), plan)}
        compiler = Compiler(CHILD_MODULE, "TensorRT-RTX", target.name, python)
        done = run_child(compiler, job, Path(scratch), log_path, progress, stop)
        plan.replace(out_path)
    done = dataclasses.replace(done, flags=flags_of(target, causal, [p.name for p in made], weight_streaming))
    if compute == "float16" and targets.residual_may_overflow(spec):
        warning = (
            f"the activations of {spec.family} pass float16's 65504 with some prompts; build precision bf16, or "
            "int8 or int4, whose plans for it compute in bfloat16"
        )
        return dataclasses.replace(done, warnings=(*done.warnings, warning))
    return done


def save_lowered(model: ir.Model, path: str | Path, *, causal: lowering.Causal = "mask") -> None:
    """Lower a graph and write it with its weights beside it, one weight in memory at a time."""
    save_for_compiler(lowering.lower(model, causal=causal), path)


def flags_of(
    target: targets.RtxTarget,
    causal: lowering.Causal,
    profile_names: Sequence[str],
    weight_streaming: bool = False,
) -> tuple[str, ...]:
    """Return what the compiler is told, as the manifest lists it; the profiles are in the order of their index."""
    capabilities = (f"compute_capability={c.lower()}" for c in target.capabilities)
    memory = WEIGHT_STREAMING if weight_streaming else "require_user_allocation"
    return (
        *capabilities,
        "strongly_typed",
        memory,
        f"causal={causal}",
        f"profiles={'+'.join(profile_names)}",
    )


def _job(
    onnx_path: Path,
    plan: Path,
    limits: Limits,
    spec: DecoderSpec,
    target: targets.RtxTarget,
    made: Sequence[profiles.Profile],
    weight_streaming: bool,
) -> tuple[dict[str, Any], str]:
    compute = _pool_type(onnx_path)
    inputs = contract.plan_inputs(spec, limits, compute)
    outputs = contract.plan_outputs(spec, limits, compute)

    def listed(tensors: Sequence[contract.TensorSpec]) -> list[dict[str, Any]]:
        return [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in tensors]

    job = {
        "onnx": str(onnx_path),
        "plan": str(plan),
        "capabilities": list(target.capabilities),
        "inputs": listed(inputs),
        "outputs": listed(outputs),
        "profiles": profiles.as_json(made, inputs),
        "kv_updates": 2 * spec.num_layers,
        "weight_streaming": weight_streaming,
        "parent_pid": f"{os.getpid():010}",  # the job's text has one length, see fixed_layout.py
    }
    return job, compute


def _name_in(folder: Path, path: Path) -> str:
    """Return a path as seen from a folder: where the output lies must not reach the compiler, see fixed_layout.py."""
    return path.relative_to(folder).as_posix()


def _linked(onnx_path: Path, scratch: Path) -> Path:
    """Return the path of an ONNX file by a link to its directory, in which its weights are looked for."""
    (scratch / "graph").symlink_to(onnx_path.parent, target_is_directory=True)
    return scratch / "graph" / onnx_path.name


def _pool_type(onnx_path: Path) -> str:
    """Return the pools' type of a lowered file; the weights are not read."""
    try:
        model = ir.load(onnx_path)
    except Exception as error:
        raise BuildError(
            f"{onnx_path} is no ONNX file that can be read ({error}); give a graph that save_lowered wrote"
        ) from error
    return lowering.compute_type_of(model)
