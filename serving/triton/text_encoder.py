"""Prompts and words as the ids that `tensorrt_llm` takes, under the names of `preprocessing`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.errors import InvalidArgumentError, ShapeError, UnsupportedError
from ...runtime.prompts import word_ids
from ...runtime.tokenizer import Tokenizer
from .text_tensors import Tensors, column, pad_rows, read_numbers, read_texts
from .word_lists import make_word_list, pad_word_lists

_IMAGES = ("IMAGE_BYTES", "IMAGE_URL", "IMAGES", "VIDEO_BYTES")
_TEXTS = ("QUERY", "DECODER_QUERY", "BAD_WORDS_DICT", "STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS")
_NO_ID = -1


class TextEncoder:
    """Encodes the texts of requests. Any thread.

    add_special_tokens : those of the tokenizer's own template (mostly a BOS) around prompts; words never have them
    names : what the inputs are called where not as those of `preprocessing`
    max_text_bytes : of all texts of a request; one with more is refused before anything is encoded. None = no limit
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        add_special_tokens: bool = True,
        names: Mapping[str, str] | None = None,
        max_text_bytes: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_text_bytes = max_text_bytes
        self._names = names or {}
        self._add_special_tokens = add_special_tokens
        end_ids = tokenizer.eos_token_ids
        self._end_id = self._special_id("eos_token", end_ids[0] if end_ids else _NO_ID)
        self._pad_id = self._special_id("pad_token", self._end_id)

    def encode(self, tensors: Tensors) -> dict[str, NDArray[Any]]:
        """Return the outputs of `preprocessing`, those of multimodal models left out.

        tensors : its inputs by name, [B, ...]; of a model without batches, [...], and so are the outputs then
        raises : UnsupportedError for images and videos, InvalidArgumentError and ShapeError naming the input
        """
        for name in map(self._name, _IMAGES):
            if name in tensors and tensors[name].size:
                raise UnsupportedError(
                    f"{name} is of a multimodal model, and this engine takes text only; leave it out"
                )
        query, output_len = self._name("QUERY"), self._name("REQUEST_OUTPUT_LEN")
        if query not in tensors or tensors[query].size == 0:
            raise InvalidArgumentError(f"{_told(query)} is missing or empty; send a prompt, [B, 1] BYTES")
        self._check_size(tensors)
        num_rows = tensors[query].shape[0]
        lengths = read_numbers(tensors, output_len, num_rows)
        if lengths is None:
            raise InvalidArgumentError(
                f"{_told(output_len)} is missing or empty; send the most tokens to generate, [B, 1] INT32"
            )
        outputs = self._prompts(tensors, num_rows) | self._words(tensors, num_rows)
        outputs["REQUEST_OUTPUT_LEN"] = np.array(lengths, np.int32)
        if tensors[query].ndim == 1:
            outputs = {name: array[0] for name, array in outputs.items()}
        return outputs

    def _check_size(self, tensors: Tensors) -> None:
        sizes = {
            name: sum(map(len, tensors[name].flat)) for name in map(self._name, _TEXTS) if name in tensors
        }
        if self._max_text_bytes is not None and sum(sizes.values()) > self._max_text_bytes:
            largest = max(sizes, key=lambda name: sizes[name])
            raise ShapeError(
                f"{largest} has {sizes[largest]} bytes, the texts of a request {sum(sizes.values())}, the most is "
                f"{self._max_text_bytes}; shorten them, or send token ids to tensorrt_llm"
            )

    def _prompts(self, tensors: Tensors, num_rows: int) -> dict[str, NDArray[Any]]:
        end_ids = self._ids(tensors, self._name("END_ID"), num_rows, self._end_id)
        pad_ids = self._ids(tensors, self._name("PAD_ID"), num_rows, self._pad_id)
        prompts = [
            self._encode("".join(texts)) for texts in read_texts(tensors, self._name("QUERY"), num_rows)
        ]
        # Models of an encoder and a decoder are not served; others have one token that nobody reads.
        decoders = [
            self._encode(texts[0]) if texts else [max(pad_id, 0)]
            for texts, pad_id in zip(
                read_texts(tensors, self._name("DECODER_QUERY"), num_rows), pad_ids, strict=True
            )
        ]
        fill = max(pad_ids[0], 0)
        input_ids = pad_rows(prompts, fill)
        return {
            "INPUT_ID": input_ids,
            "REQUEST_INPUT_LEN": column([len(ids) for ids in prompts]),
            "DECODER_INPUT_ID": pad_rows(decoders, fill),
            "REQUEST_DECODER_INPUT_LEN": column([len(ids) for ids in decoders]),
            "OUT_END_ID": column(end_ids),
            "OUT_PAD_ID": column(pad_ids),
            "OUT_PROMPT_TABLE_EXTRA_IDS": self._extra_ids(tensors, input_ids),
        }

    def _words(self, tensors: Tensors, num_rows: int) -> dict[str, NDArray[Any]]:
        lists = {}
        for output, name in (("BAD_WORDS_IDS", "BAD_WORDS_DICT"), ("STOP_WORDS_IDS", "STOP_WORDS_DICT")):
            rows = read_texts(tensors, self._name(name), num_rows)
            lists[output] = pad_word_lists([make_word_list(self._word_ids(words)) for words in rows])
        return {**lists, "EMBEDDING_BIAS": self._bias(tensors, num_rows)}

    def _word_ids(self, words: list[str]) -> list[list[int]]:
        found = {tuple(ids): ids for word in words for ids in word_ids(word, self._tokenizer)}
        return list(found.values())

    def _bias(self, tensors: Tensors, num_rows: int) -> NDArray[np.float32]:
        """Return (B, V of the tokenizer) float32, or (B, 0) for no bias: each token of a word has its weight added."""
        words_name, weights_name = self._name("EMBEDDING_BIAS_WORDS"), self._name("EMBEDDING_BIAS_WEIGHTS")
        rows = read_texts(tensors, words_name, num_rows, keep_empty=True)
        weights = read_numbers(tensors, weights_name, num_rows) or [[] for _ in rows]
        num_words, num_weights = max(map(len, rows)), max(map(len, weights))
        if num_words != num_weights:
            raise ShapeError(
                f"{words_name} has {num_words} words and {weights_name} {num_weights} weights, "
                "wanted one a word"
            )
        ids = [[self._tokenizer.encode(word, add_special_tokens=False) for word in row] for row in rows]
        if not any(map(any, ids)):
            return np.zeros((num_rows, 0), np.float32)
        # A vocabulary with holes has ids above its size.
        highest = max(token_id for row in ids for word in row for token_id in word)
        bias = np.zeros((num_rows, max(self._tokenizer.vocab_size, highest + 1)), np.float32)
        for made, words, row in zip(bias, ids, weights, strict=True):
            for word, weight in zip(words, row, strict=True):
                for token_id in word:
                    made[token_id] += weight
        return bias

    def _extra_ids(self, tensors: Tensors, input_ids: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Return (B, n) uint64, the reuse key of tokens that stand for rows of a prompt table; text has 0."""
        keys = read_numbers(tensors, self._name("PROMPT_TABLE_EXTRA_ID"), len(input_ids))
        made = np.zeros(input_ids.shape, np.uint64)
        if keys is not None:
            is_row = input_ids >= self._tokenizer.vocab_size
            made[is_row] = np.broadcast_to(np.array(keys, np.uint64), made.shape)[is_row]
        return made

    def _ids(self, tensors: Tensors, name: str, num_rows: int, default: int) -> list[int]:
        rows = read_numbers(tensors, name, num_rows)
        return [default] * num_rows if rows is None else [int(row[0]) for row in rows]

    def _name(self, name: str) -> str:
        return self._names.get(name, name)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=self._add_special_tokens)

    def _special_id(self, name: str, default: int) -> int:
        text = self._tokenizer.special_tokens.get(name)
        found = None if text is None else self._tokenizer.token_to_id(text)
        return default if found is None else found


def _told(name: str) -> str:
    """Return an input's name with the one that clients of the ensemble know."""
    outer = {"QUERY": "text_input", "REQUEST_OUTPUT_LEN": "max_tokens"}.get(name)
    return name if outer is None else f"{name} (the ensemble's {outer})"
