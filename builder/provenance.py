"""Where a plan comes from: the machine, the tools and the inputs that made it, for its manifest entry."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import platform
from collections.abc import Mapping

from .. import __version__
from ..runtime.errors import Error
from ..runtime.manifest_entries import ProvenanceEntry
from .machine import host
from .targets.registry import Target

# Distributions that have a part in plans: of every target, and of each compiler. Those named after a CUDA version
# (tensorrt_rtx_cu13) tell which driver the compiler's own library asks for.
_COMMON = ("numpy", "onnx-ir", "ml_dtypes")
_TOOLS: dict[str, tuple[str, ...]] = {
    "cpu": (),
    "rtx": ("onnx", "tensorrt_rtx", *(f"tensorrt_rtx_cu{major}" for major in (12, 13, 14))),
    "tensorrt": ("onnx", "tensorrt", *(f"tensorrt_cu{major}" for major in (12, 13, 14)), "triton"),
}

_PROCESSORS = {"amd64": "x86_64", "arm64": "aarch64"}  # what some systems call them


def now_text() -> str:
    """Return the time as manifests have it, UTC to the second."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def provenance(target: Target, inputs: Mapping[str, str] | None = None) -> ProvenanceEntry:
    """Return the provenance of a plan that this process has just compiled.

    inputs : what its key was made of, by name; None = not kept
    """
    return ProvenanceEntry(
        created=now_text(),
        plansmith_version=__version__,
        host=host(),
        platform=platform_name(),
        gpus=_gpus(target),
        tools=tuple(_tools(target)),
        inputs=dict(inputs or {}),
    )


def platform_name() -> str:
    """Return this system and its processor, e.g. "linux-x86_64", as sizing/portability.py compares them."""
    machine = platform.machine().lower() or "unknown"
    return f"{platform.system().lower() or 'unknown'}-{_PROCESSORS.get(machine, machine)}"


def _tools(target: Target) -> list[str]:
    found = [f"python {platform.python_version()}"]
    for name in (*_COMMON, *_TOOLS[target.compiler]):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return found


def _gpus(target: Target) -> tuple[str, ...]:
    """Return the name of the GPU that TensorRT timed kernels on; () for compilers that time none."""
    if target.compiler != "tensorrt":
        return ()
    from ..runtime.executors import cuda

    with contextlib.suppress(Error):
        devices = cuda.Driver(cuda.load_bindings()).devices()
        return tuple([one.name for one in devices if one.sm in target.sm][:1])
    return ()
