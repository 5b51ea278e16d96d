"""Tools: calls read from a model's text whole and in pieces, calls that must be made, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai_servers import ScriptedModel, Served
from plansmith.runtime.tokenizer import Tokenizer
from plansmith.serving.openai.errors import ApiError
from plansmith.serving.openai.protocol import ChatBody
from plansmith.serving.openai.tool_parser import Called, Event, Said, ToolParser
from plansmith.serving.openai.tools import _FORMATS, active_tools

USER: Any = [{"role": "user", "content": "the weather"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "at": {"enum": ["a", "b"]},
                    "n": {"type": "integer", "maximum": 9, "minimum": 0},
                },
                "required": ["at", "n"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("f", "g")
]
NAMES = ("f", "g")


def read(form: str, pieces: list[str], most: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the calls (name, arguments) of a model's output that comes in pieces."""
    parser = ToolParser(_FORMATS[form], NAMES, most)
    events: list[Event] = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish()
    text = "".join(event.text for event in events if isinstance(event, Said))
    calls: list[tuple[str, str]] = []
    for event in events:
        if not isinstance(event, Called):
            continue
        if event.id is not None:
            calls.append((str(event.name), ""))
        assert event.index == len(calls) - 1
        calls[-1] = (calls[-1][0], calls[-1][1] + event.arguments)
    return text, calls


CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "just text", "just text", []),
    ("hermes", "a < b <tool and <tool_", "a < b <tool and <tool_", []),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"at": "a"}}\n</tool_call>', "", [("f", '{"at": "a"}')]),
    (
        "hermes",
        'Well.\n<tool_call>{"name":"f","arguments":{"s":"} </tool_call> \\" {"}}</tool_call>\n'
        '<tool_call>\n{"arguments": {"x": [1, {}]}, "name": "g"}\n</tool_call> bye',
        "Well.\nbye",
        [("f", '{"s":"} </tool_call> \\" {"}'), ("g", '{"x": [1, {}]}')],
    ),
    ("hermes", '<tool_call>{"name": "h", "arguments": {}}</tool_call>', None, []),  # type: ignore[list-item]
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", "<tool_call> no json", None, []),  # type: ignore[list-item]
    ("hermes", '<tool_call>{"name": "f", "argum', "", [("f", "")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "\\ud800"}</tool_call>', "", [("f", "?")]),
    ("llama3", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}', "",
     [("f", "{}"), ("g", '{"b": 2}')]),
    ("llama3", '{"answer": 5}', '{"answer": 5}', []),
    ("llama3", '{"name": "Bob", "age": 5}', '{"name": "Bob", "age": 5}', []),
    ("llama3", 'text {"name": "f", "parameters": {}}', 'text {"name": "f", "parameters": {}}', []),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "",
     [("f", '{"a": 1}'), ("g", "{}")]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": {"b": "]"}}[TOOL_CALLS]g[ARGS]{}', "",
     [("f", '{"a": {"b": "]"}}'), ("g", "{}")]),
    ("mistral", "[TOOL", "[TOOL", []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "output", "text", "calls"), CASES)
def test_calls_are_read(form: str, output: str, text: str | None, calls: list[tuple[str, str]]) -> None:
    wanted = output if text is None else text
    for pieces in ([output], list(output)):
        assert read(form, pieces) == (wanted, calls)


@given(st.sampled_from(CASES), st.lists(st.integers(1, 12), min_size=1, max_size=60))
@settings(max_examples=150, deadline=None)
def test_pieces_do_not_matter(case: tuple[str, str, str, Any], sizes: list[int]) -> None:
    form, output = case[:2]
    pieces, at = [], 0
    for size in sizes:
        pieces.append(output[at : at + size])
        at += size
    assert read(form, [*pieces, output[at:]]) == read(form, [output])


@given(
    st.sampled_from(sorted(_FORMATS)), st.text('<>{}[]"\\ab:,;/ \n_toolcalTOOLCALLSARGSnamef', max_size=60)
)
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_to_its_end(form: str, output: str) -> None:
    text, calls = read(form, list(output))
    if not calls and output.strip():
        assert text == output


