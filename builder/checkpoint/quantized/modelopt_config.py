"""What ModelOpt writes of a quantization, checked, from the two files that may say it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ....runtime.errors import CheckpointError
from ...scheme import KvFormat
from ..config import Config
from .modelopt_layers import LAYERS

MIXED = "MIXED_PRECISION"
_KV: dict[str, KvFormat] = {"FP8": "fp8", "INT8": "int8"}
_REDUNDANT = ("config_groups", "quant_method", "producer", "pre_quant_scale", "smoothquant_val")


@dataclasses.dataclass(frozen=True)
class ModelOptConfig:
    """A checkpoint's quantization as ModelOpt names it.

    algo : of all layers but `exclude`; MIXED_PRECISION: see layers; None = no weight is quantized
    group : inputs that share a scale where the algorithm has groups, None = not said
    layers : with MIXED_PRECISION, layer -> (algorithm, group)
    """

    where: str
    producer: str
    algo: str | None
    kv: KvFormat
    group: int | None
    exclude: tuple[str, ...]
    layers: Mapping[str, tuple[str, int | None]]


def read_modelopt(sources: Mapping[str, Mapping[str, Any]]) -> ModelOptConfig:
    """Return the quantization that hf_quant_config.json and config.json describe.

    sources : name of a file -> its object, hf_quant_config.json's first: it says more
    raises : CheckpointError for what is not supported, or where the two do not agree
    """
    read = [_read(data, where) for where, data in sources.items()]
    first = read[0]
    for other in read[1:]:
        for what in ("algo", "kv"):
            if getattr(first, what) != getattr(other, what):
                raise CheckpointError(
                    f"{first.where} says {getattr(first, what)!r} and {other.where} {getattr(other, what)!r} for "
                    f"{'the weights' if what == 'algo' else 'the KV cache'}; one belongs to another checkpoint: "
                    "download it again"
                )
    return first


def _read(data: Mapping[str, Any], where: str) -> ModelOptConfig:
    outer = Config(data, where, {})
    producer = _producer(outer)
    nested = data.get("quantization")
    if nested is not None:
        if not isinstance(nested, dict):
            raise outer.error(f"'quantization' is {nested!r}, it must be an object; the file is damaged")
        outer.use("quantization")
        outer.finish()
    config = Config(nested if nested is not None else data, where, {})
    algo = _algo(config, config.raw("quant_algo"))
    group = config.optional_integer("group_size", low=0) or None
    _no_zero_points(config)
    found = ModelOptConfig(
        where, producer, algo, _kv(config), group, _exclude(config), _layers(config, algo == MIXED)
    )
    config.finish(_REDUNDANT)
    return found


def _producer(config: Config) -> str:
    value = config.raw("producer")
    if not isinstance(value, dict):
        return "modelopt"
    name, version = value.get("name", "modelopt"), value.get("version", "")
    return f"{name} {version}".strip()


def _algo(config: Config, value: object) -> str | None:
    if value is None or value == MIXED:
        return MIXED if value else None
    if not isinstance(value, str) or value not in LAYERS:
        raise config.error(
            f"quant_algo is {value!r}, supported are {', '.join([*LAYERS, MIXED])}; quantize it so"
        )
    return value


def _no_zero_points(config: Config) -> None:
    if config.raw("has_zero_point") not in (None, False):
        raise config.error(
            f"has_zero_point is {config.raw('has_zero_point')!r}, ModelOpt's weights are symmetric; the file is of "
            "another format"
        )


def _kv(config: Config) -> KvFormat:
    value = config.raw("kv_cache_quant_algo")
    scheme = config.raw("kv_cache_scheme")
    if isinstance(scheme, dict):
        is_fp8 = scheme.get("num_bits") == 8 and scheme.get("type") == "float" and not scheme.get("dynamic")
        scheme = "FP8" if is_fp8 else scheme
    value = scheme if value is None else value
    if value is None:
        return "float"
    if not isinstance(value, str) or value not in _KV:
        raise config.error(
            f"the KV cache's quantization is {value!r}, supported are {', '.join(_KV)} with a fixed scale a layer; "
            "export the model again with one of those or without it"
        )
    return _KV[value]


def _exclude(config: Config) -> tuple[str, ...]:
    names = []
    for field in ("exclude_modules", "ignore"):
        value = config.raw(field)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise config.error(f"{field!r} is {value!r}, it must be a list of names; the file is damaged")
        names += value
    return tuple(names)


def _layers(config: Config, is_mixed: bool) -> dict[str, tuple[str, int | None]]:
    value = config.raw("quantized_layers")
    if value is None or (value == {} and not is_mixed):
        if is_mixed:
            raise config.error(
                "quant_algo is MIXED_PRECISION without quantized_layers; the file is incomplete"
            )
        return {}
    if not is_mixed or not isinstance(value, dict) or not value:
        raise config.error(
            f"quantized_layers is {str(value)[:60]}, it must be an object of layers, with quant_algo MIXED_PRECISION "
            "alone; the file is damaged"
        )
    return {name: _layer(config, name, one) for name, one in value.items()}


def _layer(config: Config, name: str, value: Any) -> tuple[str, int | None]:
    where = f"{config.where}: quantized_layers[{name!r}]"
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is {value!r}, it must be an object; the file is damaged")
    fields = Config(value, where, {})
    algo = _algo(fields, fields.raw("quant_algo"))
    if algo is None or algo == MIXED:
        raise fields.error(f"quant_algo is {value.get('quant_algo')!r}, it must be that of one layer")
    _no_zero_points(fields)
    group = fields.optional_integer("group_size", low=0) or None
    fields.finish(_REDUNDANT)
    return algo, group
