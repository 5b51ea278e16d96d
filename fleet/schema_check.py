"""A fleet file held against schema.json; what is wrong becomes a sentence with its line."""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import json
from collections.abc import Iterable
from typing import Any

import jsonschema

from ..runtime.errors import InvalidArgumentError
from .yaml_lines import Document, Spot


@functools.cache
def schema() -> dict[str, Any]:
    """Return the schema, JSON Schema's draft 2020-12; "x-wanted" in it says for people what a value may be."""
    text = importlib.resources.files(__package__).joinpath("schema.json").read_text("utf-8")
    return dict(json.loads(text))


def check_schema(document: Document) -> None:
    """Raise InvalidArgumentError for the first line of a document that is not as the schema has it."""
    validator = jsonschema.Draft202012Validator(schema())
    found = [(document.where(_spot(one)), one) for one in validator.iter_errors(document.value)]
    if not found:
        return
    # What is missing comes last: it may be there under a misspelt name.
    found.sort(key=lambda pair: (pair[1].validator == "required", _line(pair[0]), len(pair[1].absolute_path)))
    where, first = found[0]
    others = len({place for place, _ in found} - {where})
    more = f" ({others} more line{'s are' if others > 1 else ' is'} wrong)" if others else ""
    raise InvalidArgumentError(f"{where}: {_sentence(first)}{more}")


def spot_text(spot: Iterable[str | int]) -> str:
    """Return a spot for people: models.smol, skus[0]."""
    text = ""
    for part in spot:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def value_text(value: Any) -> str:
    """Return a value for people, as it would be written."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "a mapping"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "did you mean X? " for the nearest name, or ""."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]}? " if near else ""


def _line(where: str) -> int:
    return int(where.rpartition(":")[2])


def _spot(error: jsonschema.ValidationError) -> Spot:
    """Return where an error is: of a name that is wrong, that name."""
    spot = tuple(error.absolute_path)
    if "propertyNames" in error.absolute_schema_path:
        return (*spot, error.instance)
    if error.validator == "additionalProperties" and (unknown := _unknown(error)):
        return (*spot, unknown[0])
    return spot


def _unknown(error: jsonschema.ValidationError) -> list[str]:
    known = error.schema.get("properties", {})
    free = tuple(one.removeprefix("^") for one in error.schema.get("patternProperties", ()))
    return [name for name in error.instance if name not in known and not (free and name.startswith(free))]


def _sentence(error: jsonschema.ValidationError) -> str:
    at = spot_text(error.absolute_path)
    if "propertyNames" in error.absolute_schema_path:
        return f"{at} has the name {value_text(error.instance)}, wanted {_wanted(error)}; give it another"
    if error.validator == "additionalProperties":
        name, known = _unknown(error)[0], error.schema["properties"]
        meant = nearest(name, known)
        return f"{at or 'the file'} has {name!r}, which is not known; {meant}There are {', '.join(known)}"
    if error.validator == "required":
        missing = [name for name in error.validator_value if name not in error.instance]
        return f"{at or 'the file'} has no {' and no '.join(missing)}; add {'it' if len(missing) == 1 else 'them'}"
    if error.validator == "uniqueItems":
        return f"{at} has an item twice; keep one"
    if error.validator in ("minItems", "minProperties"):
        return f"{at} is empty, wanted {_wanted(error)}; fill it, or leave it out where it may be"
    what = f"{at or 'the file'} is {value_text(error.instance)}"
    quotes = isinstance(error.instance, (int, float)) and "string" in str(error.validator_value)
    return (
        f"{what}, wanted {_wanted(error)}; {'put it in quotes, or give another' if quotes else 'correct it'}"
    )


def _wanted(error: jsonschema.ValidationError) -> str:
    """Return what the schema wants there, in words."""
    wanted = error.schema.get("x-wanted")
    if wanted is None and not error.absolute_path:
        return f"a mapping with {', '.join(error.schema['required'])}"
    return str(wanted or error.schema.get("description") or error.message)
