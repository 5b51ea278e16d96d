"""compressed-tensors (llm-compressor): groups of layers, each with a description of its weights and inputs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from ....runtime.errors import CheckpointError
from ...scheme import KvFormat
from ..config import Config
from .compressed_tensors_args import Args, describe, empty, read_args
from .compressed_tensors_layers import FORMATS, Group, read_layer
from .fields import finish, names, quant_fields
from .module import Layer, Module
from .patterns import compile_pattern
from .reader import Reader

_HARMLESS = ("quantization_status", "global_compression_ratio", "version", "run_compressed")


@dataclasses.dataclass(frozen=True)
class _Target:
    """A name, "Linear" for all, or a pattern that a name must begin with."""

    text: str
    pattern: re.Pattern[str] | None

    def matches(self, name: str) -> bool:
        if self.pattern is not None:
            return self.pattern.match(name) is not None
        return self.text in ("Linear", name)


class CompressedTensorsReader:
    """Reader of compressed-tensors checkpoints."""

    kv_names = ("k_scale", "v_scale")
    needs_kv_scales = True

    def __init__(
        self,
        where: str,
        producer: str,
        groups: list[tuple[list[_Target], Group]],
        ignore: list[_Target],
        kv: KvFormat,
    ) -> None:
        self.producer, self.kv = producer, kv
        self._where, self._groups, self._ignore = where, groups, ignore

    def layer(self, module: Module) -> Layer | None:
        """Return how a layer is stored; see Reader."""
        group = self._group(module.name)
        if group is None:
            return None
        if module.is_float:
            raise module.error(
                f"is plain {module.dtype('weight')}, {self._where} quantizes it ({describe(group.weights)}); its "
                "targets or ignore belong to another checkpoint"
            )
        return read_layer(module, group)

    def finish(self) -> None:
        """Targets are patterns: none has to match."""

    def _group(self, name: str) -> Group | None:
        """Return the group of a layer; its own name goes before patterns, and these before "Linear"."""
        if any(one.matches(name) for one in self._ignore):
            return None
        found = [
            (0 if one.text == name else 1 if one.pattern is not None else 2, place, group)
            for place, (targets, group) in enumerate(self._groups)
            for one in targets
            if one.matches(name)
        ]
        return min(found, key=lambda one: one[:2])[2] if found else None


def read_compressed_tensors(data: Mapping[str, Any], where: str) -> Reader:
    """Return the reader for a quantization_config of quant_method "compressed-tensors"."""
    config = quant_fields(data, where)
    _refuse_sparsity(config)
    for field in ("transform_config", "moe_sparsity_config"):
        if not empty(config.raw(field)):
            raise config.error(
                f"{field} is set, rotated and pruned models are not supported; give one without"
            )
    format_name = config.raw("format")
    groups = config.raw("config_groups")
    if not isinstance(groups, dict):
        raise config.error(f"config_groups is {str(groups)[:60]}, it must be an object; the file is damaged")
    read = [_group(config, name, value, format_name) for name, value in groups.items()]
    ignore = [_target(config, one) for one in names(config, "ignore")]
    version = config.raw("version")
    producer = f"compressed-tensors {version}" if isinstance(version, str) else "compressed-tensors"
    kv = _kv(config)
    finish(config, _HARMLESS)
    return CompressedTensorsReader(where, producer, read, ignore, kv)


def _refuse_sparsity(config: Config) -> None:
    value = config.raw("sparsity_config")
    if empty(value) or (isinstance(value, dict) and value.get("format") == "dense"):
        return
    what = value.get("format") if isinstance(value, dict) else value
    raise config.error(
        f"sparsity_config has format {what!r}: compressed sparse weights are not read; save the model dense"
    )


def _group(config: Config, name: str, value: Any, format_name: Any) -> tuple[list[_Target], Group]:
    where = f"{config.where}: config_groups[{name!r}]"
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is {str(value)[:60]}, it must be an object; the file is damaged")
    fields = quant_fields(value, where)
    targets = [_target(fields, one) for one in names(fields, "targets")]
    own = fields.raw("format") or format_name
    if own not in FORMATS:
        raise fields.error(
            f"format is {own!r}, supported are {', '.join(FORMATS)}; save the model in one of those"
        )
    if fields.raw("output_activations") is not None:
        raise fields.error("output_activations is set, outputs are never rounded here; quantize it without")
    weights = read_args(fields.raw("weights"), f"{where}: weights")
    if weights is None:
        raise fields.error("has no weights; layers with rounded inputs alone are not supported")
    inputs = read_args(fields.raw("input_activations"), f"{where}: input_activations")
    finish(fields)
    return targets, Group(str(own), weights, inputs)


def _target(config: Config, text: str) -> _Target:
    if not text.startswith("re:"):
        return _Target(text, None)
    try:
        return _Target(text, compile_pattern(text[3:]))
    except ValueError as e:
        raise config.error(f"has {text[:80]!r}, {e}") from e


def _kv(config: Config) -> KvFormat:
    args: Args | None = read_args(config.raw("kv_cache_scheme"), f"{config.where}: kv_cache_scheme")
    if args is None:
        return "float"
    if args.bits != 8 or args.strategy != "tensor" or args.dynamic != "static" or not args.symmetric:
        raise config.error(
            f"kv_cache_scheme is {describe(args)}, supported are float8 and int8 by tensor, static; quantize it so"
        )
    return "fp8" if args.is_float else "int8"
