"""compressed-tensors' layers: the tensors of each format, and the scheme they mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from ...scheme import FP4_GROUP, ROW, WHOLE, QuantizedInput, QuantizedWeight, Scheme
from .blocks import block_grid, by_output
from .compressed_tensors_args import Args, describe
from .int4 import check_order, row_group, spread
from .module import I8, I32, I64, U8, Layer, Module, Read
from .unpack import fp4, nibbles_along_columns, words_along_columns

FORMATS = (
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
)


@dataclasses.dataclass(frozen=True)
class Group:
    """What a config group says of its layers."""

    format: str
    weights: Args
    inputs: Args | None


def read_layer(m: Module, group: Group) -> Layer:
    """Return how a layer is stored; CheckpointError for combinations and tensors that do not fit."""
    kind = (group.weights.is_float, group.weights.bits)
    readers = {(True, 8): _fp8, (False, 8): _int8, (False, 4): _int4, (True, 4): _nvfp4}
    if kind not in readers or (kind == (True, 4)) != (group.format == "nvfp4-pack-quantized"):
        raise _unsupported(m, group)
    layer = readers[kind](m, group)
    check_order(m, "weight_g_idx", group.weights.group or m.columns, group.weights.order)
    m.drop("weight_zero_point", 0, "the config says symmetric true") if group.weights.symmetric else None
    m.drop("input_zero_point", 0, "inputs with zero points are not supported")
    return layer


def _unsupported(m: Module, group: Group) -> Exception:
    return m.error(
        f"is quantized as {describe(group.weights)} with inputs {describe(group.inputs)} in format {group.format}, "
        "which is not supported; quantize it as FP8 (W8A8), int8 (W8A8), int4 or int8 weights (W4A16, W8A16) or NVFP4"
    )


def _fp8(m: Module, group: Group) -> Layer:
    args = group.weights
    if not args.symmetric or args.dynamic != "static" or group.format == "pack-quantized":
        raise _unsupported(m, group)
    weight = m.fp8("weight", (m.rows, m.columns))
    if args.block is not None:
        rows, columns = args.block
        granularity, scale = columns, _block_scale(m, rows, columns)
    else:
        granularity, scale = _scale(m, args)
    inputs, read_input = _input(m, group)
    scheme = dataclasses.replace(inputs, weight="fp8", weight_group=granularity)
    return Layer(_fp8_name(scheme), scheme, lambda: QuantizedWeight(weight(), scale()), read_input)


def _fp8_name(scheme: Scheme) -> str:
    if scheme.weight_group > 0:
        return "fp8_blocks"
    names = {(WHOLE, WHOLE): "fp8", (ROW, ROW): "fp8_per_channel", (WHOLE, ROW): "fp8_dynamic"}
    return (
        "fp8_wo"
        if scheme.input == "float"
        else names.get((scheme.weight_group, scheme.input_group), "fp8_static")
    )


def _int8(m: Module, group: Group) -> Layer:
    args = group.weights
    if not args.symmetric or args.dynamic != "static" or args.block or group.format == "float-quantized":
        raise _unsupported(m, group)
    granularity, scale = _scale(m, args)
    codes = _packed(m, 8) if group.format == "pack-quantized" else m.take("weight", I8, (m.rows, m.columns))
    inputs, read_input = _input(m, group)
    scheme = dataclasses.replace(inputs, weight="int8", weight_group=granularity)
    if granularity == WHOLE:  # one scale a row says the same, and is what targets have
        scheme = dataclasses.replace(scheme, weight_group=ROW)
        return Layer(
            _int_name(scheme), scheme, lambda: QuantizedWeight(codes(), np.full(m.rows, scale())), read_input
        )
    return Layer(_int_name(scheme), scheme, lambda: QuantizedWeight(codes(), scale()), read_input)


def _int_name(scheme: Scheme) -> str:
    bits = scheme.weight_bits
    return f"int{bits}_wo" if scheme.input == "float" else "int8_w8a8" if bits == 8 else "int4_w4a8"


def _int4(m: Module, group: Group) -> Layer:
    args = group.weights
    if (
        args.strategy not in ("group", "channel")
        or args.dynamic != "static"
        or group.format != "pack-quantized"
    ):
        raise _unsupported(m, group)
    held = args.group or row_group(m.columns)
    count = m.groups(held)
    shapes = [(m.rows, count)] if args.group else [(m.rows, 1), (m.rows,)]
    stored, codes = m.scales("weight_scale", *shapes), _packed(m, 4)
    inputs, read_input = _input(m, group)
    scheme = dataclasses.replace(inputs, weight="int4", weight_group=held, zero_points=not args.symmetric)

    def scale() -> np.ndarray:
        return spread(stored().reshape(m.rows, -1), count)

    if args.symmetric:
        return Layer(_int_name(scheme), scheme, lambda: QuantizedWeight(codes(), scale()), read_input)
    packed = m.take("weight_zero_point", I32, (-(-m.rows // 8), count if args.group else 1))

    def read() -> QuantizedWeight:
        zero = words_along_columns(np.ascontiguousarray(packed().T), 4).T[: m.rows]
        zero = spread(np.ascontiguousarray(zero).view(np.int8), count)
        return QuantizedWeight(codes() + np.int8(8), scale(), zero)

    return Layer(_int_name(scheme), scheme, read, read_input)


def _nvfp4(m: Module, group: Group) -> Layer:
    args, inputs = group.weights, group.inputs
    is_group = args.strategy in ("group", "tensor_group") and args.group == FP4_GROUP
    if not is_group or not args.symmetric or (inputs is not None and not _is_nvfp4_input(inputs)):
        raise _unsupported(m, group)
    weight = m.take("weight_packed", U8, (m.rows, m.columns // 2))
    scale, outer = (
        m.fp8_scales("weight_scale", (m.rows, m.groups(FP4_GROUP))),
        m.number("weight_global_scale"),
    )

    def read() -> QuantizedWeight:
        return QuantizedWeight(fp4(nibbles_along_columns(weight())), scale(), scale_2=1.0 / outer())

    if inputs is None:
        return Layer("nvfp4_wo", Scheme("fp4", FP4_GROUP), read)
    calibrated = m.number("input_global_scale")
    return Layer(
        "nvfp4", Scheme("fp4", FP4_GROUP, input="fp4"), read, lambda: QuantizedInput(1.0 / calibrated())
    )


def _is_nvfp4_input(args: Args) -> bool:
    return (
        args.is_float
        and args.bits == 4
        and args.group == FP4_GROUP
        and args.dynamic == "local"
        and args.symmetric
    )


def _scale(m: Module, args: Args) -> tuple[int, Read]:
    """Return the weight's granularity and the reader of its scales."""
    if args.strategy == "tensor":
        one = m.scales("weight_scale", (), (1,), (1, 1))
        return WHOLE, lambda: one().reshape(())
    if args.strategy == "channel":
        rows = m.scales("weight_scale", (m.rows, 1), (m.rows,))
        return ROW, lambda: rows().reshape(-1)
    if args.strategy == "group":
        return args.group, m.scales("weight_scale", (m.rows, m.groups(args.group)))
    raise m.error(f"has weights {describe(args)}, supported strategies are tensor, channel, group and block")


