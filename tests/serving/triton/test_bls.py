"""Parts of tensorrt_llm_bls without a server: stop words in texts, answers put together, inputs handed on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plansmith.runtime.errors import UnsupportedError
from plansmith.runtime.tokenizer import Tokenizer
from plansmith.serving.triton.bls_answers import TextAnswers
from plansmith.serving.triton.bls_inputs import TEXT_INPUTS, BlsInputs
from plansmith.serving.triton.bls_speculation import can_speculate
from plansmith.serving.triton.delta_text import stream_maker
from plansmith.serving.triton.sequence_text import SequenceText
from plansmith.serving.triton.text_encoder import TextEncoder
from toy_tokenizers import MAKERS

NAMES = frozenset(
    ["text_output", "output_log_probs", "cum_log_probs", "finish_reasons", "batch_index", "sequence_index"]
)
TOKENIZERS = {name: Tokenizer(make(), config={"eos_token": "</s>"}) for name, make in MAKERS.items()}


def cut(text: str, words: list[str]) -> str:
    """Return a text up to the end of the word that is complete first."""
    ends = [text.index(word) + len(word) for word in words if word in text]
    return text[: min(ends, default=len(text))]


@pytest.mark.parametrize("name", ["byte_level", "llama", "gemma", "unigram"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_stop_word_ends_the_text_however_it_is_cut(name: str, data: st.DataObject) -> None:
    """Words from the text itself, any tokens, any answers: the text ends with the first one that is complete."""
    tokenizer = TOKENIZERS[name]
    pool = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=8))
    ids = data.draw(st.lists(st.sampled_from(pool), min_size=1, max_size=30))
    whole = tokenizer.decode(ids)
    spans = data.draw(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), min_size=1, max_size=3))
    words = [word for start, length in spans if (word := whole[start : start + length])]
    words += data.draw(st.lists(st.text("ab. ", min_size=1, max_size=3), max_size=2))
    text = SequenceText(stream_maker(tokenizer), words)
    made, start = "", 0
    while start < len(ids) and not text.is_stopped:
        n = data.draw(st.integers(1, 6))
        new, num_used = text.push(ids[start : start + n], is_final=start + n >= len(ids))
        made += new
        start += num_used if text.is_stopped else n
    assert made == text.text == cut(whole, words)
    assert text.is_stopped == any(word in whole for word in words)


def test_stop_words_of_the_prompt_and_before_min_tokens_do_not_count() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    text = SequenceText(stream_maker(tokenizer), ["dog"], min_tokens=3)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    assert text.prompt(encode("the dog")) == "the dog"
    assert text.push(encode(" dog"), is_final=False) == (" dog", len(encode(" dog")))
    assert len(encode(" dog")) < 3
    assert text.push(encode(" the dog wakes"), is_final=False)[0] == " the dog"
    assert text.is_stopped


def answer(ids: list[int], *, final: bool, row: int = 0, reason: int = 0, **more: Any) -> dict[str, Any]:
    """Return an answer of `tensorrt_llm` with one sequence; its log-probabilities are the tokens' numbers."""
    made = {
        "output_ids": np.array([[ids]], np.int32),
        "sequence_length": np.array([[len(ids)]], np.int32),
        "is_final": np.array([[final]]),
        "finish_reasons": np.array([[reason]], np.int32),
        "output_log_probs": np.array([[[-float(token_id) for token_id in ids]]], np.float32),
        "batch_index": np.array([[row]], np.int32),
    }
    return {**made, **more}


def answers_of(tokenizer: Tokenizer, *stop_words: list[str], **options: Any) -> TextAnswers:
    return TextAnswers(
        stream_maker(tokenizer),
        stop_words=stop_words,
        min_tokens=[0] * len(stop_words),
        num_sequences=1,
        names=NAMES,
        **options,
    )


def test_all_that_is_behind_a_stop_word_is_left_out() -> None:
    """Of the answer in which it is, and whatever the engine still sends of that row; other rows go on."""
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("the dog, then it sleeps", add_special_tokens=False)
    dog = len(tokenizer.encode("the dog", add_special_tokens=False))
    made = answers_of(tokenizer, ["dog"], [])
    total = np.array([[-float(sum(ids))]], np.float32)
    first = made.convert(answer(ids, final=False, cum_log_probs=total))
    assert first is not None
    assert first["text_output"].tolist() == [b"the dog"]
    assert first["output_log_probs"].tolist() == [[[-float(token_id) for token_id in ids[:dog]]]]
    assert first["cum_log_probs"].item() == -sum(ids[:dog])
    assert first["finish_reasons"].tolist() == [[2]]
    assert not made.is_done and made.is_stopped
    assert made.convert(answer(ids, final=True)) is None
    last = made.convert(answer(ids, final=True, row=1, reason=1))
    assert last is not None and last["text_output"].tolist() == [b"the dog, then it sleeps"]
    assert last["finish_reasons"].tolist() == [[1]]
    assert made.is_done


def test_tokens_add_up_where_the_client_overwrites() -> None:
    """accumulate_tokens: each answer has all text so far, never a part of a character."""
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("a 🦀 b", add_special_tokens=False)
    made = answers_of(tokenizer, [], accumulate=True)
    texts = []
    for i, token_id in enumerate(ids):
        outputs = made.convert(answer([token_id], final=i == len(ids) - 1))
        assert outputs is not None
        texts.append(outputs["text_output"][0].decode())
    assert texts[-1] == "a 🦀 b"
    assert all(text == "a 🦀 b"[: len(text)] for text in texts)


