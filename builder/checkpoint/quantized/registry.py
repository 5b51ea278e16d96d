"""Which reader a checkpoint's quantization is for; what none can read is refused by name, with what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ....runtime.errors import CheckpointError
from .awq import read_awq
from .compressed_tensors import read_compressed_tensors
from .fp8 import read_fp8
from .gptq import read_gptq
from .modelopt import ModelOptReader
from .modelopt_config import read_modelopt
from .reader import Reader

# quant_method -> why not; what is not named here is unknown
_REFUSED = {
    "bitsandbytes": "its weights are NF4 or outlier-split int8, which run on bitsandbytes' own kernels alone",
    "hqq": "its zero points are not integers",
    "quanto": "its tensors are pickled or of quanto's own classes",
    "eetq": "its int8 weights are interleaved for one GPU's kernels",
    "aqlm": "its weights are sums of codebook vectors",
    "quip": "its weights are codebook vectors of a rotated matrix",
    "spqr": "it keeps outliers in a sparse matrix",
    "higgs": "its weights are points of a grid after a rotation",
    "torchao": "its tensors are of torchao's own classes",
    "bitnet": "its weights are ternary",
    "vptq": "its weights are vectors of a codebook",
    "fbgemm_fp8": "it clips inputs at a bound of its own before rounding them",
    "mxfp4": "its scales are powers of two for groups of 32, which no target here multiplies with",
    "fp_quant": "its weights are rotated",
    "sinq": "it scales rows and columns at once",
    "auto-round": "it packs as other formats do: export it with format auto_gptq, auto_awq or llm_compressor",
    "autoround": "it packs as other formats do: export it with format auto_gptq, auto_awq or llm_compressor",
    "intel/auto-round": "it packs as other formats do: export it with format auto_gptq, auto_awq or llm_compressor",
    "marlin": "its weights are shuffled for one GPU's kernels; give the GPTQ checkpoint that it was made of",
    "gptq_marlin": "its weights are shuffled for one GPU's kernels; give the GPTQ checkpoint that it was made of",
}
_METHODS: dict[str, Callable[[Mapping[str, Any], str], Reader]] = {
    "awq": read_awq,
    "gptq": read_gptq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
}
QUANT_CONFIG = "hf_quant_config.json"
QUANT_FIELDS = ("quantization_config", "compression_config")


def find_reader(config: Mapping[str, Any], directory: Path, side: Mapping[str, Any] | None) -> Reader | None:
    """Return the reader of a checkpoint's quantization; None for one that is not quantized.

    config : config.json's object
    side : hf_quant_config.json's object, None where there is none
    raises : CheckpointError for methods and options that cannot be read
    """
    where = str(directory / "config.json")
    fields = [name for name in QUANT_FIELDS if config.get(name) is not None]
    if len(fields) > 1 and config[fields[0]] != config[fields[1]]:
        raise CheckpointError(
            f"{where}: {' and '.join(fields)} say different things; delete the one that does not belong to the weights"
        )
    field = fields[0] if fields else QUANT_FIELDS[0]
    value = config.get(field)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{where}: {field} is {value!r}, it must be an object; the file is damaged")
    method = _method(value, where, field) if value is not None else None
    if side is not None:
        if method not in (None, "modelopt"):
            raise CheckpointError(
                f"{where}: {field} says {method!r}, {QUANT_CONFIG} beside it is ModelOpt's; delete the one that does "
                "not belong to the weights"
            )
        sources = {str(directory / QUANT_CONFIG): side}
        if value is not None:
            sources[f"{where}: {field}"] = value
        return ModelOptReader(read_modelopt(sources))
    if value is None:
        return None
    if method == "modelopt":
        return ModelOptReader(read_modelopt({f"{where}: {field}": value}))
    return _METHODS[str(method)](value, f"{where}: {field}")


def _method(value: Mapping[str, Any], where: str, field: str) -> str:
    method = value.get("quant_method")
    if field == "compression_config" and method is None:
        method = "compressed-tensors"
    if isinstance(method, str) and (method in _METHODS or method == "modelopt"):
        return method
    bits = [name for name in ("load_in_4bit", "load_in_8bit") if value.get(name)]
    method = "bitsandbytes" if method is None and bits else method
    known = isinstance(method, str) and method.lower() in _REFUSED
    why = _REFUSED[str(method).lower()] if known else "which is not known"
    raise CheckpointError(
        f"{where}: {field}: the checkpoint is quantized with {method!r}, {why}; give the unquantized one and choose "
        f"the precision with --precision, or one of {', '.join(['modelopt', *_METHODS])}"
    )
