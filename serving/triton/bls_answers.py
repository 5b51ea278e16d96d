"""The engine's answers to one request, as answers of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .delta_text import StreamMaker
from .sequence_text import SequenceText
from .text_decoder import token_ids
from .text_tensors import text_array

Outputs = dict[str, NDArray[Any]]

# What is read of an answer, whether the client asked for it or not.
NEEDED = frozenset(
    [
        "output_ids",
        "sequence_length",
        "is_final",
        "finish_reasons",
        "batch_index",
        "sequence_index",
        "num_output_tokens",
    ]
)
_PER_TOKEN = ("output_log_probs", "generation_logits")  # (1, sequences, tokens, ...)
_STOPPED = 2  # of finish_reasons: by a stop word


class TextAnswers:
    """Turns answers with tokens into answers with text, and knows when all sequences have ended. One thread at a time.

    stop_words, min_tokens : of each row; see SequenceText
    num_sequences : answered one by one, of each row; beams are one
    names : of the outputs that the client wants
    accumulate : each answer has the whole text so far
    whole : the engine streams and the client does not: its one answer a sequence is put together here
    prompts : of each row, tokens whose text comes first; () = none
    """

    def __init__(
        self,
        make_stream: StreamMaker,
        *,
        stop_words: Sequence[Sequence[str]],
        min_tokens: Sequence[int],
        num_sequences: int,
        names: frozenset[str],
        accumulate: bool = False,
        whole: bool = False,
        prompts: Sequence[Sequence[int]] = (),
    ) -> None:
        self._make_stream = make_stream
        self._stop_words, self._min_tokens = stop_words, min_tokens
        self._num_open = len(stop_words) * num_sequences
        self._names = names
        self._accumulate, self._whole, self._prompts = accumulate, whole, prompts
        self._pieces: dict[tuple[int, int], list[Outputs]] = {}
        self._texts: dict[tuple[int, int, int], SequenceText] = {}
        self._ended: set[tuple[int, int]] = set()
        self.is_stopped = False  # a stop word ended a sequence that the engine goes on with

    @property
    def is_done(self) -> bool:
        """Whether all sequences have ended."""
        return self._num_open <= 0

    def convert(self, answer: Mapping[str, NDArray[Any]]) -> Outputs | None:
        """Return an answer as the client sees it, None when nothing of it is for it.

        answer : the engine's outputs by name; those of NEEDED are optional but for the first two
        """
        row = _number(answer, "batch_index")
        key = (row, _number(answer, "sequence_index"))
        if key in self._ended:
            return None
        is_final = bool(answer["is_final"].reshape(-1)[0]) if "is_final" in answer else False
        lengths = answer["sequence_length"].reshape(-1).tolist()
        beams = answer["output_ids"].reshape(len(lengths), -1)
        # The older stack's answers begin with the prompt unless told otherwise.
        num_output = _number(answer, "num_output_tokens", sum(lengths))
        num_prompt = (sum(lengths) - num_output) // len(lengths)
        texts, used, stopped = [], [], []
        for i, (ids, length) in enumerate(zip(beams, lengths, strict=True)):
            one = self._text(row, key[1], i)
            is_first = not one.num_tokens and not one.text
            before = self._prompts[row] if self._prompts and is_first else token_ids(ids[:num_prompt])
            new = one.prompt(before)
            text, num_used = one.push(token_ids(ids[num_prompt:length]), is_final=is_final)
            texts.append(one.text if self._accumulate else new + text)
            used.append(num_used)
            stopped.append(one.is_stopped)
        if is_final or all(stopped):
            self._ended.add(key)
            self._num_open -= 1
            self.is_stopped |= not is_final
        outputs = self._outputs(answer, texts)
        if any(stopped):
            outputs = _shortened(outputs, used, stopped)
        if not self._whole:
            return outputs
        self._pieces.setdefault(key, []).append(outputs)
        return _joined(self._pieces.pop(key)) if key in self._ended else None

    def _text(self, row: int, sequence: int, beam: int) -> SequenceText:
        key = (row, sequence, beam)
        if key not in self._texts:
            self._texts[key] = SequenceText(self._make_stream, self._stop_words[row], self._min_tokens[row])
        return self._texts[key]

    def _outputs(self, answer: Mapping[str, NDArray[Any]], texts: list[str]) -> Outputs:
        outputs = {name: array for name, array in answer.items() if name in self._names}
        if "text_output" in self._names:
            outputs["text_output"] = text_array(texts)
        return outputs


def _joined(pieces: Sequence[Outputs]) -> Outputs:
    """Return the answers of a streamed sequence as one."""
    made: Outputs = {}
    for piece in pieces:
        made |= piece
    for name in _PER_TOKEN:
        if name in made:
            made[name] = np.concatenate([piece[name] for piece in pieces if name in piece], axis=2)
    if "text_output" in made:
        texts = zip(*(piece["text_output"] for piece in pieces), strict=True)
        made["text_output"] = np.array([b"".join(parts) for parts in texts], object)
    if "num_output_tokens" in made:
        num_tokens = sum(_number(piece, "num_output_tokens") for piece in pieces)
        made["num_output_tokens"] = np.array([[num_tokens]], np.int32)
    return made


def _shortened(outputs: Outputs, used: list[int], stopped: list[bool]) -> Outputs:
    """Return an answer in which stop words ended sequences, without what came behind them."""
    made = dict(outputs)
    if "cum_log_probs" in made and "output_log_probs" in made:
        # What the engine filled up with is no log-probability; only rows with no such end are cut shorter.
        sums = made["cum_log_probs"].copy()
        for i, num_used in enumerate(used):
            if stopped[i] and len(used) == 1:
                sums[0, i] -= made["output_log_probs"][0, i, num_used:].sum()
        made["cum_log_probs"] = sums
    for name in _PER_TOKEN:
        if name in made:
            made[name] = made[name][:, :, : max(used)]
    if "finish_reasons" in made:
        is_stopped = np.array(stopped).reshape(made["finish_reasons"].shape)
        made["finish_reasons"] = np.where(is_stopped, np.int32(_STOPPED), made["finish_reasons"])
    if "num_output_tokens" in made:
        made["num_output_tokens"] = np.full_like(made["num_output_tokens"], sum(used))
    return made


def _number(answer: Mapping[str, NDArray[Any]], name: str, default: int = 0) -> int:
    return int(answer[name].reshape(-1)[0]) if name in answer else default
