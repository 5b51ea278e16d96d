"""The official client: texts, streams, counts and errors; texts are those of the engine in this process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai_servers import Served, served
from plansmith.runtime.async_engine import AsyncEngine
from plansmith.runtime.engine import Engine, SamplingParams

MESSAGES: Any = [{"role": "user", "content": "the quick brown fox"}]


def test_a_completion_has_the_engines_text_and_counts(tiny: Served, local: Engine) -> None:
    wanted = local.generate("the lazy dog", SamplingParams(max_tokens=12, temperature=0))[0]
    got = tiny.client().completions.create(model="tiny", prompt="the lazy dog", max_tokens=12, temperature=0)
    assert got.choices[0].text == wanted.text
    assert got.choices[0].finish_reason == wanted.finish_reason
    assert got.usage is not None
    assert (
        got.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == wanted.usage
    )
    assert got.model == "tiny" and got.object == "text_completion"


def test_a_seed_draws_the_engines_tokens(tiny: Served, local: Engine) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.8, top_k=20, seed=7, n=3)
    wanted = [one.text for one in local.generate("the", params)[0].outputs]
    got = tiny.client().completions.create(
        model="tiny",
        prompt="the",
        max_tokens=12,
        temperature=0.9,
        top_p=0.8,
        seed=7,
        n=3,
        extra_body={"top_k": 20},
    )
    assert [one.text for one in got.choices] == wanted
    assert len(set(wanted)) == 3


def test_a_stream_put_together_is_the_whole(tiny: Served) -> None:
    options: Any = {"model": "tiny", "prompt": "the", "max_tokens": 20, "temperature": 0.8, "seed": 3, "n": 2}
    whole = tiny.client().completions.create(**options)
    texts = ["", ""]
    finishes: list[str | None] = [None, None]
    usage = None
    for chunk in tiny.client().completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        if not chunk.choices:
            usage = chunk.usage
            continue
        assert chunk.usage is None and chunk.id.startswith("cmpl-")
        texts[chunk.choices[0].index] += chunk.choices[0].text
        finishes[chunk.choices[0].index] = chunk.choices[0].finish_reason or finishes[chunk.choices[0].index]
    assert texts == [one.text for one in whole.choices]
    assert finishes == [one.finish_reason for one in whole.choices]
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_prompts_come_as_text_ids_and_batches(tiny: Served, local: Engine) -> None:
    assert local.tokenizer is not None
    texts = ["the quick", "dog", "in the morning"]
    ids = [local.tokenizer.encode(text) for text in texts]
    greedy = SamplingParams(max_tokens=6, temperature=0)
    wanted = [one.text for one in local.generate(texts, greedy)]
    create = tiny.client().completions.create
    for prompt in (texts, ids):
        got = create(model="tiny", prompt=prompt, max_tokens=6, temperature=0)  # type: ignore[arg-type]
        assert [one.text for one in got.choices] == wanted
        assert [one.index for one in got.choices] == [0, 1, 2]
    assert create(model="tiny", prompt=ids[1], max_tokens=6, temperature=0).choices[0].text == wanted[1]


def test_a_batch_streams_with_an_index_for_each_output(tiny: Served) -> None:
    options: Any = {
        "model": "tiny",
        "prompt": ["the", "dog"],
        "n": 2,
        "max_tokens": 5,
        "temperature": 1,
        "seed": 1,
    }
    whole = [one.text for one in tiny.client().completions.create(**options).choices]
    texts = [""] * 4
    for chunk in tiny.client().completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == whole and len(whole) == 4


def test_echo_begins_with_the_prompt_and_its_logprobs(tiny: Served, local: Engine) -> None:
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=2, prompt_logprobs=2)
    wanted = local.generate("the lazy dog", params)[0]
    got = tiny.client().completions.create(
        model="tiny", prompt="the lazy dog", max_tokens=4, temperature=0, logprobs=2, echo=True
    )
    choice = got.choices[0]
    assert choice.text == "the lazy dog" + wanted.text
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert choice.logprobs.token_logprobs is not None and choice.logprobs.top_logprobs is not None
    assert wanted.prompt_logprobs is not None and wanted.logprobs is not None
    expected = [*wanted.prompt_logprobs[1:], *wanted.logprobs]
    assert choice.logprobs.token_logprobs[0] is None
    for shown, one in zip(choice.logprobs.token_logprobs[1:], expected, strict=True):
        assert one is not None and math.isclose(shown, one.logprob, abs_tol=1e-4)
    assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset or ())
    assert all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs[1:])


def test_echo_without_tokens_scores_the_prompt_alone(tiny: Served) -> None:
    got = tiny.client().completions.create(
        model="tiny", prompt="the lazy dog", max_tokens=0, logprobs=1, echo=True
    )
    assert got.choices[0].text == "the lazy dog"
    assert got.choices[0].logprobs is not None and got.usage is not None
    assert len(got.choices[0].logprobs.token_logprobs or ()) == got.usage.prompt_tokens
    assert got.usage.completion_tokens == 0


def test_echoed_logprobs_of_a_stream_are_those_of_the_whole(tiny: Served) -> None:
    options: Any = {
        "model": "tiny",
        "prompt": "the dog",
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": 1,
        "echo": True,
    }
    whole = tiny.client().completions.create(**options).choices[0].logprobs
    tokens: list[str] = []
    offsets: list[int] = []
    values: list[float | None] = []
    for chunk in tiny.client().completions.create(**options, stream=True):
        if (part := chunk.choices[0].logprobs) is not None:
            tokens += part.tokens or []
            offsets += part.text_offset or []
            values += part.token_logprobs or []
    assert whole is not None
    assert (tokens, offsets) == (whole.tokens, whole.text_offset)
    assert values[1:] == pytest.approx((whole.token_logprobs or [])[1:], abs=1e-4)


def test_a_chat_goes_through_the_template(tiny: Served, local: Engine) -> None:
    params = SamplingParams(max_tokens=10, temperature=0)
    wanted = local.generate([local.chat_ids(MESSAGES)], params, new_text=True)[0]
    got = tiny.client().chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=10, temperature=0
    )
    assert got.choices[0].message.content == wanted.text
    assert got.choices[0].message.role == "assistant"
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "the quick brown fox"}]}]
    same = tiny.client().chat.completions.create(model="tiny", messages=parts, max_tokens=10, temperature=0)
    assert same.choices[0].message.content == wanted.text


def test_a_chat_streams_its_text_and_logprobs(tiny: Served) -> None:
    options: Any = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
    }
    options["top_logprobs"] = 3
    whole = tiny.client().chat.completions.create(**options).choices[0]
    text, tokens, roles = "", [], []
    for chunk in tiny.client().chat.completions.create(**options, stream=True):
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        roles.append(choice.delta.role)
        tokens += choice.logprobs.content or [] if choice.logprobs else []
    assert text == whole.message.content
    assert roles[0] == "assistant" and set(roles[1:]) <= {None}
    assert whole.logprobs is not None and whole.logprobs.content is not None
    assert [one.token for one in tokens] == [one.token for one in whole.logprobs.content]
    assert all(len(one.top_logprobs) == 3 for one in tokens)
    assert b"".join(bytes(one.bytes or []) for one in tokens).decode("utf-8", "replace").startswith(text[:1])


def test_many_async_streams_at_once_are_each_their_own(tiny: Served, local: Engine) -> None:
    prompts = [
        f"the {word}" for word in ("dog", "fox", "day", "rest", "thing", "animals", "morning", "other")
    ] * 3
    greedy = SamplingParams(max_tokens=10, temperature=0)
    wanted = [one.text for one in local.generate(prompts, greedy)]

    async def one(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=10, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main() -> list[str]:
        async with tiny.async_client() as client:
            return list(await asyncio.gather(*(one(client, prompt) for prompt in prompts)))

    assert asyncio.run(main()) == wanted


def test_stop_strings_and_penalties_reach_the_engine(tiny: Served, local: Engine) -> None:
    free = local.generate("the", SamplingParams(max_tokens=20, temperature=0))[0].text
    stop = free[4:6]
    params = SamplingParams(max_tokens=20, temperature=0, stop=stop)
    wanted = local.generate("the", params)[0]
    create = tiny.client().completions.create
    got: Any = create(model="tiny", prompt="the", max_tokens=20, temperature=0, stop=stop)
    assert (got.choices[0].text, got.choices[0].finish_reason) == (wanted.text, "stop")
    assert got.choices[0].stop_reason == stop
    kept = create(
        model="tiny",
        prompt="the",
        max_tokens=20,
        temperature=0,
        stop=[stop],
        extra_body={"include_stop_str_in_output": True},
    )
    assert kept.choices[0].text == wanted.text + stop
    params = SamplingParams(
        max_tokens=20, temperature=0, presence_penalty=1.5, frequency_penalty=0.5, logit_bias={70: -100.0}
    )
    got = create(
        model="tiny",
        prompt="the",
        max_tokens=20,
        temperature=0,
        presence_penalty=1.5,
        frequency_penalty=0.5,
        logit_bias={"70": -100},
    )
    assert got.choices[0].text == local.generate("the", params)[0].text


def test_beams_and_best_of_come_best_first(tiny: Served, local: Engine) -> None:
    create = tiny.client().completions.create
    wanted = local.generate("the", SamplingParams(max_tokens=6, beam_width=3, temperature=0))[0]
    got = create(
        model="tiny", prompt="the", max_tokens=6, temperature=0, n=3, extra_body={"use_beam_search": True}
    )
    assert [one.text for one in got.choices] == [one.text for one in wanted.outputs]
    best = local.generate("the", SamplingParams(max_tokens=6, best_of=4, seed=2))[0]
    assert create(model="tiny", prompt="the", max_tokens=6, best_of=4, seed=2).choices[0].text == best.text


def test_models_are_listed_and_looked_up(tiny: Served) -> None:
    client = tiny.client()
    assert [one.id for one in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "plansmith"
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="other", prompt="a")
    assert error.value.code == "model_not_found" and "'tiny'" in error.value.message


BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"temperature": "hot"}, "temperature", "number"),
    ({"temperature": -1}, "temperature", "at least 0"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"n": 0}, "n", "between 1"),
    ({"n": 2.5}, "n", "integer"),
    ({"max_tokens": -5}, "max_tokens", "between 1"),
    ({"stop": 5}, "stop", "string"),
    ({"stop": [""]}, "stop", "non-empty"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token id"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "0 to 319"),
    ({"logprobs": 21}, "logprobs", "between 0 and 20"),
    ({"max_tokens": 1000}, None, "max_seq_len"),
    ({"prompt": ""}, None, "at least one"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[5], ["a"]]}, "prompt.1.0", "integer"),
    ({"prompt": [999]}, "prompt", "0 to 319"),
    ({"prompt": [-1]}, "prompt", "0 to 319"),
    ({"prompt": [2**40]}, "prompt", "0 to 319"),
    ({"prompt": [2**70]}, None, "token ids"),
    ({"prompt": [5.5]}, "prompt.0", "integer"),
    ({"n": 300, "max_tokens": 1}, "n", "256"),
    ({"prompt": ["a"] * 16, "n": 17}, "n", "272"),
    ({"stop": ["a"] * 65}, "stop", "64"),
    ({"seed": "x"}, "seed", "integer"),
    ({"extra_body": {"timeout_ms": 0}}, "timeout_ms", "between 1"),
    ({"extra_body": {"truncate_prompt_tokens": 0}}, "truncate_prompt_tokens", "at least 1"),
    ({"prompt": ["a"] * 17}, "prompt", "16"),
    ({"prompt": "a" * 500, "max_tokens": 1}, None, "max_input_len is 96"),
    ({"best_of": 2, "stream": True}, "best_of", "best_of"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"extra_body": {"guided_regex": "("}}, "guided_regex", "guided_regex cannot be compiled"),
    ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs", "cannot be compiled"),
    ({"extra_body": {"guided_regex": "a", "guided_choice": ["a"]}}, "guided_choice", "one of them"),
    ({"extra_body": {"cache_salt": ""}}, "cache_salt", "1 to 256"),
    ({"extra_body": {"allowed_token_ids": [5]}}, "allowed_token_ids", "guided_choice"),
]


@pytest.mark.parametrize(("changes", "param", "says"), BAD)
def test_a_wrong_field_is_400_with_openais_error_object(
    tiny: Served, changes: dict[str, Any], param: str | None, says: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        tiny.client().completions.create(**{"model": "tiny", "prompt": "a", **changes})
    assert error.value.param == param
    assert says in error.value.message
    assert error.value.type == "invalid_request_error"
    assert isinstance(error.value.body, dict) and set(error.value.body) == {
        "message",
        "type",
        "param",
        "code",
    }


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "no messages"),
        ([{"content": "a"}], "no role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "text alone"),
        ([{"role": "user", "content": 5}], "text or a list"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}], "not JSON"),
        ([{"role": "user", "content": "\ud800"}], "JSON"),
    ],
)
def test_wrong_messages_are_400(tiny: Served, messages: Any, says: str) -> None:
    with tiny.http() as http:
        body = json.dumps({"model": "tiny", "messages": messages})
        got = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert got.status_code == 400 and says in got.json()["error"]["message"], got.text


def test_unknown_fields_are_ignored_and_told(tiny: Served) -> None:
    with tiny.http() as http:
        body = {"prompt": "a", "max_tokens": 1, "new_thing": {"x": 1}, "store": True, "metadata": None}
        got = http.post("/v1/completions", json=body)
    assert got.status_code == 200
    assert got.headers["x-plansmith-ignored-fields"] == "new_thing,store"


def test_tokenize_and_back(tiny: Served, local: Engine) -> None:
    assert local.tokenizer is not None
    with tiny.http() as http:
        got = http.post("/tokenize", json={"prompt": "the dog é", "return_token_strs": True}).json()
        assert got["tokens"] == local.tokenizer.encode("the dog é") and got["count"] == len(got["tokens"])
        assert "".join(one for one in got["token_strs"] if not one.startswith("bytes:")).startswith(
            "the dog "
        )
        assert http.post("/detokenize", json={"tokens": got["tokens"]}).json() == {"prompt": "the dog é"}
        chat = http.post("/tokenize", json={"messages": MESSAGES}).json()
        assert chat["tokens"] == local.chat_ids(MESSAGES)
        assert http.post("/detokenize", json={"tokens": [320]}).status_code == 400
        assert http.post("/tokenize", json={}).status_code == 400


def test_metrics_count_requests_and_answers(tiny: Served) -> None:
    def value(text: str, begin: str) -> float:
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(begin))

    with tiny.http() as http:
        before = http.get("/metrics").text
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).status_code == 200
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3000}).status_code == 400
        after = http.get("/metrics").text
    for begin, wanted in (
        ("plansmith_requests_finished_total", 1),
        ('plansmith_requests_failed_total{kind="invalid"', None),
        ("plansmith_http_responses_total", 2),
    ):
        if wanted is not None:
            assert value(after, begin) - value(before, begin) == wanted, begin


def test_adapters_are_models(
    engine_dir: Path, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each answers by its name, and a request for the model alone is not changed by them."""
    import tiny_adapters

    model = tiny_adapters.load_model(tiny_checkpoint("llama"))
    adapter = tiny_adapters.make_adapter(model, tiny_adapters.ALL, r=4, seed=1)
    path = tiny_adapters.write_adapter(tmp_path / "sql", adapter, r=4)

    def make() -> AsyncEngine:
        engine = AsyncEngine.open(engine_dir, num_threads=1, max_num_tokens=32)
        engine.load_adapter("sql", path)
        return engine

    with Engine.open(engine_dir, num_threads=1) as local:
        local.load_adapter("sql", path)
        greedy = SamplingParams(max_tokens=8, temperature=0)
        alone = local.generate("the", greedy)[0].text
        adapted = local.generate("the", dataclasses.replace(greedy, adapter="sql"))[0].text
    assert alone != adapted
    with served(make) as server:
        client = server.client()
        assert [(one.id, one.model_dump()["parent"]) for one in client.models.list()] == [
            ("tiny", None),
            ("sql", "tiny"),
        ]
        for name, wanted in (("sql", adapted), ("tiny", alone), ("sql", adapted)):
            got = client.completions.create(model=name, prompt="the", max_tokens=8, temperature=0)
            assert (got.choices[0].text, got.model) == (wanted, name)
