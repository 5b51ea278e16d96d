"""Rounding of inputs, weights and KV pools in ops that ONNX Runtime's CPU kernels have.

They have FP8 (Cast saturates and rounds to nearest even) but not FP4, which is written out. Scales are computed in
float32 whatever the graph's type.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....runtime.errors import UnsupportedError
from ...scheme import FP4_MAX, FP8_MAX, INT8_MAX
from .tape import Tape

F32, FP8, FP4 = ir.DataType.FLOAT, ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT4E2M1

FLOAT16_MAX = 65504.0
_INT8_MIN = -128.0  # what QuantizeLinear saturates at


def to_e4m3(t: Tape, x: ir.Value) -> ir.Value:
    """Return float32 x rounded to E4M3 (nearest even, saturated at 448), in float32."""
    return t.cast(t.cast(x, FP8), F32)


def to_int8(t: Tape, x: ir.Value, lowest: float) -> ir.Value:
    """Return float32 x rounded to whole numbers (nearest even) from `lowest` to 127; NaN stays."""
    return t.op("Min", t.op("Max", t.op("Round", x), t.number(lowest)), t.number(INT8_MAX))


def to_e2m1(t: Tape, x: ir.Value) -> ir.Value:
    """Return float32 x rounded to E2M1 (nearest even, saturated at 6), in float32.

    Its numbers are 0.5 apart below 2, 1 below 4, 2 above; the even ones of each stretch have an even code.
    """
    size = t.op("Abs", x)
    wide = t.op("Where", t.op("Less", size, t.number(4.0)), t.number(1.0), t.number(2.0))
    step = t.op("Where", t.op("Less", size, t.number(2.0)), t.number(0.5), wide)
    rounded = t.op("Mul", t.op("Round", t.op("Div", x, step)), step)
    return t.op("Min", t.op("Max", rounded, t.number(-FP4_MAX)), t.number(FP4_MAX))


def round_input(t: Tape, node: ir.Node) -> ir.Value:
    """Return what takes the place of a RoundInput's output."""
    x, out = node.inputs[0], node.outputs[0]
    assert x is not None and x.shape is not None and out.dtype is not None
    columns = int(x.shape[1])  # type: ignore[arg-type]
    group = node.attributes.get_int("group", 0) or columns
    rows = t.op("Reshape", t.cast(x, F32), t.ints(-1, columns // group, group))
    largest = t.op("ReduceMax", t.op("Abs", rows), t.ints(-1), keepdims=1)
    kind = node.attributes.get_string("format", "")
    if kind == "fp4":
        outer = node.inputs[1]
        assert outer is not None
        per_scale = t.op("Mul", outer, t.number(FP4_MAX))
        scale = t.op("Mul", to_e4m3(t, t.op("Div", largest, per_scale)), outer)
    else:
        scale = t.op("Div", largest, t.number({"int8": INT8_MAX, "fp8": FP8_MAX}[kind]))
    # Where s is 0 the result is: any divisor but 0 does.
    divisor = t.op("Where", t.op("Equal", scale, t.number(0.0)), t.number(1.0), scale)
    codes = t.op("Div", rows, divisor)
    if kind == "int8":
        codes = to_int8(t, codes, -INT8_MAX)
    else:
        codes = to_e4m3(t, codes) if kind == "fp8" else to_e2m1(t, codes)
    rounded = t.op("Mul", codes, scale)
    return t.cast(t.op("Reshape", rounded, t.ints(-1, columns)), out.dtype)


def pool_codes(t: Tape, rows: ir.Value, scale: ir.Value, kind: ir.DataType) -> ir.Value:
    """Return what a quantized pool holds of K or V rows, in float32: round(rows / scale), saturated."""
    codes = t.op("Div", t.cast(rows, F32), scale)
    return to_e4m3(t, codes) if kind == FP8 else to_int8(t, codes, _INT8_MIN)


def to_float16(t: Tape, x: ir.Value) -> ir.Value:
    """Return float32 x rounded to float16 (nearest even), in float32: 65504 at most, but infinities and NaN stay."""
    finite = t.op("Less", t.op("Abs", x), t.number(float("inf")))
    bound = t.op("Min", t.op("Max", x, t.number(-FLOAT16_MAX)), t.number(FLOAT16_MAX))
    return t.cast(t.cast(t.op("Where", finite, bound, x), ir.DataType.FLOAT16), F32)


def replace_fp4_weights(graph: ir.Graph) -> None:
    """Put INT8 codes of twice the value, with half the scale, in place of FP4 weights: the same numbers."""
    for name, codes in list(graph.initializers.items()):
        if codes.dtype != FP4:
            continue
        doubled = _doubled(name, codes)
        graph.register_initializer(doubled)
        for use in list(codes.uses()):
            if use.node.op_type != "DequantizeLinear":
                raise UnsupportedError(
                    f"{name} is FP4 and read by {use.node.op_type}; the reference takes DequantizeLinear alone"
                )
            _halve_scale(graph, use.node)
            use.node.replace_input_with(0, doubled)
        del graph.initializers[name]


def _doubled(name: str, codes: ir.Value) -> ir.Value:
    tensor = codes.const_value
    assert tensor is not None and codes.shape is not None

    def read() -> ir.TensorProtocol:
        values = (2 * tensor.numpy().astype(np.float32)).astype(np.int8)
        return ir.Tensor(values, name=f"{name}.doubled")

    lazy = ir.LazyTensor(read, dtype=ir.DataType.INT8, shape=codes.shape, name=f"{name}.doubled")
    value = ir.Value(name=f"{name}.doubled", shape=codes.shape, type=ir.TensorType(ir.DataType.INT8))
    value.const_value = lazy
    return value


def _halve_scale(graph: ir.Graph, node: ir.Node) -> None:
    scale = node.inputs[1]
    assert scale is not None and scale.dtype is not None
    half = ir.Value(name=f"{scale.name}.half_factor", shape=ir.Shape(()), type=ir.TensorType(scale.dtype))
    half.const_value = ir.Tensor(np.array(0.5, scale.dtype.numpy()), name=half.name)
    graph.register_initializer(half)
    halved = ir.node("Mul", [scale, half], name=f"{scale.name}/halved")
    halved.outputs[0].name = f"{scale.name}/halved/out"
    graph.insert_before(node, halved)
    node.replace_input_with(1, halved.outputs[0])
