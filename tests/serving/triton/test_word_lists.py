"""Word lists: what is written comes back, and one broken rule is one error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plansmith.runtime.errors import Error, InvalidArgumentError, ShapeError
from plansmith.serving.triton.word_lists import make_word_list, pad_word_lists, read_word_list

WORDS = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6), max_size=8)
GOOD = [[5, 7], [9], [1, 2, 3]]


@settings(deadline=None)
@given(words=WORDS)
def test_what_is_written_is_read(words: list[list[int]]) -> None:
    array = make_word_list(words)
    assert array.dtype == np.int32 and array.shape == (2, sum(map(len, words)))
    assert read_word_list(array) == words


@settings(deadline=None)
@given(lists=st.lists(WORDS, min_size=1, max_size=4), more=st.integers(0, 5))
def test_padding_of_a_batch_is_no_word(lists: list[list[list[int]]], more: int) -> None:
    padded = pad_word_lists([make_word_list(words) for words in lists])
    assert padded.shape == (len(lists), 2, max(sum(map(len, words)) for words in lists))
    padding = np.full((len(lists), 2, more), -1, np.int32)
    padding[:, 0] = 0
    wider = np.concatenate([padded, padding], axis=2)
    assert [read_word_list(row) for row in padded] == [read_word_list(row) for row in wider] == lists


def test_the_form_on_the_wire() -> None:
    assert make_word_list(GOOD).tolist() == [[5, 7, 9, 1, 2, 3], [2, 3, 6, -1, -1, -1]]
    assert make_word_list([[], [4], []]).tolist() == [[4], [1]]
    assert make_word_list([]).shape == (2, 0) and read_word_list(np.empty((2, 0), np.int32)) == []
    assert pad_word_lists([]).shape == (0, 2, 0)


@pytest.mark.parametrize(
    ("ends", "what"),
    [
        ([0, 3, 6, -1, -1, -1], "the end 0 at 0, wanted 1 to 6"),
        ([2, 2, 6, -1, -1, -1], "the end 2 at 1, wanted 3 to 6"),
        ([3, 2, 6, -1, -1, -1], "the end 2 at 1, wanted 4 to 6"),
        ([2, 3, 7, -1, -1, -1], "the end 7 at 2, wanted 4 to 6"),
        ([2, -2, -1, -1, -1, -1], "the end -2 at 1"),
        ([2, -1, 6, -1, -1, -1], "the end 6 at 2, behind a -1"),
        ([2, -1, -1, -1, -1, 0], "the end 0 at 5, behind a -1"),
    ],
)
def test_ends_that_say_nothing_are_refused(ends: list[int], what: str) -> None:
    array = make_word_list(GOOD)
    array[1] = ends
    with pytest.raises(InvalidArgumentError, match=f"stop_words_list has {what}"):
        read_word_list(array, "stop_words_list")


def test_shapes_types_and_tokens_are_checked() -> None:
    for shape in [(3, 4), (4,), (1, 2, 4), (2,), (0, 4)]:
        with pytest.raises(ShapeError, match=r"bad_words_list has shape .*wanted \[2, n\]"):
            read_word_list(np.zeros(shape, np.int32), "bad_words_list")
    with pytest.raises(InvalidArgumentError, match="float32, wanted int32"):
        read_word_list(np.zeros((2, 1), np.float32))
    with pytest.raises(InvalidArgumentError, match="the token -4"):
        read_word_list(np.array([[3, -4], [2, -1]], np.int32))


def test_tokens_behind_the_last_end_are_padding_whatever_they_are() -> None:
    assert read_word_list(np.array([[3, 4, -9], [2, -1, -1]], np.int32)) == [[3, 4]]


@settings(deadline=None)
@given(
    words=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), min_size=1, max_size=5),
    place=st.integers(0, 10**6),
    value=st.one_of(st.integers(-3, 25), st.integers(-(2**31), 2**31 - 1)),
)
def test_one_changed_number_is_read_as_it_says_or_refused(
    words: list[list[int]], place: int, value: int
) -> None:
    array = make_word_list(words)
    array.reshape(-1)[place % array.size] = value
    try:
        got = read_word_list(array)
    except Error:
        return
    used = sum(map(len, got))
    assert [token for word in got for token in word] == array[0, :used].tolist()
    ends = np.cumsum([len(word) for word in got]).tolist()
    assert array[1].tolist() == ends + [-1] * (array.shape[1] - len(ends))
