"""The inputs of a unit: of its plan, its draft's, its kernels and its tokenizer, flat; and those of a gate."""

from __future__ import annotations

from ..builder.build_key import target_inputs
from ..builder.targets.registry import CPU, find_targets
from .opener import OpenedEngine
from .target_facts import TargetFacts

_ROWS = ("limits.max_batch_size", "limits.max_num_tokens")


def unit_inputs(
    facts: TargetFacts, opened: OpenedEngine, *, streams: bool
) -> tuple[dict[str, str], frozenset[str]]:
    """Return a unit's inputs, and the names of those that this machine cannot know.

    streams : whether weights of GPU plans may stay in host memory
    """
    target, settled = facts.target, opened.settled
    common = (target, opened.fingerprint, opened.checkpoint.spec)
    streams = streams and target.compiler != CPU
    inputs = target_inputs(*common, settled.recipe, settled.limits, streams, facts.version)
    if settled.draft is not None:
        draft = target_inputs(*common, settled.draft, settled.limits, version=facts.version)
        inputs |= {f"draft.{name}": value for name, value in draft.items()}
    inputs |= {"tokenizer": opened.tokenizer, **facts.kernels}
    unknown = facts.unknown | {f"draft.{name}" for name in facts.unknown}
    return inputs, frozenset(unknown & inputs.keys())


def gate_inputs(opened: OpenedEngine, gate: str | None) -> dict[str, str]:
    """Return what the verdict of an engine's gate depends on; {} without one.

    The cpu plan is what is measured, whichever targets there are. How many rows a step holds is no matter to it: a
    row's result is the same in any company. So an SKU with a batch of its own asks for no evaluation of its own.
    """
    if gate is None:
        return {}
    settled, (cpu,) = opened.settled, find_targets([CPU])
    plan = target_inputs(cpu, opened.fingerprint, opened.checkpoint.spec, settled.recipe, settled.limits)
    return {
        "bounds": "".join(gate.split()),
        "original": opened.original,
        **{f"plan.{name}": value for name, value in plan.items() if name not in _ROWS},
    }
