"""Answers decoded one by one give the text of all tokens, for every kind of tokenizer, however they are cut."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plansmith.runtime.tokenizer import Tokenizer
from plansmith.serving.triton.delta_text import PrefixRule, WholeTextStream, delta_text, stream_maker
from toy_tokenizers import MAKERS

TOKENIZERS = {name: Tokenizer(make()) for name, make in MAKERS.items()}
TEXTS = [
    "emoji 👩‍👩‍👧 🏳️‍🌈 👍🏽 and  double  spaces\n\nnew lines\ttabs  ",
    "今日はいい天気ですね。中文字符也在这里。𠜎𠜱",
    "Zwölf Boxkämpfer — daß",
    " leading, and the  dog ",
    "🦀" * 30,  # one run of 120 byte-fallback tokens
]


def answers(tokenizer: Tokenizer, ids: list[int], cuts: list[int], *, skip: bool) -> list[str]:
    """Return the texts of a stream cut at `cuts`, each made from its prefix and new tokens alone."""
    rule, make = PrefixRule(tokenizer), stream_maker(tokenizer, skip_special_tokens=skip)
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    texts = []
    for i, (first, end) in enumerate(itertools.pairwise(bounds)):
        start = rule.start(ids, first)
        texts.append(delta_text(make, ids[start:first], ids[first:end], i == len(bounds) - 2))
    return texts


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_texts(name: str, skip: bool, size: int) -> None:
    """Real text, in answers of one to seven tokens."""
    tokenizer = TOKENIZERS[name]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(answers(tokenizer, ids, list(range(0, len(ids), size)), skip=skip)) == whole


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "strips_both_ends"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_prefixes_of_prefixes(name: str, data: st.DataObject) -> None:
    """A stream keeps the prefix alone from answer to answer, and loses nothing by it."""
    tokenizer = TOKENIZERS[name]
    rule, make = PrefixRule(tokenizer, data.draw(st.sampled_from([0, 3, 16]))), stream_maker(tokenizer)
    pool = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), min_size=1, max_size=6))
    pieces = data.draw(st.lists(st.lists(st.sampled_from(pool), max_size=9), min_size=1, max_size=12))
    text, kept = "", []
    for i, piece in enumerate(pieces):
        text += delta_text(make, kept, piece, i == len(pieces) - 1)
        kept = rule.keep(kept + piece)
    assert text == tokenizer.decode([token_id for piece in pieces for token_id in piece])


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tokens(name: str, data: st.DataObject) -> None:
    """Any ids, so also bytes that are no text, special tokens between the bytes of a character, unknown ids."""
    tokenizer = TOKENIZERS[name]
    # Few distinct ids make long runs of bytes, spaces and special tokens likely.
    pool = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), min_size=1, max_size=6))
    ids = data.draw(st.lists(st.sampled_from(pool), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=12))
    skip = data.draw(st.booleans())
    whole = delta_text(stream_maker(tokenizer, skip_special_tokens=skip), [], ids, True)
    assert "".join(answers(tokenizer, ids, cuts, skip=skip)) == whole
    if name != "strips_both_ends":  # the library panics where all of the text is spaces
        assert whole == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_byte_runs_reach_back(name: str) -> None:
    """A run of byte tokens is one decision, so its prefix goes back to its beginning, however long it is."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("the dog " + "🦀" * 50, add_special_tokens=False)
    start = PrefixRule(tokenizer).start(ids, len(ids) - 1)
    assert start < len(ids) - 200
    assert len(ids[start:]) < 210  # and no further


@pytest.mark.parametrize("name", ["byte_level", "llama", "unigram"])
def test_prefixes_are_short(name: str) -> None:
    """In text of words a prefix is a few tokens, wherever the answer is."""
    ids = TOKENIZERS[name].encode("the quick brown fox jumps over the lazy dog " * 20)
    rule = PrefixRule(TOKENIZERS[name])
    assert all(i - rule.start(ids, i) <= 8 for i in range(len(ids)))


def test_special_tokens_inside_a_character() -> None:
    """Special tokens have no text, so a prefix of special tokens alone would lose the bytes before them."""
    tokenizer = TOKENIZERS["byte_level"]
    crab = tokenizer.encode("🦀", add_special_tokens=False)
    ids = [*crab[:1], *[0] * 40, *crab[1:]]
    assert len(crab) > 1
    assert "".join(answers(tokenizer, ids, list(range(len(ids))), skip=True)) == "🦀"


def test_nothing_of_a_character_is_shown_early() -> None:
    """No answer of valid text has U+FFFD, and each character comes with the token that completes it."""
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("a🦀b", add_special_tokens=False)
    texts = answers(tokenizer, ids, list(range(1, len(ids))), skip=True)
    assert texts == ["a", *[""] * (len(ids) - 3), "🦀", "b"]


def test_decoders_that_cannot_stream_are_decoded_whole() -> None:
    """The rule holds for them too."""
    tokenizer = TOKENIZERS["byte_level"]
    rng = random.Random(3)
    ids = tokenizer.encode(TEXTS[0] + TEXTS[1])
    for _ in range(20):
        first, end = sorted(rng.sample(range(len(ids)), 2))
        start = PrefixRule(tokenizer).start(ids, first)
        make = stream_maker(tokenizer)
        new = delta_text(lambda: WholeTextStream(tokenizer, True), ids[start:first], ids[first:end], False)
        assert new == delta_text(make, ids[start:first], ids[first:end], False)
