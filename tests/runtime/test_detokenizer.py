"""The stream's text, put together, is the tokenizer's own decode of all tokens."""

from __future__ import annotations

import functools

import pytest
import toy_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from plansmith.runtime.errors import UnsupportedError
from plansmith.runtime.tokenizer import Tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

KINDS = sorted(toy_tokenizers.MAKERS)


@functools.cache
def make(kind: str) -> Tokenizer:
    return Tokenizer(toy_tokenizers.MAKERS[kind]())


@functools.cache
def unstripped() -> Tokenizer:
    # A copy of the same one: two trainings do not give the same merges.
    backend = Backend.from_str(make("strips_both_ends")._backend.to_str())
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    return Tokenizer(backend)


def deltas(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    stream = tokenizer.detokenizer(skip_special_tokens=skip)
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


def full_decode(kind: str, ids: list[int], skip: bool = True) -> str:
    """Return the tokenizers library's decode; where its Strip panics (a text shorter than the cut), the rule itself."""
    if kind != "strips_both_ends":
        return make(kind).decode(ids, skip_special_tokens=skip)
    text = unstripped().decode(ids, skip_special_tokens=skip)
    for _ in range(2):
        text = text.removeprefix(" ")
    for _ in range(2):
        text = text.removesuffix(" ")
    return text


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_deltas_of_random_tokens_make_the_full_decode(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = make(kind)
    # A few ids behind the vocabulary: a model's logits may have padded rows.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    assert "".join(deltas(tokenizer, ids, skip)) == full_decode(kind, ids, skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_deltas_of_any_text_make_the_full_decode(kind: str, text: str) -> None:
    tokenizer = make(kind)
    ids = tokenizer.encode(text)
    assert "".join(deltas(tokenizer, ids)) == full_decode(kind, ids)


@pytest.mark.parametrize("kind", ["llama", "gemma", "byte_level"])
@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=24), cut=st.integers(0, 24))
def test_bytes_that_are_no_text_come_out_as_the_tokenizer_decodes_them(
    kind: str, data: bytes, cut: int
) -> None:
    tokenizer = make(kind)
    chars = {byte: char for char, byte in _byte_alphabet().items()}
    tokens = [chars[b] if kind == "byte_level" else f"<0x{b:02X}>" for b in data]
    ids = [tokenizer.token_to_id(token) for token in tokens]
    ids[cut:cut] = tokenizer.encode("the dog", add_special_tokens=False)
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)


def _byte_alphabet() -> dict[str, int]:
    from plansmith.runtime.detokenizer import _BYTE_OF_CHAR

    return _BYTE_OF_CHAR


def test_the_byte_alphabet_is_the_tokenizers_librarys() -> None:
    from tokenizers import pre_tokenizers

    assert set(_byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    for char, byte in _byte_alphabet().items():
        if byte < 0x80:
            assert decoders.ByteLevel().decode([char]) == chr(byte)


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
@pytest.mark.parametrize("text", ["👩‍👩‍👧 and 🏳️‍🌈", "今日はいい天気ですね", "naïve — größer"])
def test_no_part_of_a_character_comes_out(kind: str, text: str) -> None:
    tokenizer = make(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = deltas(tokenizer, ids)
    assert len(ids) > len(text) / 2  # the text is cut finely enough to test something
    assert not any("\ufffd" in part for part in parts)
    assert "".join(parts) == text


def test_text_comes_as_early_as_it_is_certain() -> None:
    tokenizer = make("byte_level")
    ids = tokenizer.encode("the dog", add_special_tokens=False)
    assert all(deltas(tokenizer, ids)[:-1]), "every token of plain text has text at once"


def test_an_incomplete_character_comes_out_at_the_end_only() -> None:
    tokenizer = make("byte_level")
    whole = tokenizer.encode("👍", add_special_tokens=False)
    assert len(whole) > 1
    parts = deltas(tokenizer, whole[:-1])
    assert parts[:-1] == [""] * (len(whole) - 1)
    assert parts[-1] == "\ufffd"


def test_a_continued_text_keeps_its_space_and_a_new_one_drops_it() -> None:
    tokenizer = make("llama")
    prompt, more = tokenizer.encode("the quick"), tokenizer.encode("dog", add_special_tokens=False)
    stream = tokenizer.detokenizer()
    stream.prime(prompt)
    assert "".join([*map(stream.push, more), stream.flush()]) == " dog"
    assert "".join(deltas(tokenizer, more)) == "dog"


def test_a_decoder_that_needs_all_tokens_is_refused_by_name() -> None:
    backend = toy_tokenizers.word_level()
    backend.decoder = decoders.BPEDecoder()
    with pytest.raises(UnsupportedError, match=r"BPEDecoder.*decode\(\)"):
        Tokenizer(backend).detokenizer()


@pytest.mark.parametrize(
    "chain",
    [
        [decoders.ByteFallback(), decoders.Replace("a", "b")],
        [decoders.Fuse(), decoders.Metaspace()],
        [decoders.Strip(" ", 1, 0), decoders.Fuse()],
    ],
)
def test_an_order_of_stages_that_differs_on_a_stream_is_refused(chain: list[decoders.Decoder]) -> None:
    backend = toy_tokenizers.word_level()
    backend.decoder = decoders.Sequence(chain)
    with pytest.raises(UnsupportedError):
        Tokenizer(backend).detokenizer()
