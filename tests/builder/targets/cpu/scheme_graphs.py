"""Graphs of quantized decoders with random weights, ready to be lowered."""

from __future__ import annotations

import onnx_ir as ir
from plansmith.builder.graph import build_graph
from plansmith.builder.limits import make_limits
from plansmith.builder.precision import of_checkpoint
from plansmith.builder.scheme import FLOAT, KvFormat, Quantization, Scheme
from plansmith.builder.targets.cpu.compile import header_fields
from quantized_weights import RandomQuantizedWeights, linear_layers, quantization, quantized_spec


def graph_of(
    schemes: dict[str, Scheme] | Scheme,
    weights: type[RandomQuantizedWeights] = RandomQuantizedWeights,
    kv: KvFormat = "float",
) -> tuple[ir.Model, dict[str, int]]:
    """Return the graph of schemes by unit ("q", "down", ...), or of one for all, and the plan's header."""
    spec = quantized_spec()
    if isinstance(schemes, Scheme):
        held = quantization(spec, schemes, kv=kv)
    else:
        named = {name: schemes.get(name.rpartition(".")[2], FLOAT) for name in linear_layers(spec)}
        held = Quantization("mixed", "tests", tuple((n, s) for n, s in named.items() if s != FLOAT))
    limits = make_limits(spec.max_position_embeddings, max_num_tokens=64)
    model = build_graph(spec, weights(spec, held), of_checkpoint(held, "float32"), limits)
    return model, header_fields(spec, limits)
