"""The quantization of a TensorRT-LLM checkpoint: ModelOpt's algorithms and packing under that stack's own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....runtime.errors import CheckpointError
from ..config import Config
from ..json_file import read_json
from ..quantized.modelopt import ModelOptReader
from ..quantized.modelopt_config import MIXED, read_modelopt
from ..quantized.module import I8, U8, Layer, Module, Read
from .config import TrtllmConfig

# quant_algo -> why such weights cannot be read
_INTERLEAVED = "whose stored weights are interleaved for the kernels of one generation of GPUs"
_REFUSED = {
    "W4A16": _INTERLEAVED,
    "W4A16_GPTQ": _INTERLEAVED,
    "W8A16_GPTQ": _INTERLEAVED,
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": "whose scales belong to that stack's plugins",
    "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN": "whose scales belong to that stack's plugins",
    "W8A8_SQ_PER_TENSOR_PLUGIN": "whose scales belong to that stack's plugins",
    "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN": "whose scales belong to that stack's plugins",
    "W4A8_QSERVE_PER_GROUP": "whose weights are shuffled for QServe's kernels",
    "W4A8_QSERVE_PER_CHANNEL": "whose weights are shuffled for QServe's kernels",
}
_REMEDY = "give the Hugging Face checkpoint it was converted from, and quantize it here (plansmith quantize)"
_LEAVES = {  # ModelOpt's name in Hugging Face form -> the same tensor here
    "weight_scale": "weights_scaling_factor",
    "weight_scale_2": "weights_scaling_factor_2",
    "input_scale": "activation_scaling_factor",
    "pre_quant_scale": "prequant_scaling_factor",
}
_ROWWISE = {**_LEAVES, "weight_scale": "per_channel_scale"}
_GROUPED = ("W4A16_AWQ", "W4A8_AWQ")


class _TrtllmModule(Module):
    """A linear layer asked for by ModelOpt's names, and read and named in errors by TensorRT-LLM's."""

    def __init__(self, store: Any, module: Module, leaves: Mapping[str, str]) -> None:
        super().__init__(store, module.name, (module.rows, module.columns), module.has_bias)
        self.used = module.used
        self._leaves = leaves

    def stored_name(self, leaf: str) -> str:
        """Return what the files call a tensor of that last name."""
        return self._leaves.get(leaf, leaf)

    def has(self, leaf: str) -> bool:
        """Return whether the layer has a tensor of that last name."""
        return super().has(self.stored_name(leaf))

    def dtype(self, leaf: str) -> str:
        """Return how a tensor is stored."""
        return super().dtype(self.stored_name(leaf))

    def shape(self, leaf: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return super().shape(self.stored_name(leaf))

    def take(self, leaf: str, dtypes: str | Sequence[str], *shapes: tuple[int, ...]) -> Read:
        """Return a function that reads a tensor; bytes and older files' E4M3 are stored as int8 here."""
        read = super().take(self.stored_name(leaf), (U8, I8) if dtypes == U8 else dtypes, *shapes)
        return (lambda: read().view("uint8")) if dtypes == U8 else read

    def scales(self, leaf: str, *shapes: tuple[int, ...]) -> Read:
        """Return a function that reads float scales as float32, finite and not negative."""
        return super().scales(self.stored_name(leaf), *shapes)

    def fp8(self, leaf: str, *shapes: tuple[int, ...]) -> Read:
        """Return a function that reads E4M3 numbers, none of which is NaN."""
        return super().fp8(self.stored_name(leaf), *shapes)


class TrtllmReader(ModelOptReader):
    """Reader (builder/checkpoint/quantized/reader.py) of the quantization section of config.json."""

    needs_kv_scales = True

    def __init__(self, config: TrtllmConfig, section: Mapping[str, Any], where: str, store: Any) -> None:
        super().__init__(read_modelopt({where: section}))
        self.producer, self._store = config.producer, store
        self.needs_kv_scales = True
        both = ("k_cache_scaling_factor", "v_cache_scaling_factor")
        one = ("kv_cache_scaling_factor", "kv_cache_scaling_factor")
        self.kv_names = both if store.has(f"transformer.layers.0.attention.{both[0]}") else one

    def layer(self, module: Module) -> Layer | None:
        """Return how a layer is stored; None for one that is plain float, as lm_head may be without being excluded."""
        algo, _ = self._algo(module.name)
        if algo is None or (module.name == "lm_head" and module.is_float):
            self._left.discard(module.name)
            return None
        if algo == "W8A16" and module.has("per_channel_scale"):
            raise module.error(f"is quantized as {algo}, {_INTERLEAVED}; {_REMEDY}")
        if algo in ("W8A16", "FP8_PER_CHANNEL_PER_TOKEN") and module.is_float:
            raise module.error(
                f"is plain {module.dtype('weight')} and to be quantized to {algo} by trtllm-build; to do that here, "
                "set quant_algo to null in config.json and build with --precision int8"
            )
        if algo.startswith("FP8") and module.has("weight") and module.dtype("weight") == I8:
            self._store.read_as_fp8(f"{module.name}.weight")
        leaves = _ROWWISE if algo == "FP8_PER_CHANNEL_PER_TOKEN" else _LEAVES
        return super().layer(_TrtllmModule(self._store, module, leaves))


def quantization_section(config: TrtllmConfig, directory: Path) -> tuple[dict[str, Any], str] | None:
    """Return what says how the checkpoint is quantized and where it was found; None for one that is not.

    It is config.json's `quantization`, or quant_cfg.json where layers differ.
    raises CheckpointError for algorithms and options that cannot be read
    """
    where = str(directory / "config.json")
    section = _checked(config.quantization, f"{where}: quantization")
    if section.get("quant_algo") == MIXED and "quantized_layers" not in section:
        path = directory / "quant_cfg.json"
        layers = _checked(read_json(path), str(path))
        for field in ("quant_algo", "kv_cache_quant_algo"):
            if layers.get(field) != section.get(field):
                raise CheckpointError(
                    f"{path}: {field} is {layers.get(field)!r}, config.json beside it has {section.get(field)!r}; one "
                    "belongs to another checkpoint"
                )
        section, where = layers, str(path)
    if section.get("quant_algo") is None and section.get("kv_cache_quant_algo") is None:
        return None
    return section, where


def _checked(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a section without what changes nothing; CheckpointError for what would."""
    section = dict(value)
    if section.get("quant_algo") == "NO_QUANT":
        section["quant_algo"] = None
    if section.get("kv_cache_quant_algo") == "NO_QUANT":
        section["kv_cache_quant_algo"] = None
    _refuse(section.get("quant_algo"), where)
    layers = section.get("quantized_layers")
    if isinstance(layers, dict):
        for name, one in layers.items():
            if isinstance(one, dict):
                _refuse(one.get("quant_algo"), f"{where}: quantized_layers[{name!r}]")
    config = Config(section, where, {})
    for name, harmless in (("clamp_val", (None,)), ("use_meta_recipe", (None, False))):
        if config.raw(name) not in harmless:
            raise config.error(
                f"{name} is {config.raw(name)!r}, inputs that are clipped are not supported; {_REMEDY}"
            )
        section.pop(name, None)
    if section.get("quant_algo") not in (*_GROUPED, MIXED):
        section.pop("group_size", None)
    return section


def _refuse(algo: Any, where: str) -> None:
    if isinstance(algo, str) and algo in _REFUSED:
        raise CheckpointError(f"{where}: quant_algo is {algo}, {_REFUSED[algo]}; {_REMEDY}")
