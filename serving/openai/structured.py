"""What the text of an answer must be, from response_format, the guided fields and structured_outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ...runtime.errors import InvalidArgumentError
from ...runtime.guided import GuidedParams
from .errors import ApiError, bad_request
from .protocol import SamplingFields

_ENGINES_WORD = "guided "  # what the engine calls it
_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")


def guided_of(body: SamplingFields) -> GuidedParams | None:
    """Return what a request asks its text to be, None for nothing; ApiError 400 for two things at once."""
    asked: list[tuple[str, dict[str, Any]]] = []
    if body.response_format is not None and body.response_format.type != "text":
        asked.append(("response_format", {"json_schema": _schema_of(body.response_format)}))
    guided = {
        "guided_json": ("json_schema", body.guided_json),
        "guided_regex": ("regex", body.guided_regex),
        "guided_choice": ("choice", body.guided_choice),
        "guided_grammar": ("ebnf", body.guided_grammar),
    }
    asked += [(field, {name: value}) for field, (name, value) in guided.items() if value is not None]
    if body.structured_outputs is not None:
        asked.append(("structured_outputs", _structured(body.structured_outputs)))
    if not asked:
        return None
    if len(asked) > 1:
        names = " and ".join(field for field, _ in asked)
        raise bad_request(f"{names} say different things of the text; give one of them", asked[1][0])
    field, values = asked[0]
    if body.guided_whitespace_pattern is not None:
        values["whitespace_pattern"] = body.guided_whitespace_pattern
    try:
        return GuidedParams(**values)
    except InvalidArgumentError as error:
        raise bad_request(f"{field}: {error}", field, "invalid_value") from error


@contextlib.contextmanager
def naming_field(body: SamplingFields) -> Iterator[None]:
    """Name the request's field in the ApiError of a grammar that the engine refuses."""
    try:
        yield
    except ApiError as error:
        if not error.message.startswith(_ENGINES_WORD) or error.status != 400:
            raise
        field = _field_of(body)
        error.message, error.param = f"{field} {error.message.removeprefix(_ENGINES_WORD)}", field
        raise


def _field_of(body: SamplingFields) -> str:
    """Return the field that a grammar came from; calls of tools are one too."""
    if body.response_format is not None and body.response_format.type != "text":
        return "response_format"
    return next((name for name in _FIELDS if getattr(body, name) is not None), "tools")


def _schema_of(response_format: Any) -> Any:
    if response_format.type == "json_object":
        return {"type": "object"}
    if response_format.json_schema is None or response_format.json_schema.schema_ is None:
        raise bad_request(
            "response_format has no json_schema.schema; give the schema, or use type json_object",
            "response_format.json_schema",
            "missing_required_parameter",
        )
    return response_format.json_schema.schema_


def _structured(outputs: Any) -> dict[str, Any]:
    values = {
        "json_schema": outputs.json_,
        "regex": outputs.regex,
        "choice": outputs.choice,
        "ebnf": outputs.grammar,
        "whitespace_pattern": outputs.whitespace_pattern,
    }
    if outputs.json_object:
        values["json_schema"] = {"type": "object"}
    return {name: value for name, value in values.items() if value is not None}
