"""Nodes that give a value's memory another name: its shape, its axes of size 1, a cast to float32."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from . import values
from .constants import small_constant
from .values import Dims
from .walk import Walk


def _alias(w: Walk, node: ir.Node, dims: Dims | None) -> None:
    """Bind a node's result to its input's memory under other dims; None is an error."""
    known = w.find(node.inputs[0])
    assert known is not None
    if dims is None:
        raise w.error(node, "it moves values between rows; the cpu target keeps a token in its row")
    w.bind(node.outputs[0], dataclasses.replace(known, dims=dims))


def _source_dims(w: Walk, node: ir.Node) -> Dims | None:
    """Return the dims of input 0, None for what is not an activation (then the node needs nothing)."""
    known = w.find(node.inputs[0])
    if known is not None:
        return known.dims
    if w.input_name(node.inputs[0]) is not None:
        return None
    raise w.error(node, "its input is not an activation")


def reshape(w: Walk, node: ir.Node) -> None:
    """Reshape that leaves each row's columns in their order."""
    dims, target = _source_dims(w, node), small_constant(node.inputs[1])
    if dims is not None:
        _alias(w, node, None if target is None else values.reshape(dims, [int(t) for t in target]))


def transpose(w: Walk, node: ir.Node) -> None:
    """Transpose that moves the rows' axis alone."""
    dims = _source_dims(w, node)
    if dims is not None:
        perm = node.attributes.get("perm")
        order = list(perm.as_ints()) if perm is not None else list(range(len(dims)))[::-1]
        _alias(w, node, values.transpose(dims, order))


def unsqueeze(w: Walk, node: ir.Node) -> None:
    """Unsqueeze."""
    dims, axes = _source_dims(w, node), small_constant(node.inputs[1])
    if dims is not None and axes is not None:
        _alias(w, node, values.unsqueeze(dims, [int(a) for a in axes]))


def squeeze(w: Walk, node: ir.Node) -> None:
    """Squeeze of axes of size 1."""
    dims = _source_dims(w, node)
    axes = small_constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if dims is not None:
        ones = [n for n, d in enumerate(dims) if d == 1] if axes is None else [int(a) for a in axes]
        _alias(w, node, values.squeeze(dims, ones))


def cast(w: Walk, node: ir.Node) -> None:
    """Cast of activations to float32, which they are; of the step's integers to anything."""
    dims = _source_dims(w, node)
    if dims is not None:
        if node.attributes["to"].as_int() != ir.DataType.FLOAT:
            raise w.error(node, "the cpu target computes in float32; build its graph with compute float32")
        identity(w, node)


def identity(w: Walk, node: ir.Node) -> None:
    """Identity."""
    if node in w.late:
        w.bind(node.outputs[0], w.activation(node, 0))
    else:
        _alias(w, node, _source_dims(w, node))
