"""Finds the quantized weights of products in a graph of build_graph."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

_FORMATS = {
    ir.DataType.INT8: "int8",
    ir.DataType.INT4: "int4",
    ir.DataType.UINT4: "int4",
    ir.DataType.FLOAT8E4M3FN: "fp8",
    ir.DataType.FLOAT4E2M1: "fp4",
}


@dataclasses.dataclass(frozen=True)
class FoundWeight:
    """The quantized weight of a product, as nodes.

    format : of what the product would meet: fp8 behind the FP8 grid
    is_whole, is_grouped : one scale for all; scales by groups of inputs. Neither: one an output
    grid : the nodes QuantizeLinear and DequantizeLinear of the FP8 grid
    """

    dequantize: ir.Node
    format: str
    is_whole: bool
    is_grouped: bool
    grid: tuple[ir.Node, ir.Node] | None = None

    @property
    def codes(self) -> ir.Value:
        """The initializer."""
        return input_of(self.dequantize, 0)

    @property
    def scale(self) -> ir.Value:
        """What the codes are multiplied by."""
        return input_of(self.dequantize, 1)

    @property
    def final_scale(self) -> ir.Value:
        """What the codes that a product would meet are multiplied by."""
        return self.scale if self.grid is None else input_of(self.grid[0], 1)


def find_quantized(value: ir.Value) -> FoundWeight | None:
    """Return what a product's weight is made of; None for one of floats or a transposed table."""
    node = value.producer()
    if node is None or node.op_type != "DequantizeLinear":
        return None
    quantize = input_of(node, 0).producer()
    if quantize is not None:
        inner = find_quantized(input_of(quantize, 0))
        assert inner is not None
        return FoundWeight(inner.dequantize, "fp8", is_whole=True, is_grouped=False, grid=(quantize, node))
    codes, scale = input_of(node, 0), input_of(node, 1)
    assert codes.dtype is not None and scale.shape is not None
    return FoundWeight(
        node,
        _FORMATS[codes.dtype],
        is_whole=scale.shape.rank() == 0,
        is_grouped="block_size" in node.attributes,
    )


def input_of(node: ir.Node, index: int) -> ir.Value:
    """Return an input that a node has."""
    value = node.inputs[index]
    assert value is not None
    return value
