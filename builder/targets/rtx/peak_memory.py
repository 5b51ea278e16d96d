"""How much memory TensorRT-RTX takes to compile a graph, said from the graph alone.

Counted is what the kernel cannot drop: no pages of files, so not the graph's weights, which the compiler maps. The
numbers were fitted to what bench/build_memory.py measures of TensorRT-RTX 1.7 (2 to 40 layers, 0.1 to 2,473 MB of
weights, vocabularies of 320 to 131,072), and are within 4 % of it, with the allocator as fixed_layout.py sets it.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from ...graph.contract import is_pool

# The tables of token ids: they are gathered from, and transposed for the logits.
_TABLES = ("embed.", "lm_head.")


@dataclasses.dataclass(frozen=True)
class _Peak:
    """What a compile takes: a base, something a layer, and multiples of the bytes of linear weights and of tables."""

    base_bytes: float
    layer_bytes: float
    linear_factor: float
    table_factor: float


# Bits of the smallest weights -> what the compiler takes of them: it works on 4 and 8 bits in larger units.
_PEAKS = {
    16: _Peak(179e6, 12.6e6, 1.65, 1.02),
    8: _Peak(185e6, 14.5e6, 1.94, 1.58),
    4: _Peak(176e6, 14.9e6, 2.84, 1.63),
}


def predicted_peak_bytes(model: ir.Model) -> int:
    """Return the memory that compiling a graph is expected to hold at its peak; no weight is read."""
    found = {name: value.const_value for name, value in model.graph.initializers.items()}
    weights = {name: one for name, one in found.items() if one is not None}
    tables = sum(one.nbytes for name, one in weights.items() if name.startswith(_TABLES))
    linear = sum(one.nbytes for one in weights.values()) - tables
    layers = sum(is_pool(str(value.name)) for value in model.graph.inputs) // 2
    peak = _PEAKS[_bits(weights)]
    return int(
        peak.base_bytes + peak.layer_bytes * layers + peak.linear_factor * linear + peak.table_factor * tables
    )


def _bits(weights: dict[str, ir.TensorProtocol]) -> int:
    """Return the bits of the smallest type that matrices have: 4, 8 or 16."""
    sizes = [8 * one.nbytes // one.size for one in weights.values() if len(one.shape) == 2 and one.size]
    return next((bits for bits in (4, 8) if bits in sizes), 16)
