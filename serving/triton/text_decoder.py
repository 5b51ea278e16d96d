"""Token ids as text: what `postprocessing` gives for one answer, or for whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.errors import InvalidArgumentError, ShapeError
from ...runtime.tokenizer import Tokenizer
from .delta_text import delta_text, stream_maker
from .text_tensors import Tensors, text_array


class TextDecoder:
    """Decodes answers, each by itself. Any thread.

    skip_special_tokens : leave special tokens out of the text
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._make_stream = stream_maker(tokenizer, skip_special_tokens=skip_special_tokens)

    def text(self, prefix_ids: Sequence[int], new_ids: Sequence[int], *, is_final: bool) -> str:
        """Return the text of new tokens behind a prefix; see delta_text."""
        if is_final and not prefix_ids:
            return self._tokenizer.decode(new_ids, skip_special_tokens=self._skip_special_tokens)
        return delta_text(self._make_stream, prefix_ids, new_ids, is_final)

    def decode(self, tensors: Tensors) -> dict[str, NDArray[Any]]:
        """Return OUTPUT, one text a sequence: (B * sequences,) BYTES, the batch's first row first.

        tensors : TOKENS_BATCH (B, sequences, n) and SEQUENCE_LENGTH (B, sequences); PREFIX_IDS (B, sequences, n),
            negative where there is none, and IS_FINAL (B, 1) where an answer is a part of a stream. Without batches B
            is not there
        raises : ShapeError, InvalidArgumentError naming the tensor
        """
        ids, lengths = (_required(tensors, name) for name in ("TOKENS_BATCH", "SEQUENCE_LENGTH"))
        if ids.ndim not in (2, 3):
            raise ShapeError(f"TOKENS_BATCH has shape {list(ids.shape)}, wanted [B, sequences, tokens]")
        num_sequences = int(np.prod(ids.shape[:-1]))
        if lengths.size != num_sequences:
            raise ShapeError(
                f"SEQUENCE_LENGTH has shape {list(lengths.shape)}, wanted {list(ids.shape[:-1])}, one a sequence of "
                "TOKENS_BATCH"
            )
        longest = int(ids.shape[-1])
        rows = ids.reshape(num_sequences, longest)
        prefixes = _prefixes(tensors.get("PREFIX_IDS"), num_sequences)
        finals = _finals(tensors.get("IS_FINAL"), num_sequences)
        texts = []
        for row, length, prefix, is_final in zip(
            rows, lengths.reshape(-1).tolist(), prefixes, finals, strict=True
        ):
            if not 0 <= length <= longest:
                raise InvalidArgumentError(f"SEQUENCE_LENGTH has {length}, wanted 0 to {longest}")
            texts.append(self.text(prefix, token_ids(row[:length]), is_final=is_final))
        return {"OUTPUT": text_array(texts)}


def token_ids(array: NDArray[Any]) -> list[int]:
    """Return the ids of an array; negative ones are padding and left out."""
    return [token_id for token_id in array.reshape(-1).tolist() if token_id >= 0]


def _required(tensors: Tensors, name: str) -> NDArray[Any]:
    if name not in tensors:
        raise InvalidArgumentError(f"{name} is missing; send output_ids and sequence_length of an answer")
    return tensors[name]


def _prefixes(array: NDArray[Any] | None, num_sequences: int) -> list[list[int]]:
    if array is None or array.size == 0:
        return [[] for _ in range(num_sequences)]
    if array.size % num_sequences:
        raise ShapeError(f"PREFIX_IDS has shape {list(array.shape)}, wanted {num_sequences} rows of tokens")
    return [token_ids(row) for row in array.reshape(num_sequences, -1)]


def _finals(array: NDArray[Any] | None, num_sequences: int) -> list[bool]:
    """Return whether each sequence ends; said once for all of them, once a row, or once a sequence."""
    if array is None or array.size == 0:
        return [True] * num_sequences
    if num_sequences % array.size:
        raise ShapeError(f"IS_FINAL has shape {list(array.shape)}, wanted one for {num_sequences} sequences")
    return [bool(value) for value in np.repeat(array.reshape(-1), num_sequences // array.size)]
