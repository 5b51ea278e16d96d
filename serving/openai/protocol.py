"""The bodies of requests. Types are strict: "5" is no number; null is the same as a field left out.

Fields that are not listed are ignored, and the answer names them in a header: clients send new ones all the time. Those
that would change the answer and cannot be honoured are refused instead, see REFUSED.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import pydantic

from .errors import ApiError, bad_request

# Field -> what to do instead; null, false and empty lists ask for nothing and pass.
REFUSED = {
    "suffix": "text is only generated behind a prompt; put what comes before it into prompt",
    "allowed_token_ids": "give the allowed texts as guided_choice or guided_regex",
    "functions": "give them as tools",
    "function_call": "give it as tool_choice",
    "prompt_embeds": "give the prompt as text or token ids",
    "audio": "the model writes text; leave it out",
    "continue_final_message": "send the rendered prompt to /v1/completions, which continues it",
    "logits_processors": "use logit_bias or the guided fields",
}

T = TypeVar("T")
# A list that ends at its first wrong entry: an error for each of a million would stop the event loop for seconds.
List = Annotated[list[T], pydantic.Field(fail_fast=True)]


def _check_numbers(value: Any) -> Any:
    """Return a logit_bias as it is; ValueError at its first wrong entry."""
    if isinstance(value, dict) and not all(type(bias) in (int, float) for bias in value.values()):
        raise ValueError("an object of numbers")
    return value


class _Body(pydantic.BaseModel):  # type: ignore[misc]
    model_config = pydantic.ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(_Body):
    """include_usage: a last chunk with token counts; continuous_usage_stats: counts so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(_Body):
    """The json_schema of a response_format."""

    name: str | None = None
    schema_: Any = pydantic.Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Body):
    """vLLM's newer form of the guided fields."""

    json_: Any = pydantic.Field(None, alias="json")
    regex: str | None = None
    choice: List[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None


class SamplingFields(_Body):
    """What both kinds of completion take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, pydantic.BeforeValidator(_check_numbers)] = None
    seed: int | None = None
    stop: str | List[str] | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None

    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: List[int] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: List[str] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    priority: float | None = None
    timeout_ms: int | None = None
    cache_salt: str | None = None
    max_draft_len: int | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: List[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structured_outputs: StructuredOutputs | None = None


class CompletionBody(SamplingFields):
    """POST /v1/completions."""

    prompt: str | List[int] | List[str] | List[List[int]]
    echo: bool | None = None
    logprobs: int | None = None


class FunctionDefinition(_Body):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    """A tool of a chat request."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(_Body):
    """The name in a tool_choice."""

    name: str


class NamedToolChoice(_Body):
    """The tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(SamplingFields):
    """POST /v1/chat/completions."""

    messages: List[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: List[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: List[str] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: List[dict[str, Any]] | None = None


class TokenizeBody(_Body):
    """POST /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: List[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    tools: List[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: List[dict[str, Any]] | None = None
    cache_salt: str | None = None


class DetokenizeBody(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: List[int]
    skip_special_tokens: bool | None = None


FIELD_NAMES = frozenset({*CompletionBody.model_fields, *ChatBody.model_fields})


def parse(cls: Any, data: bytes) -> Any:
    """Return a body of the class; raises ApiError 400 naming the field that is missing or of the wrong type."""
    try:
        body = cls.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise _of_validation(error) from None
    except RecursionError:
        raise bad_request("the body is nested too deeply; make it flatter", code="invalid_json") from None
    for name, instead in REFUSED.items():
        if name in (body.model_extra or {}) and body.model_extra[name]:
            raise bad_request(f"{name} is not supported; {instead}", name, "unsupported_parameter")
    return body


def unknown_fields(body: Any) -> list[str]:
    """Return the names of the fields that were ignored, those a header can hold."""
    names = [name for name, value in (body.model_extra or {}).items() if value is not None]
    return [name for name in names if name.isascii() and name.isidentifier() and len(name) <= 64][:16]


def _of_validation(error: Any) -> ApiError:
    details = error.errors(include_url=False, include_input=False)
    first = details[0]
    if first["type"] == "json_invalid":
        return bad_request(
            f"the body is not JSON ({first['msg']}); send one JSON object", code="invalid_json"
        )
    # Of a field with several possible types each one's failure is listed, the deepest says most.
    same = [one for one in details if one["loc"][:1] == first["loc"][:1]]
    deepest = max(same, key=lambda one: len(one["loc"]))
    where = _path(deepest["loc"])
    if first["type"] == "missing":
        return bad_request(f"{where} is missing; give it", where or None, "missing_required_parameter")
    if not where:
        return bad_request(f"the body is wrong: {first['msg']}; send one JSON object", code="invalid_json")
    wanted = " or ".join(
        dict.fromkeys(_wanted(one["msg"]) for one in same if one["loc"] == deepest["loc"] or len(same) > 1)
    )
    return bad_request(f"{where} has the wrong type or value, it must be {wanted}", where, "invalid_type")


def _path(location: tuple[Any, ...]) -> str:
    """Return a field's path without the names that pydantic gives to the members of a union."""
    parts = [
        part
        for part in location
        if isinstance(part, int) or (part.isidentifier() and part not in ("str", "NamedToolChoice", "bool"))
    ]
    return ".".join(str(part) for part in parts)


def _wanted(message: str) -> str:
    for prefix in ("Value error, ", "Input should be ", "a valid "):
        message = message.removeprefix(prefix)
    return message.rstrip(".")
