"""The units of a fleet: what is compiled at once, with the inputs that make its key and where that can be done."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..builder.build_key import inputs_key
from ..builder.checkpoint import Checkpoint
from ..builder.checkpoint.hash_cache import HashCache
from ..builder.limits import Limits
from ..builder.precision import Precision
from ..builder.spec import DecoderSpec, weight_shapes
from ..builder.targets.registry import Target
from .buildable import Buildable, buildable, refused
from .engines import FleetEngine, engines_of
from .facts_store import FactsFinder
from .fleet_file import Fleet, FleetSku
from .opener import OpenedEngine, Opener
from .selection import select
from .target_facts import TargetFacts, facts_of
from .unit_inputs import gate_inputs, unit_inputs

if TYPE_CHECKING:
    from ..builder.build import BuildPlan
    from .store.store import Store


@dataclasses.dataclass(frozen=True)
class Unit:
    """The plan of one target of one engine, its draft's, its kernels, and the tokenizer that goes with them.

    name : model/recipe/target, and behind an @ what distinguishes engines of one model and recipe
    members : the names of whom it is for, model/recipe/SKU
    recipe, draft : as BuildPlan has them
    inputs : everything that goes into it, name -> text
    gate_inputs : everything that the verdict of its engine's gate depends on; {} = it has no gate
    unknown : names of inputs that this machine cannot know, for the compiler is not here; they are not compared
    weight_bytes : about what its weights take, the draft's included
    missing_weights : what is not here of the checkpoint, so that only a machine that fetches it can build; "" = nothing
    """

    name: str
    engine: FleetEngine
    skus: tuple[FleetSku, ...]
    target: Target
    checkpoint: Checkpoint
    fingerprint: str
    limits: Limits
    recipe: Precision
    draft: Precision | None
    inputs: Mapping[str, str]
    gate_inputs: Mapping[str, str]
    unknown: frozenset[str]
    buildable: Buildable
    weight_bytes: int
    missing_weights: str

    @property
    def members(self) -> tuple[str, ...]:
        """The members that it is for."""
        return tuple(self.engine.member(sku) for sku in self.skus)

    @functools.cached_property
    def key(self) -> str:
        """The sha256 over its inputs."""
        return inputs_key(self.inputs)

    @functools.cached_property
    def peak_bytes(self) -> int:
        """About the memory that compiling it takes at its peak; asks the graph, a tenth of a second a unit."""
        from ..builder.build_memory import predicted_peak_bytes

        recipes = [self.recipe] if self.draft is None else [self.recipe, self.draft]
        spec = self.checkpoint.spec
        return max(predicted_peak_bytes(self.target, spec, recipe, self.limits) for recipe in recipes)

    @functools.cached_property
    def gate_bytes(self) -> int:
        """About the memory that measuring its engine's gate takes at its peak."""
        from .gate_memory import predicted_gate_bytes

        return predicted_gate_bytes(self)

    @functools.cached_property
    def plan(self) -> BuildPlan:
        """What the builder gets.

        raises CheckpointError for weights that are not here, and a tokenizer that the runtime cannot open
        """
        from ..builder.build import (
            BuildPlan,
        )  # takes a second to import, and most of a fleet is there already
        from ..builder.checkpoint.tokenizer_check import check_tokenizer_opens

        check_tokenizer_opens(self.checkpoint.tokenizer_files(), str(self.checkpoint.path))
        return BuildPlan(
            self.checkpoint,
            (self.target,),
            self.recipe,
            self.limits,
            self.draft,
            weight_streaming=self.engine.recipe.weight_streaming,
        )

    def agrees_with(self, inputs: Mapping[str, str]) -> bool:
        """Return whether a record of these inputs is this unit's, as far as this machine can tell."""
        return not self.changes(inputs)

    def changes(self, inputs: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
        """Return the inputs that differ from a record's: name -> (the record's, this unit's); None = has none."""
        names = (inputs.keys() | self.inputs.keys()) - self.unknown
        pairs = {name: (inputs.get(name), self.inputs.get(name)) for name in sorted(names)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def units_of(
    fleet: Fleet,
    *,
    only: Sequence[str] = (),
    hashes: HashCache | None = None,
    open_stores: Callable[[], Sequence[Store]] | None = None,
) -> list[Unit]:
    """Return the units of a fleet in the order of its file.

    only : patterns over units and members, see selection.select; () = all
    hashes : what remembers the checkpoints' fingerprints; None = the user's
    open_stores : opens the fleet's stores, which know what is needed of pinned checkpoints; called only where weights
        of one are not here. None = they have to be here

    No weights are read of a checkpoint that `hashes` knows, and nothing is compiled.
    raises InvalidArgumentError, CheckpointError naming the line of the file
    """
    finder = None if open_stores is None else FactsFinder(fleet.name, open_stores)
    opener = Opener(HashCache() if hashes is None else hashes, finder)
    pieces = [(engine, target) for engine in engines_of(fleet) for target in engine.targets]
    names = {_name(*one): [one[0].member(sku) for sku in _skus(*one)] for one in pieces}
    wanted = select(names, only)
    opened: dict[str, OpenedEngine] = {}
    facts: dict[Target, TargetFacts] = {}
    units = []
    for engine, target in pieces:
        if _name(engine, target) in wanted:
            if engine.name not in opened:
                opened[engine.name] = opener.open(engine)
            if target not in facts:
                facts[target] = facts_of(target)
            units.append(_unit(engine, facts[target], opened[engine.name]))
    return units


def member_names(fleet: Fleet) -> list[str]:
    """Return the names of all members; no checkpoint is opened."""
    return [engine.member(sku) for engine in engines_of(fleet) for sku in engine.skus]


def _skus(engine: FleetEngine, target: Target) -> tuple[FleetSku, ...]:
    return tuple(sku for sku in engine.skus if sku.target == target)


def _name(engine: FleetEngine, target: Target) -> str:
    usual = f"{engine.model.name}-{engine.recipe.name}"
    apart = "" if engine.name == usual else f"@{engine.name.removeprefix(f'{usual}-')}"
    return f"{engine.model.name}/{engine.recipe.name}/{target.name}{apart}"


def _unit(engine: FleetEngine, facts: TargetFacts, opened: OpenedEngine) -> Unit:
    target, settled, spec = facts.target, opened.settled, opened.checkpoint.spec
    recipes = [settled.recipe] if settled.draft is None else [settled.recipe, settled.draft]
    why = settled.refused.get(target.name)
    inputs, unknown = unit_inputs(facts, opened, streams=engine.recipe.weight_streaming)
    return Unit(
        name=_name(engine, target),
        engine=engine,
        skus=_skus(engine, target),
        target=target,
        checkpoint=opened.checkpoint,
        fingerprint=opened.fingerprint,
        limits=settled.limits,
        recipe=settled.recipe,
        draft=settled.draft,
        inputs=inputs,
        gate_inputs=gate_inputs(opened, engine.recipe.gate),
        unknown=unknown,
        buildable=refused(target, why) if why else buildable(target, facts.lack, spec, recipes),
        weight_bytes=sum(_weight_bytes(spec, recipe) for recipe in recipes),
        missing_weights=opened.missing_weights,
    )


def _weight_bytes(spec: DecoderSpec, recipe: Precision) -> int:
    """Return about what a model's weights take at a recipe."""
    shapes = weight_shapes(spec)
    head = ("embed.weight", "lm_head.weight")
    bits = sum(
        math.prod(shape) * (recipe.head_bits if name in head else recipe.weight_bits)
        for name, shape in shapes.items()
    )
    return bits // 8
