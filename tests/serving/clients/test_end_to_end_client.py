"""The calls of end_to_end_grpc_client: text in and out over a gRPC stream, of the ensemble and of tensorrt_llm_bls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import lora_requests
import numpy as np
import pytest
from legacy_clients import StreamClient, StreamError, Tensors, end_to_end, text_of
from plansmith.runtime.engine import Engine
from triton_rows import PERF_METRICS
from triton_servers import RunningTriton

MODELS = ["ensemble", "tensorrt_llm_bls"]
PROMPT = "the quick brown fox 🦊 今日は"
CROWD = "👩‍👩‍👧 今日は🦊"  # characters of many tokens, and a cluster of many characters
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"n": {"enum": [7, 8]}},
        "required": ["n"],
        "additionalProperties": False,
    }
)
Tokens = Callable[..., list[list[int]]]
Text = Callable[[Sequence[int]], str]
Ask = Callable[..., list[Tensors]]


@pytest.fixture(params=MODELS)
def ask(request: pytest.FixtureRequest, server: RunningTriton) -> Ask:
    """Return `ask(texts, tokens, **others)`, which gives the answers of one of the two models."""

    def call(
        texts: str | Sequence[str], tokens: int = 24, outputs: Sequence[str] = (), **others: Any
    ) -> list[Tensors]:
        with StreamClient(server.grpc, request.param) as client:
            return client.ask(end_to_end(texts, tokens, **others), "1", outputs)

    return call


def test_its_defaults(ask: Ask, expected: Tokens, text_of_ids: Text) -> None:
    (answer,) = ask(PROMPT, 24, ["text_output"])
    assert answer["text_output"].shape == (1,)
    assert answer["text_output"][0].decode() == PROMPT + text_of_ids(expected(PROMPT, 24)[0])


def test_streams_add_up_to_the_text(ask: Ask, expected: Tokens, text_of_ids: Text) -> None:
    answers = ask(PROMPT, 2000, ["text_output"], stream=True, end_id=-1)
    assert len(answers) > 1  # how many is a matter of the machine's speed, here and below
    assert text_of(answers) == text_of_ids(expected(PROMPT, 2000, ignore_eos=True)[0])


def test_characters_are_never_cut(ask: Ask) -> None:
    regex = f"({CROWD}(ab){{0,2}}){{20}}"
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": regex}
    answers = ask("say", 1000, ["text_output"], stream=True, **guide)
    pieces = [answer["text_output"][0].decode() for answer in answers]
    assert re.fullmatch(regex, "".join(pieces)), pieces
    assert len(pieces) > 1 and not any("\ufffd" in piece for piece in pieces)
    assert text_of(ask("say", 1000, exclude_input_in_output=True, **guide)) == "".join(pieces)


@pytest.mark.parametrize("stream", [False, True])
def test_a_batch_has_its_index(ask: Ask, expected: Tokens, text_of_ids: Text, stream: bool) -> None:
    """--batch-inputs: rows of different lengths, padded by nobody but the model."""
    prompts = ["a", PROMPT, "Zwölf Boxkämpfer jagen"]
    answers = ask(prompts, 16, ["text_output", "batch_index"], stream=stream)
    assert {answer["batch_index"].shape for answer in answers} == {(1, 1)}
    for i, prompt in enumerate(prompts):
        wanted = text_of_ids(expected(prompt, 16)[0])
        assert text_of(answers, i) == (wanted if stream else prompt + wanted)


def test_overwriting_answers_have_all_text(
    server: RunningTriton, expected: Tokens, text_of_ids: Text
) -> None:
    with StreamClient(server.grpc, "bls_overwrite") as client:
        asked = end_to_end(PROMPT, 2000, stream=True, end_id=-1)
        answers = client.ask(asked, "1", ["text_output"])
    texts = [answer["text_output"][0].decode() for answer in answers]
    assert len(texts) > 1 and texts[-1] == text_of_ids(expected(PROMPT, 2000, ignore_eos=True)[0])
    assert all(texts[-1].startswith(text) for text in texts)


def test_words_bias_and_ends(ask: Ask, expected: Tokens, text_of_ids: Text) -> None:
    plain = {"exclude_input_in_output": True}
    text = text_of_ids(expected(PROMPT, 60)[0])
    word = next(
        one for one in (text[i : i + 3] for i in range(10, 40)) if one.isascii() and one.isprintable()
    )
    assert text_of(ask(PROMPT, 60, stop_words=["\u2603", word], **plain)) == text[: text.index(word) + 3]
    assert "N" in text  # a token of its own, which this model likes
    bad = text_of(ask(PROMPT, 60, bad_words=["N"], **plain))
    assert bad and "N" not in bad
    bias = {"embedding_bias_words": ["q", "z"], "embedding_bias_weights": [1000.0, 500.0]}
    assert text_of(ask(PROMPT, 12, **bias, **plain)) == "q" * 12
    ids = expected(PROMPT, 60, ignore_eos=True)[0]
    ended = text_of(ask(PROMPT, 60, end_id=ids[7], pad_id=0, **plain))
    assert ended in (text_of_ids(ids[: ids.index(ids[7])]), text_of_ids(ids[: ids.index(ids[7]) + 1]))


def test_everything_it_can_return(ask: Ask) -> None:
    flags: dict[str, Any] = {f"return_{name}": True for name in ("log_probs", "context_logits")}
    flags |= {f"return_{name}": True for name in ("generation_logits", "perf_metrics")}
    wanted = ["text_output", "cum_log_probs", "output_log_probs", "context_logits", "generation_logits"]
    (answer,) = ask(PROMPT, 6, [*wanted, *PERF_METRICS], **flags)
    assert set(answer) == {*wanted, *PERF_METRICS}
    assert answer["cum_log_probs"].shape == (1, 1) and answer["output_log_probs"].shape == (1, 1, 6)
    assert answer["context_logits"].ndim == 3 and answer["generation_logits"].shape == (1, 1, 6, 320)
    assert answer["cum_log_probs"].item() == pytest.approx(answer["output_log_probs"].sum(), abs=1e-3)
    assert {answer[name].shape for name in PERF_METRICS} == {(1, 1)}


def test_metrics_are_in_every_answer_of_a_stream(ask: Ask) -> None:
    """The client takes [0][0] of them all, whichever answer it is; the last has the values."""
    answers = ask(
        PROMPT, 1000, ["text_output", *PERF_METRICS], stream=True, end_id=-1, return_perf_metrics=True
    )
    assert len(answers) > 1
    for answer in answers:
        assert {name: answer[name].shape for name in PERF_METRICS} == dict.fromkeys(PERF_METRICS, (1, 1))
    assert answers[-1]["last_token_time_ns"].item() > answers[-1]["arrival_time_ns"].item() > 0


@pytest.mark.parametrize("stream", [False, True])
def test_several_sequences(ask: Ask, expected: Tokens, text_of_ids: Text, stream: bool) -> None:
    drawn = {"num_return_sequences": 3, "top_k": 40, "temperature": 1.0, "exclude_input_in_output": True}
    answers = ask(PROMPT, 12, ["text_output", "sequence_index"], stream=stream, **drawn)
    wanted = expected(PROMPT, 12, n=3, temperature=1.0, top_k=40, seed=0)
    assert [text_of(answers, 0, i) for i in range(3)] == [text_of_ids(ids) for ids in wanted]


def test_beams_come_best_first(ask: Ask, expected: Tokens, text_of_ids: Text) -> None:
    (answer,) = ask(PROMPT, 8, ["text_output"], beam_width=3, exclude_input_in_output=True)
    wanted = expected(PROMPT, 8, beam_width=3, length_penalty=0.0, early_stopping=True)
    assert [text.decode() for text in answer["text_output"]] == [text_of_ids(ids) for ids in wanted]


@pytest.mark.parametrize(
    ("kind", "guide", "matches"),
    [
        ("json", None, lambda text: text.lstrip()[0] in '{["-0123456789tfn'),
        ("json_schema", SCHEMA, lambda text: json.loads(text)["n"] in (7, 8)),
        ("regex", "[abc]{5}-[0-9]{4}", lambda text: re.fullmatch("[abc]{5}-[0-9]{4}", text)),
        ("ebnf_grammar", 'root ::= "yes" | "no"', lambda text: text in ("yes", "no")),
    ],
)
def test_guides(ask: Ask, kind: str, guide: str | None, matches: Callable[[str], object]) -> None:
    more = {} if guide is None else {"guided_decoding_guide": guide}
    text = text_of(ask(PROMPT, 64, exclude_input_in_output=True, guided_decoding_guide_type=kind, **more))
    assert matches(text)


def test_an_adapter(ask: Ask, engine: Engine) -> None:
    config, weights = lora_requests.arrays(engine, 72)
    task = {"lora_task_id": np.array([[72]], np.uint64), "exclude_input_in_output": True}
    first = text_of(ask(PROMPT, 16, lora_weights=weights[None], lora_config=config[None], **task))
    plain = text_of(ask(PROMPT, 16, exclude_input_in_output=True))
    assert first == text_of(ask(PROMPT, 16, **task)) != plain


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"guided_decoding_guide_type": "poem", "guided_decoding_guide": "x"}, "guide_type"),
        ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "("}, "regex"),
        ({"temperature": -1.0}, "temperature"),
        ({"prompt_embedding_table": np.ones((1, 2, 64), np.float16)}, "prompt_embedding_table"),
        ({"embedding_bias_words": ["a"]}, "weight"),
        ({"beam_width": 9}, "beam"),
        ({"tokens": -3}, "request_output_len|max_tokens"),
        ({"texts": ""}, "empty|prompt|input"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_say_what_is_wrong(ask: Ask, more: dict[str, Any], word: str, stream: bool) -> None:
    asked = {"texts": PROMPT, **more}
    with pytest.raises(StreamError, match=word):
        ask(asked.pop("texts"), asked.pop("tokens", 8), stream=stream, **asked)
