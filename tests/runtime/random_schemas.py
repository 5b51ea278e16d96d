"""Random JSON schemas whose values are short, and a validator of the keywords they use."""

from __future__ import annotations

import json
import random
import re
from typing import Any

WORDS = ["a", "id", "name", "größe", "x y", 'q"t', "back\\slash", "tags", "0", "_"]


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Return a schema with types, enums, bounds, patterns, arrays, nested objects, anyOf and $ref-free recursion."""
    makers = [_integer, _number, _string, _enum, _const, _null, _boolean]
    if depth > 0:
        makers += [_array, _array, _object, _object, _object, _any_of]
    return rng.choice(makers)(rng, depth)


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-2000, 2000)
    bounds = {"minimum": low, "maximum": low + rng.randint(0, 3000)}
    if rng.random() < 0.3:
        bounds["exclusiveMinimum"] = bounds.pop("minimum") - 1
    if rng.random() < 0.2:
        bounds = {"minimum": 0, "maximum": 1000, "multipleOf": rng.choice([2, 5, 7, 10])}
    return {"type": "integer", **bounds}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    return {
        "type": "number",
        "minimum": 0,
        "maximum": rng.choice([1, 99.5, 1000]),
        "multipleOf": rng.choice([0.5, 0.25]),
    }


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {
            "type": "string",
            "pattern": rng.choice(["^[a-c]{1,4}$", "^(GET|PUT) /[a-z]{0,3}$", "^\\d{3}-\\d{2}$"]),
        }
    if rng.random() < 0.2:
        return {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid"])}
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 3)}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    values: list[Any] = [*WORDS, 1, -2.5, True, None, [1, "a"], {"k": 1}]
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice([*WORDS, 7, False])}


def _null(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "null"}


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 1)
    bounds = {"minItems": low, "maxItems": low + rng.randint(0, 2)}
    return {"type": "array", "items": random_schema(rng, depth - 1), **bounds}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(0, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def violation(value: Any, schema: dict[str, Any]) -> str | None:
    """Return what of `value` does not fit the schema, None when it does."""
    if "anyOf" in schema:
        found = [violation(value, one) for one in schema["anyOf"]]
        return None if None in found else f"none of anyOf: {found}"
    if "enum" in schema or "const" in schema:
        allowed = schema.get("enum", [schema.get("const")])
        same = any(json.dumps(value) == json.dumps(one) for one in allowed)
        return None if same else f"{value!r} is not one of {allowed}"
    kind = schema["type"]
    if kind != _kind_of(value) and not (kind == "number" and _kind_of(value) == "integer"):
        return f"{value!r} is not of type {kind}"
    if kind in ("integer", "number"):
        return _number_violation(value, schema)
    if kind == "string":
        return _string_violation(value, schema)
    if kind == "array":
        if not schema["minItems"] <= len(value) <= schema["maxItems"]:
            return f"{len(value)} items"
        return next((bad for item in value if (bad := violation(item, schema["items"]))), None)
    if kind == "object":
        missing = set(schema["required"]) - set(value)
        unknown = set(value) - set(schema["properties"])
        if missing or unknown:
            return f"missing {missing}, unknown {unknown}"
        return next(
            (bad for key, one in value.items() if (bad := violation(one, schema["properties"][key]))), None
        )
    return None


def _kind_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _number_violation(value: float, schema: dict[str, Any]) -> str | None:
    fits = schema.get("minimum", value) <= value <= schema["maximum"]
    fits = (
        fits
        and value > schema.get("exclusiveMinimum", value - 1)
        and value % schema.get("multipleOf", value or 1) == 0
    )
    return None if fits else f"{value} against {schema}"


def _string_violation(value: str, schema: dict[str, Any]) -> str | None:
    formats = {
        "date": r"\d{4}-\d\d-\d\d",
        "time": r"\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)",
        "ipv4": r"\d{1,3}(\.\d{1,3}){3}",
        "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    }
    pattern = formats.get(schema.get("format", ""), schema.get("pattern", ".*"))
    fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**6)
    return None if fits and re.fullmatch(pattern, value, re.DOTALL) else f"{value!r} against {schema}"
