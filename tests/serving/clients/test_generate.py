"""generate and generate_stream: JSON and server-sent events over plain HTTP, as curl and others send it."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from legacy_clients import events, post, wait_until
from triton_servers import RunningTriton

MODELS = ["ensemble", "tensorrt_llm_bls"]
PROMPT = "the quick brown fox 🦊 今日は"
KEYS = {"model_name", "model_version", "text_output"}
LONG = 7000
Tokens = Callable[..., list[list[int]]]
Text = Callable[[Sequence[int]], str]


def url(server: RunningTriton, model: str, verb: str = "generate") -> str:
    return f"http://{server.http}/v2/models/{model}/{verb}"


@pytest.mark.parametrize("model", MODELS)
def test_keys_of_an_answer(server: RunningTriton, model: str, expected: Tokens, text_of_ids: Text) -> None:
    body = {"text_input": PROMPT, "max_tokens": 20, "bad_words": "", "stop_words": ""}
    status, answer = post(url(server, model), body)
    assert status == 200 and set(answer) >= KEYS
    if model == "ensemble":
        assert {"sequence_id", "sequence_start", "sequence_end"} <= set(answer)
    assert (answer["model_name"], answer["model_version"]) == (model, "1")
    assert answer["text_output"] == PROMPT + text_of_ids(expected(PROMPT, 20)[0])
    status, answer = post(
        url(server, model), {**body, "return_log_probs": True, "return_num_output_tokens": True}
    )
    assert len(answer["output_log_probs"]) == 20 and isinstance(answer["cum_log_probs"], float)
    assert answer["num_output_tokens"] == 20
    versioned = f"http://{server.http}/v2/models/{model}/versions/1/generate"
    assert post(versioned, body)[1]["text_output"] == PROMPT + text_of_ids(expected(PROMPT, 20)[0])


@pytest.mark.parametrize("model", MODELS)
def test_events_add_up(server: RunningTriton, model: str, expected: Tokens, text_of_ids: Text) -> None:
    body = {"text_input": PROMPT, "max_tokens": 600, "stream": True, "end_id": -1}
    pieces = [event["text_output"] for event in events(url(server, model, "generate_stream"), body)]
    assert len(pieces) > 1
    assert "".join(pieces) == text_of_ids(expected(PROMPT, 600, ignore_eos=True)[0])
    (whole,) = events(url(server, model, "generate_stream"), {**body, "stream": False})
    assert whole["text_output"] == PROMPT + "".join(pieces)


@pytest.mark.parametrize("model", MODELS)
def test_words_as_text_and_as_a_list(server: RunningTriton, model: str) -> None:
    body = {"text_input": PROMPT, "max_tokens": 60, "exclude_input_in_output": True}
    text = post(url(server, model), body)[1]["text_output"]
    at = next(i for i in range(8, 50) if text[i : i + 2].isascii() and text[i : i + 2].isprintable())
    word = text[at : at + 2]
    cut = text[: text.index(word) + 2]
    for words in (word, [word], ["☃", word]):
        assert post(url(server, model), {**body, "stop_words": words})[1]["text_output"] == cut


def test_parameters_and_keys_that_are_not_known(server: RunningTriton, expected: Tokens) -> None:
    """Keys that are no inputs become request parameters; those named like an input of one value count."""
    prompt = [5, 9, 77]
    body: dict[str, Any] = {"input_ids": prompt, "input_lengths": 3, "request_output_len": 8, "end_id": -1}
    drawn = {"runtime_top_k": 50, "seed": 7, "temperature": 1.0}
    wanted = prompt + expected(prompt, 8, temperature=1.0, top_k=50, seed=7, ignore_eos=True)[0]
    for more in (drawn, {"parameters": drawn}):
        status, answer = post(
            url(server, "tensorrt_llm"), {**body, **more, "who": "me", "level": 3, "on": True}
        )
        assert (status, answer["output_ids"]) == (200, wanted)
        assert {"sequence_length", "model_name"} <= set(answer)
    status, answer = post(url(server, "tensorrt_llm"), {**body, "parameters": {"temperature": "hot"}})
    assert status >= 400 and answer["error"]
    for wrong in ({"parameters": [1]}, {"parameters": {"a": [1]}}, {"note": {"deep": 1}}):
        status, answer = post(url(server, "tensorrt_llm"), {**body, **wrong})
        assert status >= 400 and answer["error"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"temperature": -2.0}, "temperature"),
        ({"max_tokens": 0}, "request_output_len"),
        ({"text_input": ""}, "input|prompt"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_errors_come_as_error(server: RunningTriton, model: str, wrong: dict[str, Any], word: str) -> None:
    body = {"text_input": PROMPT, "max_tokens": 8, **wrong}
    status, answer = post(url(server, model), body)
    assert status == 400 and re.search(word, answer["error"]), answer
    status, answer = post(url(server, model, "generate_stream"), {**body, "stream": True})
    assert status == 400 and set(answer) == {"error"} and re.search(word, answer["error"])


@pytest.mark.parametrize("model", ["tensorrt_llm", *MODELS])
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text_input": PROMPT},
        {"text_input": PROMPT, "max_tokens": "many", "request_output_len": "many"},
        {"text_input": PROMPT, "max_tokens": 1.5, "input_lengths": [[1]]},
        {"text_input": 7, "max_tokens": 3, "input_ids": "abc", "input_lengths": 1, "request_output_len": 3},
        {"text_input": None, "max_tokens": 3, "input_ids": None, "input_lengths": 1, "request_output_len": 3},
        {"text_input": PROMPT, "max_tokens": 3, "end_id": 1 << 40, "input_ids": [1 << 40]},
        [1],
        b"{",
        b"",
    ],
)
def test_what_the_server_itself_refuses(server: RunningTriton, model: str, body: Any) -> None:
    """Wrong JSON and types: an error of the server's own words, and it goes on."""
    status, answer = post(url(server, model), body)
    assert status >= 400 and answer["error"]
    assert server.api.is_live(5)


