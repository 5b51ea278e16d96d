"""The GPUs that TensorRT 11 compiles plans for, and what has to be there before it can.

Its compiler times kernels on the GPU that it builds for, so it runs on a machine with that GPU alone. Where
TensorRT-RTX has the GPU too the plain name is that compiler's, and this one's ends in "-tensorrt".
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import re

from ....runtime.errors import UnsupportedError
from .device import DriverError, device_capabilities

SUFFIX = "-tensorrt"
COMPILER = "tensorrt"
_MIN_VERSION = (11, 0)
_DISTRIBUTIONS = ("tensorrt", "tensorrt-cu13", "tensorrt_cu13", "tensorrt-cu12", "tensorrt_cu12")


@dataclasses.dataclass(frozen=True)
class TensorRtTarget:
    """One --target name of this compiler.

    name : as on the command line
    sm : the compute capability, e.g. "sm90"
    gpus : examples, for messages
    """

    name: str
    sm: str
    gpus: str


TARGETS: dict[str, TensorRtTarget] = {
    t.name: t
    for t in (
        TensorRtTarget("sm90", "sm90", "H100, H200"),
        TensorRtTarget("sm100", "sm100", "B200"),
        TensorRtTarget("sm103", "sm103", "B300"),
        TensorRtTarget("sm80-tensorrt", "sm80", "A100"),
        TensorRtTarget("sm86-tensorrt", "sm86", "A10, RTX 30"),
        TensorRtTarget("sm89-tensorrt", "sm89", "L4, L40, RTX 40"),
        TensorRtTarget("sm120-tensorrt", "sm120", "RTX 50, RTX PRO Blackwell"),
    )
}


def check_available(target: TensorRtTarget) -> str:
    """Return TensorRT's version, without loading it, if this machine can compile for the target.

    raises UnsupportedError with everything that is missing, and the commands for a machine that has it
    """
    version, problem = _installed()
    missing = [problem] if problem else []
    if not _has("triton"):
        missing.append("the Triton language is not installed")
    gpu = _gpu_problem(target)
    if gpu:
        missing.append(gpu)
    if missing:
        raise UnsupportedError(
            f"{target.name} ({target.gpus}) is compiled by TensorRT 11 on a machine with that GPU, but here "
            f"{', and '.join(missing)}; on such a machine run: pip install 'plansmith[tensorrt,kernels,gpu]' && "
            f"plansmith build CHECKPOINT --target {target.name} -o ENGINE_DIR (an engine directory built elsewhere, "
            "copied there with its checkpoint, gets the target in addition)"
        )
    return version


def installed_version() -> str:
    """Return the installed TensorRT's version, or "" where there is none."""
    return _installed()[0]


def _installed() -> tuple[str, str]:
    """Return (version, what is wrong with it); one of them is empty unless the version is too old."""
    if not _has("tensorrt"):
        return "", "TensorRT is not installed"
    for name in _DISTRIBUTIONS:
        try:
            text = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
        return text, "" if found >= _MIN_VERSION else f"TensorRT is {text}, at least 11.0 is needed"
    return "unknown", ""


def _gpu_problem(target: TensorRtTarget) -> str:
    """Return why no plan for the target can be timed here, or ""."""
    try:
        found = device_capabilities()
    except DriverError as error:
        return str(error)
    if target.sm in found:
        return ""
    return f"there is no {target.sm} GPU, only {', '.join(dict.fromkeys(found)) or 'none'}"


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