def test_an_answer_is_put_together_from_a_stream() -> None:
    """With the prompt in front, and everything that comes token by token as one."""
    tokenizer = TOKENIZERS["llama"]
    prompt, ids = tokenizer.encode("the quick"), tokenizer.encode(" brown fox 🦀", add_special_tokens=False)
    made = answers_of(tokenizer, [], whole=True, prompts=[prompt])
    outputs = [
        made.convert(
            answer(
                ids[i : i + 2],
                final=i + 2 >= len(ids),
                reason=3 if i + 2 >= len(ids) else 0,
                cum_log_probs=np.array([[-float(sum(ids[: i + 2]))]], np.float32),
            )
        )
        for i in range(0, len(ids), 2)
    ]
    assert all(one is None for one in outputs[:-1])
    last = outputs[-1]
    assert last is not None
    assert last["text_output"].tolist() == [tokenizer.decode([*prompt, *ids]).encode()]
    assert last["output_log_probs"].tolist() == [[[-float(token_id) for token_id in ids]]]
    assert last["cum_log_probs"].item() == -sum(ids)
    assert last["finish_reasons"].item() == 3


def test_the_prompt_of_a_whole_answer_is_no_output() -> None:
    """num_output_tokens tells where the output begins: the engine's own default may be either."""
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("the dog sees the dog", add_special_tokens=False)
    num_output = len(tokenizer.encode(" sees the dog", add_special_tokens=False))
    made = answers_of(tokenizer, ["dog"]).convert(
        answer(ids, final=True, num_output_tokens=np.array([[num_output]], np.int32))
    )
    assert made is not None and made["text_output"].tolist() == [b"the dog sees the dog"]


def inputs_of(tensors: dict[str, Any], name: str = "byte_level") -> dict[str, Any]:
    encoder = TextEncoder(TOKENIZERS[name], names=TEXT_INPUTS)
    base = {"text_input": np.array([[b"the dog"]], object), "max_tokens": np.array([[5]], np.int32)}
    return BlsInputs(encoder).make({**base, **tensors})


def test_inputs_have_the_engines_names_and_the_wires_shapes() -> None:
    made = inputs_of(
        {
            "top_k": np.array([[3]], np.int32),
            "length_penalty": np.array([[0.5]], np.float32),
            "stream": np.array([[True]]),
            "return_log_probs": np.array([True]),  # reshaped to a scalar by the configuration
            "lora_task_id": np.array([7], np.uint64),
            "num_draft_tokens": np.array([[4]], np.int32),
            "use_draft_logits": np.array([True]),
            "stop_words": np.array([[b"fox", b""]], object),
            "bad_words": np.empty((1, 0), object),
        }
    )
    ids = TOKENIZERS["byte_level"].encode("the dog")
    assert made["input_ids"].tolist() == [ids] and made["input_lengths"].tolist() == [[len(ids)]]
    assert {name: array.tolist() for name, array in made.items() if array.shape == (1, 1)} == {
        "input_lengths": [[len(ids)]],
        "request_output_len": [[5]],
        "pad_id": [[TOKENIZERS["byte_level"].eos_token_ids[0]]],
        "runtime_top_k": [[3]],
        "len_penalty": [[0.5]],
        "streaming": [[True]],
        "return_log_probs": [[True]],
        "lora_task_id": [[7]],
    }
    assert set(made) - {"input_ids", "stop_words_list"} == {
        name for name in made if made[name].shape == (1, 1)
    }


def test_the_engines_own_ends_count_unless_the_client_names_one() -> None:
    assert "end_id" not in inputs_of({})
    assert inputs_of({"end_id": np.array([[9]], np.int32)})["end_id"].tolist() == [[9]]


def test_an_image_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="image_input"):
        inputs_of({"image_input": np.zeros((1, 1, 3, 2, 2), np.float16)})


@pytest.mark.parametrize(
    ("more", "can"),
    [
        ({}, True),
        ({"top_k": np.array([[1]], np.int32), "top_p": np.array([[0.9]], np.float32)}, True),
        ({"temperature": np.array([[0]], np.float32), "top_k": np.array([[9]], np.int32)}, True),
        ({"repetition_penalty": np.array([[1.5]], np.float32)}, True),
        ({"top_k": np.array([[5]], np.int32)}, False),
        ({"top_p": np.array([[0.9]], np.float32)}, False),
        ({"min_p": np.array([[0.1]], np.float32)}, False),
        ({"beam_width": np.array([[2]], np.int32)}, False),
        ({"num_return_sequences": np.array([[2]], np.int32)}, False),
        ({"presence_penalty": np.array([[0.5]], np.float32)}, False),
        ({"frequency_penalty": np.array([[0.5]], np.float32)}, False),
        ({"return_context_logits": np.array([[True]])}, False),
        ({"guided_decoding_guide_type": np.array([[b"json"]], object)}, False),
    ],
)
def test_only_what_rounds_do_not_change_is_drafted_for(more: dict[str, Any], can: bool) -> None:
    """A round begins anew: what counts output tokens, draws by their place or has a state would come out otherwise."""
    assert can_speculate(inputs_of(more)) == can