@pytest.mark.parametrize("model", ["tensorrt_llm", "tensorrt_llm_bls"])
def test_the_id_in_the_body_names_a_request_for_its_stop(server: RunningTriton, model: str) -> None:
    """Servers of this age read no triton-request-id header; later ones do."""
    text: dict[str, Any] = {"text_input": PROMPT, "max_tokens": LONG, "stream": True, "end_id": -1}
    ids = {
        "input_ids": [5, 9],
        "input_lengths": 2,
        "request_output_len": LONG,
        "streaming": True,
        "end_id": -1,
    }
    body, stop = ids, {"input_ids": [0], "input_lengths": 0, "request_output_len": 0, "stop": True}
    if model == "tensorrt_llm_bls":
        body, stop = text, {"text_input": "", "max_tokens": 0, "stop": True}
    running = events(url(server, model, "generate_stream"), {**body, "id": "by-id"})
    next(running)
    assert list(events(url(server, model, "generate_stream"), {**stop, "id": "by-id"})) == []
    rest = list(running)
    assert len(rest) < LONG - 1 and rest[-1]["finish_reasons"] == 5
    status, answer = post(url(server, model, "generate_stream"), stop)
    assert status == 400 and "no id" in answer["error"]
    assert list(events(url(server, model, "generate_stream"), {**stop, "id": "nobody"})) == []


def test_a_client_that_leaves_frees_its_place(server: RunningTriton) -> None:
    body = {"text_input": PROMPT, "max_tokens": LONG, "stream": True, "end_id": -1}
    connection = http.client.HTTPConnection(server.http, timeout=30)
    header = {"triton-request-id": "leaves"}
    connection.request("POST", "/v2/models/tensorrt_llm_bls/generate_stream", json.dumps(body), header)
    assert connection.getresponse().readline().startswith(b"data:")
    connection.close()

    def active() -> float:
        lines = server.api.metrics(5).splitlines()
        (line,) = [
            one
            for one in lines
            if "nv_trt_llm_request_metrics" in one
            and 'model="tensorrt_llm"' in one
            and 'request_type="active"' in one
        ]
        return float(line.split()[-1])

    wait_until(lambda: active() == 0)