def test_only_as_many_calls_as_wanted() -> None:
    one = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for pieces in ([one + one], list(one + one)):
        assert read("hermes", pieces, most=1) == ("", [("f", "{}")])
    cut = one + one[:30]  # the length was over inside a call that is too many
    for pieces in ([cut], list(cut)):
        assert read("hermes", pieces, most=1) == ("", [("f", "{}")])


def test_lists_of_tools_are_checked_in_time_that_grows_with_them() -> None:
    def body(names: list[str]) -> ChatBody:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return ChatBody.model_validate({"messages": [], "tools": tools})

    names = [f"f{i}" for i in range(1024)]
    assert [one.name for one in active_tools(body(names))] == names
    with pytest.raises(ApiError, match="two functions 'f7'"):
        active_tools(body([*names[:-1], "f7"]))
    with pytest.raises(ApiError, match="1025 functions, the most is 1024"):
        active_tools(body([*names, "g"]))


def test_a_models_call_comes_as_tool_calls(script: tuple[ScriptedModel, Served]) -> None:
    model, server = script
    model.script = 'Let me see.\n<tool_call>\n{"name": "g", "arguments": {"at": "b", "n": 3}}\n</tool_call>'
    got = server.client().chat.completions.create(model="tiny", messages=USER, tools=TOOLS)
    choice = got.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see.\n"
    calls: Any = choice.message.tool_calls
    assert [(one.function.name, json.loads(one.function.arguments)) for one in calls] == [
        ("g", {"at": "b", "n": 3})
    ]
    assert calls[0].id.startswith("call_") and calls[0].type == "function"


def test_a_streamed_call_is_that_of_the_whole(
    script: tuple[ScriptedModel, Served], tokenizer: Tokenizer
) -> None:
    model, server = script
    one = '<tool_call>\n{"name": "%s", "arguments": {"at": "b", "n": 3}}\n</tool_call>'
    model.script = f"Hm.{one % 'g'}\n{one % 'f'}"
    model.hold_at = len(tokenizer.encode(model.script.partition(': "b"')[0], add_special_tokens=False))
    stream = server.client().chat.completions.create(model="tiny", messages=USER, tools=TOOLS, stream=True)
    text, finish, calls = "", None, {}
    for chunk in stream:
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or []:
            own = calls.setdefault(call.index, {"id": call.id, "name": None, "arguments": ""})
            assert call.function is not None
            own["name"] = call.function.name or own["name"]
            own["arguments"] += call.function.arguments or ""
            if own["arguments"]:
                model.go_on.set()  # arguments come while they are generated: the model waits in their middle
    assert (text, finish) == ("Hm.", "tool_calls")
    assert [(one["name"], json.loads(one["arguments"])) for one in calls.values()] == [
        ("g", {"at": "b", "n": 3}),
        ("f", {"at": "b", "n": 3}),
    ]
    assert len({one["id"] for one in calls.values()}) == 2


def test_the_clients_stream_helper_understands_calls(script: tuple[ScriptedModel, Served]) -> None:
    model, server = script
    model.script = '<tool_call>\n{"name": "g", "arguments": {"at": "b", "n": 3}}\n</tool_call>'
    with server.client().chat.completions.stream(model="tiny", messages=USER, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls is not None
    assert json.loads(final.choices[0].message.tool_calls[0].function.arguments) == {"at": "b", "n": 3}


def test_answers_to_calls_go_through_the_template(script: tuple[ScriptedModel, Served]) -> None:
    model, server = script
    model.script = "sunny"
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"at": "a"}'}}
    messages: Any = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "20 C"},
    ]
    got = server.client().chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    assert got.choices[0].message.content == "sunny" and got.choices[0].finish_reason == "stop"
    with server.http() as http:
        ids = http.post("/tokenize", json={"messages": messages, "tools": TOOLS}).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert '<tool_call>\n{"name": "f", "arguments": {"at": "a"}}\n</tool_call>' in text
    assert "20 C" in text and '"name": "g"' in text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
