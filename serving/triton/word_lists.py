"""Word lists as they are on the wire: token sequences of different lengths in one (2, L) int32 array.

Row 0 has the tokens of all words one behind the other, padded with 0; row 1 the ends of the words in it, each above the
one before, padded with -1. L is the number of tokens (it may be more), and no words are (2, 0).

    [[5, 7], [9]]  ->  [[5, 7,  9],
                        [2, 3, -1]]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.errors import InvalidArgumentError, ShapeError


def read_word_list(array: NDArray[Any], name: str = "the word list") -> list[list[int]]:
    """Return the words of a (2, L) int32 array as token sequences, none of them empty.

    name : for messages
    raises : ShapeError for another shape; InvalidArgumentError for ends that do not grow, lie behind the tokens or
        follow a -1, and for a token below 0
    """
    if array.ndim != 2 or array.shape[0] != 2:
        raise ShapeError(f"{name} has shape {list(array.shape)}, wanted [2, n]: tokens, and the words' ends")
    if not np.issubdtype(array.dtype, np.integer):
        raise InvalidArgumentError(f"{name} is {array.dtype}, wanted int32")
    tokens, ends = array.tolist()
    num_words = ends.index(-1) if -1 in ends else len(ends)
    for i, end in enumerate(ends[num_words:], num_words):
        if end != -1:
            raise InvalidArgumentError(
                f"{name} has the end {end} at {i}, behind a -1; wanted all ends before the first -1"
            )
    words = []
    first = 0
    for i, end in enumerate(ends[:num_words]):
        if not first < end <= len(tokens):
            raise InvalidArgumentError(
                f"{name} has the end {end} at {i}, wanted {first + 1} to {len(tokens)}: above the one before, and at "
                "most the number of tokens"
            )
        words.append(tokens[first:end])
        first = end
    for word in words:
        if min(word) < 0:
            raise InvalidArgumentError(f"{name} has the token {min(word)}, wanted ids from 0")
    return words


def make_word_list(words: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Return the (2, L) int32 array of token sequences, L their tokens together; empty ones are left out."""
    words = [word for word in words if len(word)]
    tokens = [token for word in words for token in word]
    array = np.full((2, len(tokens)), -1, np.int32)
    array[0] = tokens
    array[1, : len(words)] = np.cumsum([len(word) for word in words])
    return array


def pad_word_lists(lists: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Return (2, L) arrays as one (B, 2, max L) int32 array, padded with 0 and -1."""
    longest = max((one.shape[1] for one in lists), default=0)
    array = np.zeros((len(lists), 2, longest), np.int32)
    array[:, 1] = -1
    for row, one in zip(array, lists, strict=True):
        row[:, : one.shape[1]] = one
    return array
