"""How much memory a compile takes at its peak, said before it begins.

Counted is what the kernel cannot drop: no pages of files, so neither the checkpoint nor the graph's weights, which the
compilers map. The numbers were fitted to what bench/build_memory.py measures of three shapes (4 to 40 layers, 124 to
1,068 MB of weights, vocabularies of 49,152 to 131,072); docs/fleet.md has the table, with a fourth beside them.
"""

from __future__ import annotations

import dataclasses
import math

from .limits import Limits
from .precision import Precision
from .spec import DecoderSpec, weight_shapes
from .targets.registry import CPU, Target
from .weight_sizes import plan_sizes


@dataclasses.dataclass(frozen=True)
class _Compiler:
    """What TensorRT-RTX 1.7 takes: a base, something a layer, and a multiple of the linear layers' weights.

    The table of logits comes on top once, for it is transposed.
    """

    base_bytes: float
    layer_bytes: float
    weight_factor: float


# Bits of the weights -> what the compiler takes of them. It works on 4 bits in larger units.
_RTX = {16: _Compiler(389e6, 4e6, 2.4), 8: _Compiler(556e6, 4e6, 2.1), 4: _Compiler(622e6, 4e6, 3.7)}
# Bits of the weights -> bytes a value of the largest weight: converted, rounded and packed as a whole.
_CPU = {32: 1.0, 16: 3.1, 8: 1.45, 4: 1.45}
_CPU_BASE_BYTES = 4 << 20


def predicted_peak_bytes(target: Target, spec: DecoderSpec, recipe: Precision, limits: Limits) -> int:
    """Return what compiling one plan is expected to hold at its peak, besides the process that asks for it.

    No weights are read. TensorRT's compiles are taken to be like TensorRT-RTX's: none was measured.
    """
    shapes = weight_shapes(spec)
    if target.name == CPU:
        apart = 0.0 if spec.tie_embeddings else 1.0  # a table of logits of its own is packed in one piece
        largest = max(math.prod(shape) for shape in shapes.values())
        return _CPU_BASE_BYTES + int((_CPU[recipe.weight_bits] + apart) * largest)
    weights = plan_sizes(spec, recipe, limits, target).weight_bytes
    values = math.prod(shapes["embed.weight"])
    table = values * max(1, recipe.head_bits // 8)
    linear = weights - table * (1 if spec.tie_embeddings else 2)
    found = _RTX[min(16, recipe.weight_bits)]
    return int(found.base_bytes + found.layer_bytes * spec.num_layers + found.weight_factor * linear + table)
