"""How much memory measuring a gate takes at its peak, said before it begins."""

from __future__ import annotations

from ..builder.precision import Precision, precision
from ..builder.targets.registry import CPU, find_targets
from ..builder.weight_sizes import plan_sizes
from ..calibration.evaluate import DEFAULT_CONTEXTS
from ..calibration.scoring import CHUNK_TOKENS, MAX_SLICE_ELEMENTS
from ..runtime.control_groups import usable_cores
from ..sizing.cpu_memory import CpuLoad, cpu_use
from ..sizing.memory import blocks_for
from .units import Unit

# Arrays of float64 as large as a slice of logits, held at once while distributions are compared. Measured with
# SmolLM2-135M at int8 and fp16, which held 1,122 and 1,212 MB: predicted within 1 and 4 %.
_SLICES = 12


def predicted_gate_bytes(unit: Unit) -> int:
    """Return what measuring the gate of a unit's engine is expected to hold, besides the process that does it.

    The original in float32 and the engine are cpu plans that are open together, with the tokens of one step each. No
    weights are read: shapes say it, also those of a quantized checkpoint. raises what plan_sizes raises
    """
    slice_elements = min(MAX_SLICE_ELEMENTS, CHUNK_TOKENS * unit.checkpoint.spec.vocab_size)
    plans = sum(_plan_bytes(unit, recipe) for recipe in (precision("fp32"), unit.recipe))
    return plans + _SLICES * 8 * slice_elements


def _plan_bytes(unit: Unit, recipe: Precision) -> int:
    (cpu,) = find_targets([CPU])
    sizes = plan_sizes(unit.checkpoint.spec, recipe, unit.limits, cpu)
    assert sizes.cpu_plan is not None
    tokens = min(unit.limits.max_seq_len, max(DEFAULT_CONTEXTS)) + CHUNK_TOKENS
    load = CpuLoad(
        num_threads=usable_cores(),
        num_blocks=blocks_for(tokens, unit.limits.tokens_per_block),
        max_num_tokens=CHUNK_TOKENS,
    )
    return cpu_use(sizes.cpu_plan, load).total
