"""The GPUs that TensorRT-RTX 1.7 builds plans for, and the type that a plan computes in.

What each takes of quantized weights and inputs is in ../support.py.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import re

from ....runtime.errors import UnsupportedError
from ...spec import DecoderSpec


@dataclasses.dataclass(frozen=True)
class RtxTarget:
    """One --target name of this compiler.

    name : as on the command line
    capabilities : members of tensorrt_rtx.ComputeCapability; more than one makes one portable plan
    gpus : examples, for messages
    """

    name: str
    capabilities: tuple[str, ...]
    gpus: str


TARGETS: dict[str, RtxTarget] = {
    t.name: t
    for t in (
        RtxTarget("sm75", ("SM75",), "T4, RTX 20"),
        RtxTarget("sm80", ("SM80",), "A100"),
        RtxTarget("sm86", ("SM86",), "A10, RTX 30"),
        RtxTarget("sm89", ("SM89",), "L4, L40, RTX 40"),
        RtxTarget("sm120", ("SM120",), "RTX 50, RTX PRO Blackwell"),
        RtxTarget("rtx", ("SM80", "SM86", "SM89", "SM120"), "any of sm80, sm86, sm89, sm120"),
    )
}

# GPUs by the names people use, as gpu_sm shortens them -> compute capability, so that an error can say which target is
# meant.
GPU_NAMES: dict[str, str] = {
    name: sm
    for sm, names in {
        "sm70": "v100",
        "sm75": "t4 gtx1650 gtx1660 rtx2060 rtx2070 rtx2080 titanrtx",
        "sm80": "a100 a100x a30 a800",
        "sm86": "a2 a10 a10g a16 a40 rtx3050 rtx3060 rtx3070 rtx3080 rtx3090 rtxa2000 "
        "rtxa4000 rtxa4500 rtxa5000 rtxa5500 rtxa6000",
        "sm89": "l2 l4 l20 l40 l40s rtx4050 rtx4060 rtx4070 rtx4080 rtx4090 rtx2000ada rtx4000ada rtx4500ada "
        "rtx5000ada rtx5880ada rtx6000ada",
        "sm90": "h20 h100 h200 h800 gh200",
        "sm100": "b100 b200 gb200",
        "sm103": "b300 gb300",
        "sm120": "rtx5050 rtx5060 rtx5070 rtx5080 rtx5090 rtxpro4000 rtxpro4500 rtxpro5000 rtxpro6000",
    }.items()
    for name in names.split()
}

# What nvidia-smi's names say beside the GPU: its maker, memory, form and edition.
_NAME_WORDS = re.compile(
    r"nvidia|geforce|tesla|generation|blackwell|edition|workstation|server|laptop|gpu|max|q|d|pcie|nvl|sff|sxm\d*|hbm\d*e?|"
    r"\d+gb?"
)

_MIN_VERSION = (1, 7)


def gpu_sm(name: str) -> str | None:
    """Return the compute capability of a GPU by its name, such as "H100" or "NVIDIA H100 80GB HBM3"; None = unknown."""
    words = [word for word in re.split(r"[\s_-]+", name.lower()) if not _NAME_WORDS.fullmatch(word)]
    return GPU_NAMES.get(re.sub("(ti|super)*$", "", "".join(words)))


def find_target(name: str) -> RtxTarget:
    """Return the target of that name.

    raises UnsupportedError for a GPU that TensorRT-RTX has no code generator for.
    """
    if name in TARGETS:
        return TARGETS[name]
    if re.fullmatch(r"sm_?\d{2,3}[a-z]?", name) is None:
        raise UnsupportedError(
            f"target {name!r} is not known to the TensorRT-RTX compiler; choose one of {', '.join(TARGETS)}"
        )
    raise UnsupportedError(
        f"TensorRT-RTX cannot build for {name}; choose one of {', '.join(TARGETS)}, or cpu, which runs anywhere"
    )


def residual_may_overflow(spec: DecoderSpec) -> bool:
    """Return whether the model's residual stream is known to pass float16's 65504.

    Those whose embeddings are multiplied by sqrt(E) and whose norms multiply by 1 + w were trained in bfloat16, and do.
    """
    return spec.norm_offset != 0.0 and spec.embed_scale > 1.0


def compute_type(spec: DecoderSpec, precision_name: str) -> str:
    """Return the activation type to give build_graph for a GPU: "float16" or "bfloat16".

    fp16 and bf16 say it themselves; quantized ones take float16, or bfloat16 where the residual would overflow.
    """
    if precision_name == "bf16":
        return "bfloat16"
    if precision_name != "fp16" and residual_may_overflow(spec):
        return "bfloat16"
    return "float16"


def check_installed() -> str:
    """Return the version of tensorrt_rtx without loading it; UnsupportedError names the extra to install."""
    if importlib.util.find_spec("tensorrt_rtx") is None:
        raise UnsupportedError(
            "the TensorRT-RTX compiler is not installed; run: pip install 'plansmith[rtx]' (95 MB, no GPU needed)"
        )
    try:
        text = importlib.metadata.version("tensorrt_rtx")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
    found = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
    if found < _MIN_VERSION:
        raise UnsupportedError(
            f"tensorrt_rtx is {text}, at least 1.7 is needed (TRT_KVCacheUpdate in packed form); "
            "run: pip install -U 'plansmith[rtx]'"
        )
    return text
