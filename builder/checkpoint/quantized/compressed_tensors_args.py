"""compressed-tensors' description of one tensor's quantization, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from ..config import Config
from .blocks import is_block
from .fields import finish, flag, quant_fields

Dynamic = Literal["static", "dynamic", "local"]

_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group")
# how the scales were found, and what they were held in meanwhile: the stored tensors say what they are
_HARMLESS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "is_mx")


@dataclasses.dataclass(frozen=True)
class Args:
    """How a weight or an input is quantized.

    group : of strategies group and tensor_group, else 0
    block : of strategy block
    dynamic : whether the scales are of the values themselves; local: those of the groups are
    order : what is said of groups that are not of neighbours, "" where they are
    """

    bits: int
    is_float: bool
    symmetric: bool
    strategy: str
    group: int
    block: tuple[int, int] | None
    dynamic: Dynamic
    order: str = ""


def read_args(data: Any, where: str) -> Args | None:
    """Return the description; None for null; CheckpointError names the field that is wrong."""
    if data is None:
        return None
    if not isinstance(data, dict):
        raise Config({}, where, {}).error(f"is {data!r}, it must be an object; the file is damaged")
    config = quant_fields(data, where)
    group = config.integer("group_size", low=-1) if config.has("group_size") else 0
    strategy = _strategy(config, group)
    actorder = config.raw("actorder")
    if actorder not in (None, False, "weight", "static", "group", "dynamic"):
        raise config.error(f"actorder is {actorder!r}, known are null, weight and group; the file is damaged")
    block = _block(config, strategy)
    kind = config.choice("type", {"int": "int", "float": "float"}) if config.has("type") else "int"
    found = Args(
        bits=config.integer("num_bits", low=1, high=17) if config.has("num_bits") else 8,
        is_float=kind == "float",
        symmetric=flag(config, "symmetric", True),
        strategy=strategy,
        group=max(group, 0) if strategy in ("group", "tensor_group") else 0,
        block=block,
        dynamic=_dynamic(config),
        # "weight" and its other name "static" order the search alone: the groups that are stored are of neighbours
        order=f"actorder {actorder}" if actorder in ("group", "dynamic") else "",
    )
    if strategy in ("group", "tensor_group") and not found.group:
        raise config.error(f"strategy is {strategy!r} without a group_size; the file is damaged")
    finish(config, _HARMLESS)
    return found


def _strategy(config: Config, group: int) -> str:
    value = config.raw("strategy")
    if value is None:
        value = "tensor" if group == 0 else "channel" if group == -1 else "group"
    if value not in _STRATEGIES:
        raise config.error(f"strategy is {value!r}, supported are {', '.join(_STRATEGIES)}; quantize it so")
    return str(value)


def _block(config: Config, strategy: str) -> tuple[int, int] | None:
    value = config.raw("block_structure")
    if isinstance(value, str):
        sizes = value.split("x")
        value = (
            [int(one) for one in sizes] if all(one.isdecimal() and len(one) < 8 for one in sizes) else value
        )
    if strategy != "block":
        return None
    if not is_block(value):
        raise config.error(f"block_structure is {value!r}, it must be [rows, columns]; the file is damaged")
    return value[0], value[1]


def _dynamic(config: Config) -> Dynamic:
    value = config.raw("dynamic")
    if value == "local":
        return "local"
    if value not in (None, True, False):
        raise config.error(f"dynamic is {value!r}, it must be true, false or local; the file is damaged")
    return "dynamic" if value else "static"


def describe(args: Args | None) -> str:
    """Return a description for errors."""
    if args is None:
        return "none"
    kind = "float" if args.is_float else "int"
    group = f" of {args.group}" if args.group else ""
    sign = "" if args.symmetric else ", asymmetric"
    return f"{kind}{args.bits} by {args.strategy}{group}, {args.dynamic}{sign}"


def empty(value: Mapping[str, Any] | None) -> bool:
    """Return whether an optional object says nothing."""
    return value is None or value == {}
