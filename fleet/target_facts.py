"""What this machine has for a target, asked once: its compiler, and the compiler of its kernels."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping

from ..builder.device_kernels import tasks_of
from ..builder.targets.registry import Target, compiler_version
from ..plugins.aot import triton_version
from ..plugins.compile_cache import kernel_key
from ..plugins.compile_cache import sources_digest as kernel_sources
from ..runtime.errors import UnsupportedError
from .buildable import Buildable, lack_of

_COMPILERS = ("compiler_version", "kernel_compiler")


@dataclasses.dataclass(frozen=True)
class TargetFacts:
    """What units of a target have in common on this machine.

    lack : what is missing to compile for it; None = nothing
    version : of the compiler; "" = it is not here
    kernels : the inputs of the kernels beside a GPU plan
    unknown : names of inputs that only a machine knows that can compile: of plans, and of kernels
    """

    target: Target
    lack: Buildable | None
    version: str
    kernels: Mapping[str, str]
    unknown: frozenset[str]


def facts_of(target: Target) -> TargetFacts:
    """Return what this machine has for a target."""
    lack = lack_of(target)
    try:
        version = compiler_version(target)
    except UnsupportedError:
        version = ""
    kernels, missing = _kernels(target) if target.sm else ({}, set())
    unknown = missing if lack is None else missing.union(_COMPILERS)
    return TargetFacts(target, lack, version, kernels, frozenset(unknown))


def _kernels(target: Target) -> tuple[dict[str, str], set[str]]:
    """Return the inputs of a GPU target's own kernels, and those that are not known without the kernel language."""
    sources = {"kernels.sources": kernel_sources()}
    try:
        version = triton_version()
    except UnsupportedError:
        return {**sources, "kernels.key": "", "kernels.triton": ""}, {"kernels.key", "kernels.triton"}
    keys = [kernel_key(kernel, sm, version) for kernel, sm in tasks_of(target)]
    key = hashlib.sha256("\n".join(keys).encode()).hexdigest()
    return {**sources, "kernels.key": key, "kernels.triton": version}, set()
