"""What a user asks structured output to be, as a grammar of llguidance; what is refused before it is compiled."""

from __future__ import annotations

import decimal
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .errors import InvalidArgumentError
from .guided_ebnf import ebnf_to_lark

if TYPE_CHECKING:
    from .guided import GuidedParams

# A schema of a large public API has some 100 KB; compiling takes about a second a megabyte.
MAX_SOURCE_BYTES = 256 * 1024
# llguidance makes an automaton of as many states as multipleOf has, 1.5 us and 250 bytes each, whatever its limits are.
MAX_MULTIPLE_OF = 100_000
# Between the tokens of JSON: a line break and the indentation of some levels, and no way to go on for ever.
WHITESPACE = r"[ \n\t]{0,20}"
# What regular expressions give a meaning to; every other character stands for itself.
_SPECIAL = re.compile(r"([\\.+*?()|\[\]{}^$#&~/-])")
_JSON_IN_LARK = re.compile(r"%json\b\s*")


def grammar_source(params: GuidedParams) -> str:
    """Return the grammar of one request in llguidance's own form; not compiled yet.

    raises InvalidArgumentError for a schema that is not JSON, is too large or has too fine a multipleOf
    """
    if params.json_schema is not None:
        return _schema_grammar(_schema_text(params.json_schema), params.whitespace_pattern)
    if params.json:
        return _schema_grammar('{"type": ["object", "array"]}', params.whitespace_pattern)
    if params.regex is not None:
        return _regex_grammar(_sized("regex", params.regex))
    if params.choice is not None:
        return _regex_grammar(
            _sized("choice", "|".join(_SPECIAL.sub(r"\\\1", word) for word in params.choice))
        )
    assert params.ebnf is not None
    lark = ebnf_to_lark(_sized("ebnf", params.ebnf))
    _check_json_in_lark(lark)
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def _regex_grammar(regex: str) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_regex(regex))


def _schema_text(schema: str | Mapping[str, Any] | bool) -> str:
    if isinstance(schema, str):
        return _sized("json_schema", schema)
    try:
        return _sized("json_schema", json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"json_schema cannot be written as JSON: {error}") from error


def _schema_grammar(text: str, whitespace_pattern: str | None) -> str:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"json_schema is not JSON: {error}; give the schema as JSON text"
        ) from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidArgumentError(
            f"json_schema is {json.dumps(schema)[:80]}, which is no schema that anything fits; give an object"
        )
    _check_multiples(schema)
    return json.dumps(
        {"grammars": [{"json_schema": {**schema, "x-guidance": _options(schema, whitespace_pattern)}}]}
    )


def _options(schema: dict[str, Any], whitespace_pattern: str | None) -> dict[str, Any]:
    """Return llguidance's options of a schema: the schema's own, but for the whitespace that was asked for."""
    own = schema.get("x-guidance")
    own = own if isinstance(own, dict) else {}
    if whitespace_pattern is None and "whitespace_flexible" in own:
        return own
    if whitespace_pattern == "":
        return {**own, "whitespace_flexible": False}
    if whitespace_pattern is None:
        return {"whitespace_pattern": WHITESPACE, **own}
    return {**own, "whitespace_pattern": whitespace_pattern}


def _sized(name: str, text: str) -> str:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_SOURCE_BYTES:
        raise InvalidArgumentError(
            f"{name} has {size} bytes, the most is {MAX_SOURCE_BYTES}; make it smaller"
        )
    return text


def _check_multiples(schema: Any) -> None:
    """Raise unless the least common multiple of all multipleOf, without their powers of ten, is small."""
    common = 1
    for value in _values_of(schema, "multipleOf"):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise InvalidArgumentError(f"json_schema has multipleOf {value!r}, it must be a number above 0")
        digits = decimal.Decimal(str(value)).normalize().as_tuple().digits
        common = math.lcm(common, int("".join(map(str, digits)))) if len(digits) < 20 else MAX_MULTIPLE_OF + 1
        if common > MAX_MULTIPLE_OF:
            raise InvalidArgumentError(
                f"json_schema has multipleOf {value!r}; its digits, together with those of the schema's other ones, "
                f"may have a least common multiple of {MAX_MULTIPLE_OF}; use rounder numbers or check after generation"
            )


def _values_of(schema: Any, key: str) -> Iterator[Any]:
    """Yield what `key` holds anywhere in a JSON value."""
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if key in value and not isinstance(value[key], dict):
                yield value[key]
            pending += value.values()
        elif isinstance(value, list):
            pending += value


def _check_json_in_lark(lark: str) -> None:
    for match in _JSON_IN_LARK.finditer(lark):
        try:
            schema, _ = json.JSONDecoder().raw_decode(lark, match.end())
        except (ValueError, RecursionError):
            continue  # in a string or a comment; else llguidance says what is wrong
        _check_multiples(schema)
