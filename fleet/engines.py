"""From a fleet to its engines: which directories there are, what each holds, and under which limits."""

from __future__ import annotations

import dataclasses

from ..builder.targets.registry import Target
from ..runtime.errors import InvalidArgumentError
from .fleet_file import EngineChoice, Fleet, FleetModel, FleetRecipe, FleetSku, GivenLimits, Source


@dataclasses.dataclass(frozen=True)
class FleetEngine:
    """An engine directory of the fleet.

    name : of the directory
    skus : whom it is for
    limits : those that are given, each from the most special place: SKU, entry of engines, recipe, model, fleet
    own_sku : the SKU whose limits it has; "" = it has none's
    where : the line that it comes from
    """

    name: str
    model: FleetModel
    recipe: FleetRecipe
    skus: tuple[FleetSku, ...]
    limits: GivenLimits
    own_sku: str
    where: str

    @property
    def source(self) -> Source:
        """The checkpoint that it is built of."""
        return self.model.source_for(self.recipe.name)

    @property
    def targets(self) -> list[Target]:
        """What is built, each once, in the order of the SKUs."""
        return list(dict.fromkeys(sku.target for sku in self.skus))

    def member(self, sku: FleetSku) -> str:
        """Return the name of the member for one of its SKUs: smol/int8/l4."""
        return f"{self.model.name}/{self.recipe.name}/{sku.name}"


def engines_of(fleet: Fleet) -> list[FleetEngine]:
    """Return the engines in the order of the file.

    raises InvalidArgumentError where two engines have one name, or one member two engines
    """
    engines: dict[str, FleetEngine] = {}
    members: dict[str, FleetEngine] = {}
    for choice in fleet.engines:
        for one in _chosen(fleet, choice):
            for sku in one.skus:
                other = members.setdefault(one.member(sku), one)
                if other is not one:
                    raise InvalidArgumentError(
                        f"{one.where}: {one.member(sku)} is in the entry of {other.where} already; name it in one"
                    )
            engines[one.name] = _joined(engines.get(one.name), one)
    return list(engines.values())


def _chosen(fleet: Fleet, choice: EngineChoice) -> list[FleetEngine]:
    """Return the engines of one entry; SKUs with limits of their own have theirs."""
    found = []
    skus = [fleet.skus[name] for name in choice.skus]
    shared = tuple(sku for sku in skus if not sku.has_limits)
    groups = ([("", shared)] if shared else []) + [(sku.name, (sku,)) for sku in skus if sku.has_limits]
    for model in (fleet.models[name] for name in choice.models):
        for recipe in (fleet.recipes[name] for name in choice.recipes):
            for own, members in groups:
                base = choice.name or f"{model.name}-{recipe.name}"
                limits = {**fleet.limits, **model.limits, **recipe.limits, **choice.limits}
                if own:
                    limits |= members[0].limits
                name = f"{base}-{own}" if own else base
                found.append(FleetEngine(name, model, recipe, members, limits, own, choice.where))
    return found


def _joined(old: FleetEngine | None, new: FleetEngine) -> FleetEngine:
    """Return two entries of one engine as one."""
    if old is None:
        return new
    for word, mine, others in (
        ("model", new.model.name, old.model.name),
        ("recipe", new.recipe.name, old.recipe.name),
        ("limits", _values(new), _values(old)),
    ):
        if mine != others:
            raise InvalidArgumentError(
                f"{new.where}: the engine {new.name} is that of {old.where} too, with another {word}; give one of them "
                "a name of its own"
            )
    return dataclasses.replace(old, skus=old.skus + new.skus)


def _values(engine: FleetEngine) -> dict[str, int]:
    return {name: given.value for name, given in engine.limits.items()}
