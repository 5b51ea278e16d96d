"""How much memory a compile takes at its peak, said before it begins."""

from __future__ import annotations

import math

from .graph import build_graph
from .limits import Limits
from .precision import Precision
from .spec import DecoderSpec, weight_shapes
from .targets.registry import CPU, Target, compute_dtype
from .targets.rtx import peak_memory
from .weight_sizes import ShapesOnly

# Bits of the weights -> bytes a value of the largest weight, which is converted, rounded and packed as a whole.
# Measured by bench/build_memory.py as the compilers' numbers are, and within 9 %.
_CPU = {32: 1.0, 16: 3.1, 8: 1.45, 4: 1.45}
_CPU_BASE_BYTES = 4 << 20


def predicted_peak_bytes(target: Target, spec: DecoderSpec, recipe: Precision, limits: Limits) -> int:
    """Return what compiling one plan is expected to hold at its peak, besides the process that asks for it.

    Without pages of files, see peak_memory.py. No weights are read. TensorRT's compiles are taken to be like
    TensorRT-RTX's: none was measured.
    """
    if target.name == CPU:
        return _cpu_peak_bytes(spec, recipe)
    compute = compute_dtype(target, spec, recipe)
    return peak_memory.predicted_peak_bytes(
        build_graph(spec, ShapesOnly(spec), recipe, limits, compute=compute)
    )


def _cpu_peak_bytes(spec: DecoderSpec, recipe: Precision) -> int:
    largest = max(math.prod(shape) for shape in weight_shapes(spec).values())
    apart = 0.0 if spec.tie_embeddings else 1.0  # a table of logits of its own is packed in one piece
    return _CPU_BASE_BYTES + int((_CPU[recipe.weight_bits] + apart) * largest)
