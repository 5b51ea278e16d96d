"""The inputs of a unit: of its plan, its draft's, its kernels and its tokenizer, flat."""

from __future__ import annotations

import hashlib

from ..builder.build_key import target_inputs
from ..builder.device_kernels import tasks_of
from ..builder.targets.registry import CPU, Target, compiler_version, find_targets
from ..plugins.aot import triton_version
from ..plugins.compile_cache import kernel_key
from ..plugins.compile_cache import sources_digest as kernel_sources
from ..runtime.errors import UnsupportedError
from .buildable import lack_of
from .opener import OpenedEngine

# What only a machine that can compile knows.
_COMPILERS = ("compiler_version", "kernel_compiler", "draft.compiler_version", "draft.kernel_compiler")


def unit_inputs(
    target: Target, opened: OpenedEngine, *, streams: bool
) -> tuple[dict[str, str], frozenset[str]]:
    """Return a unit's inputs, and the names of those that this machine cannot know.

    streams : whether weights of GPU plans may stay in host memory
    """
    settled, common = opened.settled, (target, opened.fingerprint, opened.checkpoint.spec)
    try:
        version = compiler_version(target)
    except UnsupportedError:
        version = ""
    inputs = target_inputs(
        *common, settled.recipe, settled.limits, streams and target.compiler != CPU, version
    )
    if settled.draft is not None:
        draft = target_inputs(*common, settled.draft, settled.limits, version=version)
        inputs |= {f"draft.{name}": value for name, value in draft.items()}
    inputs["tokenizer"] = opened.tokenizer
    unknown = {name for name in _COMPILERS if name in inputs} if lack_of(target) is not None else set()
    if target.sm:
        kernels, missing = _kernel_inputs(target)
        inputs |= kernels
        unknown |= missing
    return inputs, frozenset(unknown)


def gate_inputs(opened: OpenedEngine, gate: str | None) -> dict[str, str]:
    """Return what the verdict of an engine's gate depends on; {} without one.

    The cpu plan is what is measured, whichever targets there are.
    """
    if gate is None:
        return {}
    settled, (cpu,) = opened.settled, find_targets([CPU])
    plan = target_inputs(cpu, opened.fingerprint, opened.checkpoint.spec, settled.recipe, settled.limits)
    return {
        "bounds": "".join(gate.split()),
        "original": opened.original,
        **{f"plan.{name}": value for name, value in plan.items()},
    }


def _kernel_inputs(target: Target) -> tuple[dict[str, str], set[str]]:
    """Return the inputs of a GPU target's own kernels, and those that are not known without the kernel language."""
    sources = {"kernels.sources": kernel_sources()}
    try:
        version = triton_version()
    except UnsupportedError:
        return {**sources, "kernels.key": "", "kernels.triton": ""}, {"kernels.key", "kernels.triton"}
    keys = [kernel_key(kernel, sm, version) for kernel, sm in tasks_of(target)]
    key = hashlib.sha256("\n".join(keys).encode()).hexdigest()
    return {**sources, "kernels.key": key, "kernels.triton": version}, set()
