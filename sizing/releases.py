"""What ties a compiled plan to software: a compiler's release, the driver, the platform. Standard library only.

The runtime's checks (runtime/executors/trt.py) and `plansmith inspect --runs-on` ask the same functions. Where each
rule is from: docs/portability.md.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from ..runtime.errors import InvalidArgumentError

if TYPE_CHECKING:
    from ..runtime.manifest_entries import TargetEntry


@dataclasses.dataclass(frozen=True)
class Compiler:
    """A compiler as manifests name it.

    title : as people write it
    package : what pip installs
    numbers : leading numbers of the version that a plan and the library that runs it must have in common
    is_portable : a plan of one operating system runs on others
    picks_by_timing : kernels are chosen by how fast they were on the GPU that the plan was built on
    """

    title: str
    package: str
    numbers: int
    is_portable: bool
    picks_by_timing: bool


COMPILERS: dict[str, Compiler] = {
    # Its own check reads major, minor and patch of the plan's header and lets the build number be another one.
    "tensorrt_rtx": Compiler("TensorRT-RTX", "tensorrt-rtx", 3, True, False),
    "tensorrt": Compiler("TensorRT", "tensorrt", 4, False, True),
}
CPU_PLAN_FORMAT = 3  # builder/targets/cpu/plan_file.py and the runtime have the same number

_ASSUMED_CUDA = 13  # which the packages of our extras `rtx` and `tensorrt` are made for
# CUDA's major version -> the first driver branch that runs what is made for it, on Linux and Windows.
_CUDA_DRIVERS = {11: 450, 12: 525, 13: 580}
# Where a compiler asks for more than CUDA does.
_COMPILER_DRIVERS = {("tensorrt", 12): 535}
# Compute capability -> the branch of the driver that came with the first CUDA version which knows it.
_GPU_DRIVERS = {
    "sm75": 410,
    "sm80": 450,
    "sm86": 455,
    "sm89": 520,
    "sm90": 520,
    "sm100": 570,
    "sm103": 575,
    "sm120": 570,
    "sm121": 575,
}


def version_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a version: "1.7.1.116" and "v1.7.1" -> (1, 7, 1, ...); () where there are none."""
    return tuple(int(part) for part in re.findall(r"[0-9]+", text[:200]))


def release(compiler: str, version: str) -> str:
    """Return the part of a version that a plan is tied to, e.g. "1.7.1" of TensorRT-RTX 1.7.1.116."""
    return ".".join(map(str, version_numbers(version)[: COMPILERS[compiler].numbers])) or version


def is_same_release(compiler: str, built_with: str, there: str) -> bool:
    """Return whether a plan of one version runs on a library of another, as far as both versions tell."""
    count = COMPILERS[compiler].numbers
    pairs = list(zip(version_numbers(built_with), version_numbers(there), strict=False))
    return all(made == has for made, has in pairs[:count])


def tells_release(compiler: str, version: str) -> bool:
    """Return whether a version has all the numbers that a plan is tied to."""
    return len(version_numbers(version)) >= COMPILERS[compiler].numbers


def takes_cuda(driver_cuda: tuple[int, int], cuda_major: int) -> bool:
    """Return whether a driver runs what is made for a CUDA major version: any minor one of it, and older ones.

    driver_cuda : the newest CUDA version that the driver supports, as it says itself
    """
    return driver_cuda[0] >= cuda_major


def cuda_branch(compiler: str, cuda_major: int) -> int | None:
    """Return the first driver branch, e.g. 580, for a compiler's library made for a CUDA version; None = unknown."""
    return _COMPILER_DRIVERS.get((compiler, cuda_major), _CUDA_DRIVERS.get(cuda_major))


def least_driver(compiler: str, cuda_major: int | None, sm: str) -> int:
    """Return the first driver branch that runs a compiler's plans on GPUs of a compute capability.

    cuda_major : that the compiler's package is made for; None = what our extras install
    """
    branch = cuda_branch(compiler, cuda_major or _ASSUMED_CUDA) or _CUDA_DRIVERS[_ASSUMED_CUDA]
    return max(branch, _GPU_DRIVERS.get(sm, 0))


def package_cuda(entry: TargetEntry) -> int | None:
    """Return the CUDA major version that the compiler's package was made for; None = the manifest does not say."""
    if entry.provenance is None:
        return None
    name = f"{entry.compiler}_cu"
    found = (tool.partition(" ")[0] for tool in entry.provenance.tools)
    majors = [tool.removeprefix(name) for tool in found if tool.startswith(name)]
    return next((int(one) for one in majors if one.isascii() and one.isdecimal()), None)


def parse_driver(text: str) -> tuple[int, ...]:
    """Return a driver's version as numbers: "580.65.06", "580" or "r580".

    raises InvalidArgumentError for what is none, such as the CUDA version that nvidia-smi prints beside it
    """
    found = re.fullmatch(r"[rR]?([0-9]{3}(?:\.[0-9]{1,4}){0,2})", text.strip())
    if found is None:
        raise InvalidArgumentError(
            f"driver {text!r} is no version of an NVIDIA driver; give one such as 580.65.06, which "
            "nvidia-smi --query-gpu=driver_version --format=csv prints"
        )
    return version_numbers(found[1])


def parse_platform(text: str) -> str:
    """Return a platform as provenance has it, e.g. "linux-x86_64"; raises InvalidArgumentError."""
    word = text.strip().lower()
    if not re.fullmatch(r"(linux|windows)-(x86_64|aarch64)", word):
        raise InvalidArgumentError(
            f"platform {text!r} is not known; give linux or windows, '-', and x86_64 or aarch64, e.g. linux-x86_64"
        )
    return word
