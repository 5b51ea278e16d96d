"""Answers of the engine's model to texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plansmith.runtime.errors import Error, InvalidArgumentError, ShapeError
from plansmith.runtime.tokenizer import Tokenizer
from plansmith.serving.triton.delta_text import PrefixRule
from plansmith.serving.triton.text_decoder import TextDecoder
from toy_tokenizers import MAKERS

TOKENIZERS = {name: Tokenizer(make()) for name, make in MAKERS.items()}
PAD = 2


def answer(
    rows: list[list[int]], prefixes: list[list[int]] | None = None, final: bool = True
) -> dict[str, Any]:
    """Return an answer of one row of a batch as `tensorrt_llm` writes it: padded at the end, prefixes at the front."""
    longest = max(map(len, rows))
    ids = np.full((1, len(rows), longest), PAD, np.int32)
    for i, row in enumerate(rows):
        ids[0, i, : len(row)] = row
    tensors = {
        "TOKENS_BATCH": ids,
        "SEQUENCE_LENGTH": np.array([[len(row) for row in rows]], np.int32),
    }
    if prefixes is not None:
        longest = max(map(len, prefixes))
        made = np.full((1, len(rows), longest), -1, np.int32)
        for i, prefix in enumerate(prefixes):
            made[0, i, longest - len(prefix) :] = prefix
        tensors |= {"PREFIX_IDS": made, "IS_FINAL": np.array([[final]])}
    return tensors


def decoded(decoder: TextDecoder, tensors: dict[str, Any]) -> list[str]:
    output = decoder.decode(tensors)["OUTPUT"]
    assert output.ndim == 1 and output.dtype == object
    return [value.decode() for value in output]


@pytest.mark.parametrize("name", MAKERS)
def test_whole_sequences(name: str) -> None:
    """Without a prefix the text of the ids by themselves, beams in order, padding not read."""
    tokenizer = TOKENIZERS[name]
    rows = [
        tokenizer.encode(text) for text in ("the dog 👍🏽", "the quick brown fox", "今日はいい天気ですね。")
    ]
    for skip in (True, False):
        decoder = TextDecoder(tokenizer, skip_special_tokens=skip)
        wanted = [tokenizer.decode(row, skip_special_tokens=skip) for row in rows]
        assert decoded(decoder, answer(rows)) == wanted
        assert decoded(decoder, answer(rows, [[], [], []])) == wanted


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "strips_both_ends"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_streams_of_beams(name: str, data: st.DataObject) -> None:
    """Several sequences cut into answers together: each one's texts put together are its text."""
    tokenizer = TOKENIZERS[name]
    decoder, rule = TextDecoder(tokenizer), PrefixRule(tokenizer)
    pool = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=8))
    sequences = data.draw(st.lists(st.lists(st.sampled_from(pool), max_size=25), min_size=1, max_size=3))
    done = [0] * len(sequences)
    texts = [""] * len(sequences)
    final = False
    while not final:
        sizes = [
            data.draw(st.integers(0, len(ids) - start)) for ids, start in zip(sequences, done, strict=True)
        ]
        final = all(start + n == len(ids) for start, n, ids in zip(done, sizes, sequences, strict=True))
        if not any(sizes) and not final:
            continue
        prefixes = [ids[rule.start(ids, start) : start] for ids, start in zip(sequences, done, strict=True)]
        new = [ids[start : start + n] for ids, start, n in zip(sequences, done, sizes, strict=True)]
        for i, text in enumerate(decoded(decoder, answer(new, prefixes, final))):
            texts[i] += text
        done = [start + n for start, n in zip(done, sizes, strict=True)]
    assert texts == [tokenizer.decode(ids) for ids in sequences]


def test_batches_are_one_list() -> None:
    """(B, sequences, n) gives B * sequences texts, as the older model did."""
    tokenizer = TOKENIZERS["byte_level"]
    ids = np.array([[tokenizer.encode(text)[:3]] for text in ("the dog", "over the", "brown fox")], np.int32)
    tensors = {"TOKENS_BATCH": ids, "SEQUENCE_LENGTH": np.array([[3], [2], [0]], np.int32)}
    wanted = [tokenizer.decode(ids[i, 0, :n].tolist()) for i, n in enumerate((3, 2, 0))]
    assert decoded(TextDecoder(tokenizer), tensors) == wanted
    flat = {"TOKENS_BATCH": ids[0], "SEQUENCE_LENGTH": np.array([3], np.int32)}
    assert decoded(TextDecoder(tokenizer), flat) == wanted[:1]


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (
            {"SEQUENCE_LENGTH": np.array([[9]], np.int32)},
            InvalidArgumentError,
            ["SEQUENCE_LENGTH", "9", "0 to 3"],
        ),
        ({"SEQUENCE_LENGTH": np.array([[-1]], np.int32)}, InvalidArgumentError, ["SEQUENCE_LENGTH", "-1"]),
        ({"SEQUENCE_LENGTH": np.array([[1, 1]], np.int32)}, ShapeError, ["SEQUENCE_LENGTH", "[1, 2]"]),
        ({"TOKENS_BATCH": np.zeros(3, np.int32)}, ShapeError, ["TOKENS_BATCH", "[3]"]),
        ({"IS_FINAL": np.zeros((1, 2), np.bool_)}, ShapeError, ["IS_FINAL"]),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], kind: type[Error], words: list[str]) -> None:
    with pytest.raises(kind) as caught:
        TextDecoder(TOKENIZERS["byte_level"]).decode({**answer([[1, 2, 3]]), **change})
    assert all(word in str(caught.value) for word in words)
