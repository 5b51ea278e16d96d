"""Text through the whole engine: a scripted model, a real tokenizer."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import toy_tokenizers
from fake_executor import INFO, FakeModel
from plansmith.runtime import errors
from plansmith.runtime.engine import Engine, SamplingParams
from plansmith.runtime.executor import PythonExecutor
from plansmith.runtime.native_engine import EngineOptions
from plansmith.runtime.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}<think>{{ m.content }}</s>{% endfor %}"


@functools.cache
def tokenizer(kind: str = "byte_level") -> Tokenizer:
    return Tokenizer(
        toy_tokenizers.MAKERS[kind](),
        config={"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE},
    )


class Scripted(FakeModel):
    """Says `script` after a prompt of `prompt_len` tokens, whatever the prompt."""

    def __init__(self, script: list[int], prompt_len: int, vocab_size: int) -> None:
        super().__init__(dataclasses.replace(INFO, vocab_size=vocab_size, max_seq_len=256, max_input_len=200))
        self._script, self._prompt_len = script, prompt_len

    def step(self, batch: Any) -> Any:
        logits = np.zeros((len(batch.logits_rows), self.info.vocab_size), np.float32)
        for row, position in zip(logits, batch.position_ids[batch.logits_rows], strict=True):
            row[self._script[(position + 1 - self._prompt_len) % len(self._script)]] = 1.0
        return logits


def say(
    text: str | list[int], prompt: str = "the dog", kind: str = "byte_level", **params: Any
) -> tuple[list[str], Any]:
    """Return (text of each delta, completion) of an engine whose model says `text` again and again."""
    own = tokenizer(kind)
    script = own.encode(text, add_special_tokens=False) if isinstance(text, str) else text
    model = Scripted(script, len(own.encode(prompt)), own.vocab_size)
    values = {"temperature": 0.0, "max_tokens": len(script), **params}
    with Engine.from_executor(
        PythonExecutor(model), EngineOptions(manual_step=True), tokenizer=own
    ) as engine:
        handle = engine.submit(prompt, SamplingParams(**values))
        return [delta.text for delta in handle], handle.result()


@pytest.mark.parametrize("text", ["over the lazy dog", "今日は👩‍👩‍👧です", "größer — <think>no</think>"])
def test_the_text_is_what_the_model_said(text: str) -> None:
    parts, completion = say(text)
    assert "".join(parts) == completion.text == text
    assert not any("\ufffd" in part for part in parts)


def test_a_character_cut_by_max_tokens_is_one_replacement_at_the_end() -> None:
    ids = tokenizer().encode("ok 👩", add_special_tokens=False)
    parts, completion = say(ids, max_tokens=len(ids) - 1)
    assert completion.text == "ok \ufffd"
    assert parts[-1] == "\ufffd" and "\ufffd" not in "".join(parts[:-1])


def test_the_end_token_is_no_text_and_is_kept_as_an_id() -> None:
    own = tokenizer()
    eos = own.token_to_id("</s>")
    for skip in (True, False):
        ids = [*own.encode("fox", add_special_tokens=False), eos]
        _, completion = say(ids, max_tokens=50, skip_special_tokens=skip)
        assert (completion.text, completion.finish_reason, completion.stop_reason) == ("fox", "stop", None)
        assert list(completion.token_ids) == ids


def test_a_special_token_in_the_middle_is_text_only_if_asked_for() -> None:
    own = tokenizer()
    ids = [own.token_to_id("<pad>"), *own.encode("fox", add_special_tokens=False)]
    assert say(ids)[1].text == "fox"
    assert say(ids, skip_special_tokens=False)[1].text == "<pad>fox"


@pytest.mark.parametrize(
    ("said", "stop", "text", "reason"),
    [
        ("the quick brown fox jumps", "brown", "the quick ", "brown"),
        ("the quick brown fox jumps", ["jump", "fox j"], "the quick brown ", "fox j"),
        ("the quick brown fox jumps", "he qui", "t", "he qui"),
        ("line one\nline two", "\n", "line one", "\n"),
        ("今日は👩‍👩‍👧です", "👧", "今日は👩‍👩‍", "👧"),
        ("the quick brown", "brownie", "the quick brown", None),
    ],
)
def test_stop_strings_cut_exactly(said: str, stop: Any, text: str, reason: str | None) -> None:
    parts, completion = say(said, stop=stop)
    assert "".join(parts) == completion.text == text
    assert (completion.finish_reason, completion.stop_reason) == ("stop" if reason else "length", reason)
    script = tokenizer().encode(said, add_special_tokens=False)
    assert list(completion.token_ids) == script[: len(completion.token_ids)]


def test_a_stop_string_ends_the_request_itself() -> None:
    own = tokenizer()
    script = own.encode("the dog wakes up.", add_special_tokens=False)
    model = Scripted(script, len(own.encode("a")), own.vocab_size)
    with Engine.from_executor(PythonExecutor(model), tokenizer=own) as engine:
        (completion,) = engine.generate("a", SamplingParams(temperature=0.0, max_tokens=200, stop="dog"))
        assert completion.text == "the " and completion.finish_reason == "stop"
        assert engine.stats().used_num_blocks == 0
    assert model.num_steps < 150, "it did not run to max_tokens"


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    first, second = (tokenizer().encode(t, add_special_tokens=False) for t in ("the dog", " the dog"))
    parts, completion = say([*first, *second], stop="dog", min_tokens=len(first))
    assert completion.text == "the dog the " == "".join(parts)


def test_the_continuation_of_a_text_keeps_its_space() -> None:
    own = tokenizer("llama")
    script = own.encode("dog", add_special_tokens=False)
    model = Scripted(script, len(own.encode("the lazy")), own.vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=len(script))
    with Engine.from_executor(PythonExecutor(model), tokenizer=own) as engine:
        assert engine.generate("the lazy", params)[0].text == " dog"
        assert engine.generate("the lazy", params, new_text=True)[0].text == "dog"


def test_ids_only_where_no_text_is_wanted() -> None:
    parts, completion = say("the dog", detokenize=False)
    assert set(parts) == {""} and completion.text == "" and completion.token_ids
    with pytest.raises(errors.InvalidArgumentError, match="detokenize=False"):
        say("the dog", detokenize=False, stop="dog")


def test_bad_words_as_text_are_banned_at_the_beginning_and_inside() -> None:
    own = tokenizer()
    word = own.encode(" dog", add_special_tokens=False)
    _, completion = say([*word, 100], bad_words=["dog"], max_tokens=8)
    assert "dog" not in completion.text


def test_chat_ids_follow_the_template_without_another_bos() -> None:
    own = tokenizer()
    model = Scripted([5], 1, own.vocab_size)
    with Engine.from_executor(PythonExecutor(model), tokenizer=own) as engine:
        ids = engine.chat_ids([{"role": "user", "content": "fox"}])
        assert ids == own.encode("<think>fox</s>", add_special_tokens=False)
        assert ids[0] == own.token_to_id("<think>") and ids[-1] == own.token_to_id("</s>")
