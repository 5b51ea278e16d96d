"""What a user gives as a prompt, checked and as token ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .errors import InvalidArgumentError, ShapeError
from .executor import Int32Array, ModelInfo
from .sampling import SamplingParams
from .tokenizer import Tokenizer

Prompt = str | Sequence[int]


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> Int32Array:
    """Return a prompt's ids, (n,) int32, each from 0 to vocab_size - 1; InvalidArgumentError otherwise."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidArgumentError("the engine has no tokenizer, so a prompt must be token ids, not text")
        prompt = tokenizer.encode(prompt)
    try:
        ids = np.asarray(prompt) if len(prompt) else np.empty(0, np.int64)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"the prompt is not text and not a list of token ids: {error}") from error
    if ids.dtype.kind not in "iu":
        raise InvalidArgumentError("the prompt is not text and not a list of token ids (integers)")
    if ids.ndim != 1:
        raise InvalidArgumentError(f"the prompt has {ids.ndim} dimensions, it must be one list of token ids")
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if wrong.size:
        i = int(wrong[0])
        raise InvalidArgumentError(
            f"prompt token {i} is {ids[i]}, the model's ids go from 0 to {vocab_size - 1}; "
            "use the model's own tokenizer"
        )
    return ids.astype(np.int32)


def check_lengths(prompt_len: int, params: SamplingParams, limits: ModelInfo) -> None:
    """Raise what a submission would: InvalidArgumentError for no prompt, ShapeError for one over the limits."""
    wanted = params.max_tokens or 1
    if prompt_len == 0:
        raise InvalidArgumentError("the prompt has no tokens; give at least one")
    if prompt_len > limits.max_input_len:
        raise ShapeError(
            f"the prompt has {prompt_len} tokens, the engine's max_input_len is {limits.max_input_len}; shorten it "
            f"or rebuild with --max-input-len {prompt_len}"
        )
    if prompt_len + wanted > limits.max_seq_len:
        raise ShapeError(
            f"the prompt has {prompt_len} tokens and max_tokens is {wanted}, together more than the engine's "
            f"max_seq_len {limits.max_seq_len}; lower max_tokens or rebuild with "
            f"--max-seq-len {prompt_len + wanted}"
        )


def check_token_ids(params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Raise the InvalidArgumentError that a submission would for ids that are not in the vocabulary."""
    bad_words = [token for word in bad_words_ids(params, tokenizer) for token in word]
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("stop_words", [token for word in params.stop_words for token in word]),
        ("bad_words", bad_words),
        ("logit_bias", params.logit_bias),
        ("draft_token_ids", params.draft_token_ids),
        ("top_p_reset_id", () if params.top_p_reset_id is None else (params.top_p_reset_id,)),
    ):
        for token in ids:
            if token >= vocab_size:
                raise InvalidArgumentError(
                    f"{name} has the token {token}, the model's ids go from 0 to {vocab_size - 1}; "
                    "use the model's own tokenizer"
                )


def bad_words_ids(params: SamplingParams, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Return bad_words as id sequences; a string both as the beginning of a word and inside one."""
    words: list[list[int]] = []
    for word in params.bad_words:
        if not isinstance(word, str):
            words.append(list(word))
        elif tokenizer is None:
            raise InvalidArgumentError(
                "the engine has no tokenizer, so bad_words must be token ids, not text"
            )
        else:
            words += [ids for ids in word_ids(word, tokenizer) if ids not in words]
    return words


def word_ids(word: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the id sequences that a word can be in a text: by itself, behind a space, and behind other text.

    Byte-level tokenizers have the space in the word's first token; SentencePiece ones add one to whatever is encoded
    by itself, so that the ids of a word inside another are found only behind something. Of a word that the vocabulary
    cannot write there are none: its unknown tokens would stand for every such word.
    """
    found = [tokenizer.encode(text, add_special_tokens=False) for text in (word, " " + word.lstrip())]
    for before in "\n0a.":
        start = tokenizer.encode(before, add_special_tokens=False)
        ids = tokenizer.encode(before + word, add_special_tokens=False)
        if ids[: len(start)] == start:  # else the two have grown together
            found.append(ids[len(start) :])
    unknown = tokenizer.special_tokens.get("unk_token")
    unknown_id = None if unknown is None or unknown in word else tokenizer.token_to_id(unknown)
    words: list[list[int]] = []
    for ids in found:
        if ids and ids not in words and unknown_id not in ids:
            words.append(ids)
    return words