def test_a_call_can_be_required(script: tuple[ScriptedModel, Served], choice: Any) -> None:
    model, server = script
    model.script = "I would rather talk"  # the grammar leaves only calls
    got = server.client().chat.completions.create(
        model="tiny",
        messages=USER,
        tools=TOOLS,
        tool_choice=choice,
        max_tokens=400,
        parallel_tool_calls=False,
    )
    calls: Any = got.choices[0].message.tool_calls
    assert got.choices[0].finish_reason == "tool_calls" and len(calls) == 1
    assert calls[0].function.name in (("g",) if isinstance(choice, dict) else ("f", "g"))
    arguments = json.loads(calls[0].function.arguments)
    assert arguments["at"] in ("a", "b") and 0 <= arguments["n"] <= 9


def test_a_schema_and_tools_leave_both_ways(script: tuple[ScriptedModel, Served]) -> None:
    model, server = script
    form: Any = {
        "type": "json_schema",
        "json_schema": {
            "name": "x",
            "schema": {
                "$defs": {"one": {"enum": ["p", "q"]}},
                "type": "object",
                "properties": {"k": {"$ref": "#/$defs/one"}},
                "required": ["k"],
                "additionalProperties": False,
            },
        },
    }
    create = server.client().chat.completions.create
    model.script = '{"k": "q"}'
    got = create(model="tiny", messages=USER, tools=TOOLS, response_format=form)
    assert got.choices[0].message.content == '{"k": "q"}' and got.choices[0].finish_reason == "stop"
    model.script = '<tool_call>\n{"name": "f", "arguments": {"at": "a", "n": 1}}\n</tool_call>'
    got = create(model="tiny", messages=USER, tools=TOOLS, response_format=form)
    assert got.choices[0].finish_reason == "tool_calls" and got.choices[0].message.content is None


class Place(pydantic.BaseModel):
    """What the client parses an answer into."""

    at: str = pydantic.Field(max_length=5)
    n: int = pydantic.Field(ge=0, le=99)


def test_the_clients_parse_gets_an_object(tiny: Served) -> None:
    got = tiny.client().chat.completions.parse(
        model="tiny", messages=USER, response_format=Place, max_tokens=60, temperature=0.5, seed=1
    )
    if got.choices[0].finish_reason == "stop":  # a random model may fill its tokens with blanks
        assert isinstance(got.choices[0].message.parsed, Place)


def test_json_object_is_an_object(script: tuple[ScriptedModel, Served]) -> None:
    model, server = script
    model.script = '{"a": [1, 2]}'
    got = server.client().chat.completions.create(
        model="tiny", messages=USER, response_format={"type": "json_object"}
    )
    assert json.loads(got.choices[0].message.content or "") == {"a": [1, 2]}


def test_vllms_guided_fields(tiny: Served) -> None:
    create = tiny.client().completions.create
    for extra in (
        {"guided_choice": ["yes", "no"]},
        {"guided_regex": "yes|no"},
        {"guided_grammar": 'root ::= "yes" | "no"'},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ):
        got = create(model="tiny", prompt="a", max_tokens=20, extra_body=extra)
        assert got.choices[0].text in ("yes", "no"), extra
        assert got.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "'h'"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "two functions"),
        ({"tools": [{"type": "function"}]}, "tools.0.function is missing"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema"),
        ({"response_format": {"type": "xml"}}, "json_schema"),
        ({"top_logprobs": 3}, "logprobs true"),
        ({"functions": [{"name": "f"}]}, "give them as tools"),
    ],
)
def test_what_does_not_go_together_is_400(
    script: tuple[ScriptedModel, Served], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        script[1].client().chat.completions.create(**{"model": "tiny", "messages": USER, **changes})


def test_a_template_without_tools_refuses_them(tiny: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="--chat-template"):
        tiny.client().chat.completions.create(model="tiny", messages=USER, tools=TOOLS)
    got = tiny.client().chat.completions.create(
        model="tiny", messages=USER, tools=TOOLS, tool_choice="none", max_tokens=2
    )
    assert got.choices[0].message.content is not None