def _block_scale(m: Module, rows: int, columns: int) -> Read:
    blocks = m.scales("weight_scale", block_grid(m, rows, columns))
    return lambda: by_output(blocks(), rows, m.rows)


def _packed(m: Module, bits: int) -> Read:
    """Return the reader of signed codes (N, K) int8, stored with half their range added."""
    per_word = 32 // bits
    words = m.take("weight_packed", I32, (m.rows, -(-m.columns // per_word)))
    shape = m.take("weight_shape", (I64, I32), (2,))()
    if shape.tolist() != [m.rows, m.columns]:
        raise m.error(
            f"has weight_shape {shape.tolist()}, config.json asks for {[m.rows, m.columns]}; the weights and "
            "config.json do not belong together"
        )

    def read() -> np.ndarray:
        codes = words_along_columns(words(), bits)[:, : m.columns]
        signed: np.ndarray = (codes - np.uint8(1 << (bits - 1))).view(np.int8)
        return signed

    return read


def _input(m: Module, group: Group) -> tuple[Scheme, Callable[[], QuantizedInput]]:
    """Return a scheme whose input is what the group says, and the reader of what was calibrated for it."""
    args = group.inputs
    if args is None:
        return Scheme(), QuantizedInput
    if args.bits != 8 or not args.symmetric:
        raise _unsupported(m, group)
    kind = "fp8" if args.is_float else "int8"
    if args.dynamic == "dynamic" and args.strategy in ("token", "group"):
        if args.group:
            m.groups(args.group)
        return Scheme(input=kind, input_group=args.group or ROW), QuantizedInput  # type: ignore[arg-type]
    if args.dynamic == "static" and args.strategy == "tensor":
        number = m.number("input_scale")
        return Scheme(input=kind, input_group=WHOLE), lambda: QuantizedInput(number())  # type: ignore[arg-type]
    raise _unsupported(m, group)
