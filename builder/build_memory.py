"""How much memory a compile takes at its peak, said before it begins."""

from __future__ import annotations

import math

from .limits import Limits
from .precision import Precision
from .spec import DecoderSpec, weight_shapes
from .targets.registry import CPU, Target
from .weight_sizes import plan_sizes


def predicted_peak_bytes(target: Target, spec: DecoderSpec, recipe: Precision, limits: Limits) -> int:
    """Return what compiling one plan is expected to hold at its peak, besides the process that asks for it.

    Without pages of files, which the kernel can drop. No weights are read.
    """
    largest = max(math.prod(shape) for shape in weight_shapes(spec).values())
    if target.name == CPU:
        return 4 * largest
    weights = plan_sizes(spec, recipe, limits, target).weight_bytes
    return (300 << 20) + (25 << 20) * spec.num_layers + 2 * weights
