"""An engine's limits and recipe, settled against its checkpoint; what does not fit is told with its line."""

from __future__ import annotations

import dataclasses
import re
from typing import NoReturn

from ..builder.checkpoint import Checkpoint
from ..builder.limits import Limits, make_limits
from ..builder.precision import Precision, draft_precision
from ..builder.targets.registry import Target, choose_precision, with_kv_cache
from ..runtime.errors import Error, InvalidArgumentError, UnsupportedError
from .engines import FleetEngine

# Options that errors of the builder speak of, and what they are called in a fleet file.
_FIELDS = ("precision", "draft", "group-size", "kv-cache-dtype", "weight-streaming")
_FLAG = re.compile(rf"--({'|'.join(_FIELDS)}|tokenizer(?=-dir)|max_[a-z_]+|tokens_per_block)(?:-dir)?\b")
_COMMANDS = re.compile(r"(`?plansmith (?:build|quantize)[^;,`]*)")


@dataclasses.dataclass(frozen=True)
class Settled:
    """What an engine is built with, the same for all of its targets.

    draft : None = nothing drafts
    refused : target -> why its KV pools cannot be as they are asked for
    """

    limits: Limits
    recipe: Precision
    draft: Precision | None
    refused: dict[str, str]


def settle(engine: FleetEngine, checkpoint: Checkpoint) -> Settled:
    """Return an engine's limits and precisions.

    raises InvalidArgumentError naming the line of the file that brought what is wrong
    """
    limits = _limits(engine, checkpoint)
    recipe, refused = _recipe(engine, checkpoint)
    draft = None
    if engine.recipe.draft is not None:
        try:
            draft = draft_precision(engine.recipe.draft, recipe)
        except InvalidArgumentError as error:
            _raise(engine, engine.recipe.where("draft"), error)
    if draft is not None and limits.max_num_tokens < 2:
        raise InvalidArgumentError(
            f"{_limit_line(engine, ['max_num_tokens'])}: {engine.name}: max_num_tokens is 1, and a step that verifies "
            f"a draft's tokens holds at least 2; raise it, or leave draft out ({engine.recipe.where('draft')})"
        )
    return Settled(limits, recipe, draft, refused)


def _limits(engine: FleetEngine, checkpoint: Checkpoint) -> Limits:
    given = {name: one.value for name, one in engine.limits.items()}
    try:
        return make_limits(checkpoint.spec.max_position_embeddings, **given)  # type: ignore[arg-type]
    except InvalidArgumentError as error:
        named = list(dict.fromkeys(re.findall(r"\b(max_[a-z_]+|tokens_per_block)\b", str(error))))
        _raise(engine, _limit_line(engine, named), error, _others(engine, named))


def _limit_line(engine: FleetEngine, names: list[str]) -> str:
    """Return the line of the first of the limits that is given."""
    lines = [engine.limits[name].where for name in names if name in engine.limits]
    return lines[0] if lines else engine.where


def _others(engine: FleetEngine, names: list[str]) -> str:
    """Say where the other limits come from that an error names: one of them may be what is wrong."""
    given = [f"{name} is of {engine.limits[name].where}" for name in names if name in engine.limits]
    return f" ({', '.join(given[1:])})" if given[1:] else ""


def _recipe(engine: FleetEngine, checkpoint: Checkpoint) -> tuple[Precision, dict[str, str]]:
    """Return the precision that all targets share, and those that cannot have its KV pools."""
    recipe, targets = engine.recipe, engine.targets
    try:
        chosen = choose_precision(recipe.precision, checkpoint, targets)
    except InvalidArgumentError as error:
        hint = f"; its place is models.{engine.model.name}.quantized.{recipe.name} ({engine.source.where})"
        _raise(
            engine, recipe.where("precision"), error, "" if recipe.name in engine.model.quantized else hint
        )
    try:
        chosen = chosen.in_groups(recipe.group_size)
    except InvalidArgumentError as error:
        _raise(engine, recipe.where("group_size"), error)
    try:
        return _with_pools(chosen, recipe.kv_cache_dtype, checkpoint, targets)
    except InvalidArgumentError as error:
        _raise(engine, recipe.where("kv_cache_dtype"), error)


def _with_pools(
    recipe: Precision, kv_cache_dtype: str, checkpoint: Checkpoint, targets: list[Target]
) -> tuple[Precision, dict[str, str]]:
    refused = {}
    held = recipe
    for target in targets:
        try:
            held = with_kv_cache(recipe, kv_cache_dtype, checkpoint, [target])
        except UnsupportedError as error:
            refused[target.name] = plain(str(error))
    return held, refused


def _raise(engine: FleetEngine, where: str, error: Error, more: str = "") -> NoReturn:
    raise type(error)(f"{where}: {engine.name}: {plain(str(error))}{more}") from None


def plain(text: str) -> str:
    """Return a sentence of the builder in the words of a fleet file: group_size for --group-size."""
    parts = _COMMANDS.split(text)  # what is to be typed stays
    return "".join(
        part if idx % 2 else _FLAG.sub(lambda flag: flag[1].replace("-", "_"), part)
        for idx, part in enumerate(parts)
    )
