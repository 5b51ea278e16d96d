"""How models write tool calls, and grammars that make them write one."""

from __future__ import annotations

import collections
import dataclasses
import json
import secrets
import string
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ...runtime.errors import InvalidArgumentError
from ...runtime.guided import GuidedParams
from ...runtime.guided_grammar import WHITESPACE
from ...runtime.tokenizer import Tokenizer
from .errors import ApiError, bad_request
from .protocol import ChatBody, FunctionDefinition, NamedToolChoice

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_MAX_TOOLS = 1024
_MAX_CALLS = 16  # of one answer that must be calls, so that a small model comes to an end


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """The text of a tool call.

    name : as --tool-format has it
    opening, closing : around a call, or around the list of calls; "" = the call begins the answer
    arguments_key : of the call's JSON
    marker_id : the token that `opening` is, if it is a special one, which the text would not show
    """

    name: str
    opening: str
    closing: str
    arguments_key: str
    marker_id: int | None = None

    def new_id(self) -> str:
        """Return a new id of a call; Mistral's templates take 9 letters and digits alone."""
        if self.name == "mistral":
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{uuid.uuid4().hex[:24]}"


_FORMATS = {
    "hermes": ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments"),
    "llama3": ToolFormat("llama3", "", "", "parameters"),
    "mistral": ToolFormat("mistral", "[TOOL_CALLS]", "", "arguments"),
}
FORMAT_NAMES = ("auto", *_FORMATS, "none")


def tool_format_of(tokenizer: Tokenizer | None, name: str) -> ToolFormat | None:
    """Return how a model writes calls, None for one that does not.

    name : of FORMAT_NAMES; "auto" = by what its template writes
    raises InvalidArgumentError for another name
    """
    if name not in FORMAT_NAMES:
        raise InvalidArgumentError(f"tool_format is {name!r}, it must be one of {', '.join(FORMAT_NAMES)}")
    template = None if tokenizer is None else tokenizer.chat_template
    if name == "none" or tokenizer is None or template is None or not template.reads("tools"):
        return None
    found = _FORMATS[_guess(template.source) if name == "auto" else name]
    token_id = tokenizer.token_to_id(found.opening) if found.opening else None
    if token_id is not None and tokenizer.is_special(token_id):
        return dataclasses.replace(found, marker_id=token_id)
    return found


def _guess(source: str) -> str:
    if "[TOOL_CALLS]" in source:
        return "mistral"
    return "llama3" if "<tool_call>" not in source and '"parameters"' in source else "hermes"


def active_tools(body: ChatBody) -> list[FunctionDefinition]:
    """Return the functions that an answer may call; ApiError 400 for a choice that does not go with the tools."""
    choice = body.tool_choice
    if choice == "none" or not body.tools:
        if choice == "required" or isinstance(choice, NamedToolChoice):
            raise bad_request("tool_choice asks for a call and there are no tools; give some", "tool_choice")
        return []
    functions = [tool.function for tool in body.tools]
    names = [function.name for function in functions]
    if len(names) > _MAX_TOOLS:
        raise bad_request(f"tools has {len(names)} functions, the most is {_MAX_TOOLS}", "tools")
    twice = next((name for name, count in collections.Counter(names).items() if count > 1), None)
    if twice is not None:
        raise bad_request(f"tools has two functions {twice!r}; give each a name of its own", "tools")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise bad_request(
            f"tool_choice names the function {choice.function.name!r}, tools has {', '.join(names)}",
            "tool_choice",
        )
    return functions


def guide_calls(
    body: ChatBody, form: ToolFormat, functions: Sequence[FunctionDefinition], guided: GuidedParams | None
) -> GuidedParams | None:
    """Return what the answer must be: calls where they are required, calls or the schema's JSON where both may be.

    guided : what the text of an answer must be by itself
    """
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        only = [function for function in functions if function.name == choice.function.name]
        return _made(_grammar(form, only, many=False))
    many = body.parallel_tool_calls is not False and form.name != "llama3"
    if choice == "required":
        return _made(_grammar(form, functions, many=many))
    if guided is None or guided.json_schema is None or not functions:
        return guided
    schema = guided.json_schema
    answer = json.loads(schema) if isinstance(schema, str) else schema
    return _made(_grammar(form, functions, many=many, answer=answer))


def _made(grammar: str) -> GuidedParams:
    return GuidedParams(ebnf=grammar)


def _grammar(
    form: ToolFormat, functions: Sequence[FunctionDefinition], *, many: bool, answer: Any = None
) -> str:
    """Return a grammar in llguidance's Lark: one line a rule, a rule a function."""
    calls = {"hermes": _hermes, "llama3": _single, "mistral": _mistral}[form.name](form, many)
    lines = [f"start: {calls}" if answer is None else f"start: {calls} | answer"]
    if answer is not None:
        lines.append(f"answer: {_json_rule(answer)}")
    lines.append("object: " + " | ".join(f"object_{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function.name)}, "{form.arguments_key}": '
        lines.append(f'object_{i}: {_literal(head)} arguments_{i} "}}"')
        lines.append(f"arguments_{i}: {_json_rule(function.parameters or _NO_ARGUMENTS)}")
    return "\n".join(lines)


def _hermes(form: ToolFormat, many: bool) -> str:
    one = f'{_opening(form)} "\\n" object "\\n" {_literal(form.closing)}'
    return f'{one} ("\\n" {one}){{0,{_MAX_CALLS - 1}}}' if many else one


def _single(form: ToolFormat, many: bool) -> str:
    return "object"


def _mistral(form: ToolFormat, many: bool) -> str:
    rest = f' (", " object){{0,{_MAX_CALLS - 1}}}' if many else ""
    return f'{_opening(form)} " "? "[" object{rest} "]"'


def _opening(form: ToolFormat) -> str:
    return _literal(form.opening) if form.marker_id is None else f"<[{form.marker_id}]>"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_rule(schema: Mapping[str, Any] | bool) -> str:
    options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    try:
        return "%json " + json.dumps(
            {**({} if isinstance(schema, bool) else schema), **options}, allow_nan=False
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise ApiError(
            400, f"a function's parameters cannot be written as JSON: {error}", param="tools"
        ) from error
