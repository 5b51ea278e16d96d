"""The loop of e2e_grpc_speculative_decoding_client: the client asks the draft, then the target, and so on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from legacy_clients import StreamClient, Tensors, end_to_end, infer_inputs, one
from triton_servers import RunningTriton

PROMPT = "the lazy dog sleeps"
Tokens = Callable[..., list[list[int]]]


def once(client: Any, model: str, tensors: Tensors) -> Tensors:
    """Return the one answer of a model, asked by one call: those of decoupled models do not take it."""
    result = client.infer(model, infer_inputs(tensors), request_id="1")
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def rounds(
    client: grpcclient.InferenceServerClient,
    target: Callable[[Tensors], Tensors],
    draft: Callable[[Tensors], Tensors],
    max_tokens: int,
    num_draft: int,
    *,
    stop_words: Sequence[str] = (),
    logits: bool = False,
) -> tuple[str, int]:
    """Return the text that draft and target make together, and the number of rounds."""
    query: Tensors = {"QUERY": one(PROMPT), "REQUEST_OUTPUT_LEN": one(max_tokens)}
    if stop_words:
        query["STOP_WORDS_DICT"] = np.array([[word.encode() for word in stop_words]], object)
    encoded = once(client, "preprocessing", query)
    prompt = ids = encoded["INPUT_ID"][0]
    words = _words(encoded["STOP_WORDS_IDS"][0])
    drafted: np.ndarray[Any, Any] | None = None
    count = 0
    while True:
        count += 1
        left = len(prompt) + max_tokens - len(ids)
        sent = {
            "input_ids": ids[None],
            "input_lengths": one(len(ids)),
            "bad_words_list": encoded["BAD_WORDS_IDS"],
            "stop_words_list": encoded["STOP_WORDS_IDS"],
            "beam_width": one(1),
            "temperature": one(1.0),
            "end_id": encoded["OUT_END_ID"],
            "pad_id": encoded["OUT_PAD_ID"],
        }
        more: Tensors = {"request_output_len": one(1)}
        if min(num_draft, left - 1) > 0:
            asked = sent | {"request_output_len": one(min(num_draft, left - 1))}
            answer = draft(asked | ({"return_generation_logits": one(True)} if logits else {}))
            drafted = np.squeeze(answer["output_ids"], axis=(0, 1))
            tokens = drafted[len(ids) : answer["sequence_length"][0, 0]]
            more = {"draft_input_ids": tokens[None], "request_output_len": one(len(tokens) + 1)}
            if logits:
                more["draft_logits"] = answer["generation_logits"][0]
                assert more["draft_logits"].shape == (1, len(tokens), 320)
        answer = target(sent | more)
        assert answer["sequence_length"].shape == (1, 1)
        before, ids = ids, np.squeeze(answer["output_ids"], axis=(0, 1))
        is_full = len(ids) >= len(prompt) + max_tokens
        is_stopped = any(ids[-len(word) :].tolist() == word for word in words)
        if is_full or is_stopped or np.array_equal(before, ids) or np.array_equal(drafted, ids):
            break
    decoded = once(
        client, "postprocessing", {"TOKENS_BATCH": ids[None, None], "SEQUENCE_LENGTH": one(len(ids))}
    )
    return decoded["OUTPUT"][0].decode(), count


def _words(array: np.ndarray[Any, Any]) -> list[list[int]]:
    ends = [end for end in array[1].tolist() if end > 0]
    return [array[0, start:end].tolist() for start, end in zip([0, *ends], ends, strict=False)]


@pytest.fixture
def client(server: RunningTriton) -> grpcclient.InferenceServerClient:
    return grpcclient.InferenceServerClient(server.grpc)


def streamed(server: RunningTriton, model: str) -> Callable[[Tensors], Tensors]:
    """Return what asks a decoupled model for one answer."""

    def ask(tensors: Tensors) -> Tensors:
        with StreamClient(server.grpc, model) as stream:
            (answer,) = stream.ask(tensors, "1")
        return answer

    return ask


@pytest.mark.parametrize("logits", [False, True])
def test_rounds_give_the_targets_text(
    server: RunningTriton,
    client: grpcclient.InferenceServerClient,
    expected: Tokens,
    text_of_ids: Callable[[Sequence[int]], str],
    logits: bool,
) -> None:
    wanted = PROMPT + text_of_ids(expected(PROMPT, 40)[0])
    target, draft = streamed(server, "tensorrt_llm"), streamed(server, "tensorrt_llm_draft")
    text, num_rounds = rounds(client, target, draft, 40, 5, logits=logits)
    assert text == wanted and num_rounds < 40
    text, num_rounds = rounds(client, target, lambda tensors: target(tensors), 40, 5, logits=logits)
    assert text == wanted and num_rounds == 7  # 5 right drafts and one token each


def test_one_call_an_answer_and_stop_words(
    client: grpcclient.InferenceServerClient, drafted: Tokens, text_of_ids: Callable[[Sequence[int]], str]
) -> None:
    """Target and draft the same model, which is not decoupled: as the loop was written for."""

    def ask(tensors: Tensors) -> Tensors:
        return once(client, "tensorrt_llm_once", tensors)

    (ids,) = drafted(PROMPT, 30)
    assert rounds(client, ask, ask, 30, 4)[0] == PROMPT + text_of_ids(ids)
    at = next(i for i in range(5, 25) if text_of_ids(ids[i : i + 1]).isascii())
    word = text_of_ids(ids[at : at + 1])
    first = next(i for i, token in enumerate(ids) if text_of_ids([token]) == word)
    stopped, _ = rounds(client, ask, ask, 30, 4, stop_words=[word])
    assert stopped == PROMPT + text_of_ids(ids[: first + 1])


def test_two_engines_do_not_mix(
    server: RunningTriton,
    client: grpcclient.InferenceServerClient,
    expected: Tokens,
    drafted: Tokens,
    text_of_ids: Callable[[Sequence[int]], str],
) -> None:
    """The ensemble of one engine and that of the other, side by side."""
    tensors = end_to_end(PROMPT, 60, exclude_input_in_output=True)
    answers = {"ensemble_once": once(client, "ensemble_once", tensors)}
    answers["ensemble"] = streamed(server, "ensemble")(tensors)
    wanted = {"ensemble": expected(PROMPT, 60)[0], "ensemble_once": drafted(PROMPT, 60)[0]}
    assert wanted["ensemble"] != wanted["ensemble_once"]
    for name, ids in wanted.items():
        assert answers[name]["text_output"][0].decode() == text_of_ids(ids)
