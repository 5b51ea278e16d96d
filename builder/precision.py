"""Weight precisions: what a recipe's name means, as data."""

from __future__ import annotations

import dataclasses

from ..runtime.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class Precision:
    """How weights and activations are held in the graph.

    name : the recipe's name, as in --precision
    weight_bits : 32, 16, 8 or 4 for the linear layers
    head_bits : bits of the embedding and the logits product (they share one table when tied)
    """

    name: str
    weight_bits: int
    head_bits: int


PRECISIONS = {
    "fp32": Precision("fp32", 32, 32),
    "fp16": Precision("fp16", 16, 16),
    "bf16": Precision("bf16", 16, 16),
    "int8": Precision("int8", 8, 8),
    # The tied table is 21 % of a small model and the most sensitive part, so it stays at 8 bits.
    "int4": Precision("int4", 4, 8),
}


def precision(name: str) -> Precision:
    """Return the recipe of that name; InvalidArgumentError lists those there are."""
    try:
        return PRECISIONS[name]
    except KeyError:
        raise InvalidArgumentError(
            f"--precision {name!r} is not known; choose one of {', '.join(PRECISIONS)}"
        ) from None


def draft_precision(name: str, engine: Precision) -> Precision | None:
    """Return the recipe of a draft for an engine; None for "none".

    raises InvalidArgumentError for one that is not known, or no smaller than the engine's own and so no faster
    """
    if name == "none":
        return None
    if name not in PRECISIONS:
        raise InvalidArgumentError(
            f"--draft {name!r} is not known; choose one of {', '.join(PRECISIONS)}, none"
        )
    found = PRECISIONS[name]
    if found.weight_bits >= engine.weight_bits:
        smaller = [one.name for one in PRECISIONS.values() if one.weight_bits < engine.weight_bits]
        raise InvalidArgumentError(
            f"--draft {name} is no smaller than the engine's {engine.name}, so it would not save time; give "
            + (
                " or ".join(smaller)
                if smaller
                else "none, and a smaller model's engine as --draft where this one runs"
            )
        )
    return found


def int4_group_size(in_features: int) -> int:
    """Return the INT4 group for an input size: 128 where it divides, else 64, else 32 (SmolLM2's 576 takes 64).

    raises InvalidArgumentError when none divides.
    """
    for group in (128, 64, 32):
        if in_features % group == 0:
            return group
    raise InvalidArgumentError(
        f"int4 needs an input size divisible by 32, a layer has {in_features}; build with --precision int8"
    )


def activation_group_size(weight_group_size: int, in_features: int) -> int:
    """Return how many columns of a product's input share a scale where activations are rounded; 0 = a whole row.

    weight_group_size : the weight's own groups, 0 = one scale an output: then the groups that int4 would have
    """
    if weight_group_size:
        return weight_group_size
    try:
        return int4_group_size(in_features)
    except InvalidArgumentError:
        return 0
