"""One request of `tensorrt_llm_bls` on its way: encoded, run by the engine's model, answered as text."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.errors import Error, InvalidArgumentError, UnsupportedError
from .bls_answers import NEEDED, TextAnswers
from .bls_inputs import BlsInputs, first_flag, first_number
from .bls_speculation import Caller, can_speculate, speculate
from .delta_text import StreamMaker
from .request import Reply
from .request_ids import inner_id
from .text_tensors import read_numbers, read_texts

Tensors = dict[str, NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class BlsParts:
    """What all requests of the model share.

    target, draft : the engine's model, and that which drafts for it; None = the engine's own drafts
    accumulate : answers of a stream have the whole text so far
    """

    inputs: BlsInputs
    make_stream: StreamMaker
    target: Caller
    draft: Caller | None = None
    accumulate: bool = False
    is_decoupled: bool = True


class BlsRequest:
    """Runs a request. `run` has a thread of its own, the rest may be called from any.

    on_end : called once, when nothing of the request runs any more
    """

    def __init__(
        self,
        parts: BlsParts,
        reply: Reply,
        tensors: Tensors,
        parameters: Mapping[str, Any],
        *,
        on_end: Callable[[BlsRequest], None],
    ) -> None:
        self.reply = reply
        self._parts, self._tensors, self._parameters = parts, tensors, parameters
        self._on_end = on_end
        self.inner_id = inner_id(reply.request_id)  # by which this request alone is stopped
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._is_running = False

    def run(self) -> None:
        """Answer the request, with an error where something is wrong with it."""
        try:
            self._run()
        except Exception as error:
            self.reply.fail(error)
        finally:
            with self._lock:
                self._is_running = False
            self._on_end(self)

    def cancel(self, *, is_gone: bool = False) -> None:
        """Ask for the end of the request, which answers with what it has. More than once is fine; does not raise.

        is_gone : nobody reads the answers any more
        """
        with self._lock:
            is_running, self._is_cancelled = self._is_running, True
        if is_running and is_gone:  # nobody waits for it, and who noticed has others to look after
            threading.Thread(target=self._stop_inner, name="plansmith-bls-stop", daemon=True).start()
        elif is_running:
            self._stop_inner()

    def _run(self) -> None:
        inputs = self._parts.inputs.make(self._tensors)
        answers = self._answers(inputs)
        if self._is_cancelled:
            self.reply.send({}, final=True)
            return
        if not self._parts.is_decoupled:
            self._is_running = True
            self._answer_once(answers, self._call(inputs))
            return
        made = self._call(inputs)
        with self._lock:
            self._is_running, is_cancelled = True, self._is_cancelled
        if is_cancelled:  # a stop may have come before there was anything to stop
            self._stop_inner()
        try:
            self._answer(answers, made)
        finally:
            with contextlib.suppress(Error):
                for _ in made:  # the server wants them read
                    pass

    def _answer(self, answers: TextAnswers, made: Iterator[Tensors]) -> None:
        """Answer until all sequences have ended, which may be before the engine ends them."""
        for answer in made:
            try:
                outputs = answers.convert(answer)
                self._pass_on(outputs, is_last=answers.is_done)
            except Exception:  # the server is gone, or the answer is none: nobody waits for the engine's end
                self.cancel()
                raise
            if answers.is_done:
                if answers.is_stopped:
                    self.cancel()
                return
        self.reply.send({}, final=True)

    def _pass_on(self, outputs: Tensors | None, *, is_last: bool) -> None:
        if outputs is not None:
            self.reply.send(outputs, final=is_last)

    def _answer_once(self, answers: TextAnswers, made: Iterator[Tensors]) -> None:
        all_of_them = [one for one in map(answers.convert, made) if one is not None]
        if len(all_of_them) != 1:
            raise UnsupportedError(
                f"the request has {len(all_of_them)} answers, and a model that is not decoupled gives one; send one "
                "row a request, or set decoupled_mode"
            )
        self.reply.send(all_of_them[0], final=True)

    def _call(self, inputs: Tensors) -> Iterator[Tensors]:
        parts, tensors = self._parts, self._tensors
        names = NEEDED | (frozenset(self.reply.output_names) - {"text_output"})
        num_draft = int(first_number(tensors, "num_draft_tokens", 0))
        if num_draft < 0:
            raise InvalidArgumentError(f"num_draft_tokens is {num_draft}, wanted at least 0")
        if parts.draft is not None and self._is_drafted(inputs):
            return speculate(
                parts.target,
                parts.draft,
                inputs,
                names,
                num_draft_tokens=num_draft,
                use_draft_logits=first_flag(tensors, "use_draft_logits"),
                request_id=self.inner_id,
                parameters=self._parameters,
                is_cancelled=lambda: self._is_cancelled,
            )
        if parts.draft is None and "num_draft_tokens" in tensors:
            inputs["max_draft_len"] = np.full_like(inputs["input_lengths"], num_draft)
        if self._is_gathering(inputs):
            inputs["streaming"] = np.ones(inputs["input_lengths"].shape, np.bool_)
        elif not first_flag(inputs, "streaming") and not first_flag(inputs, "exclude_input_in_output"):
            inputs["return_num_output_tokens"] = np.ones(inputs["input_lengths"].shape, np.bool_)
        return parts.target.call(inputs, names, self.inner_id, self._parameters)

    def _is_gathering(self, inputs: Tensors) -> bool:
        """Return whether an answer is put together from a stream, which can end at a stop word as soon as it is there.

        The prompt that an answer begins with is then added here, so the request must say whether it does.
        """
        is_single = first_number(inputs, "beam_width", 1) <= 1 and inputs["input_ids"].ndim == 2
        return (
            self._parts.is_decoupled
            and is_single
            and "stop_words" in self._tensors
            and "exclude_input_in_output" in inputs
            and not first_flag(inputs, "streaming")
            and not self._is_drafted(inputs)
        )

    def _is_drafted(self, inputs: Tensors) -> bool:
        """Return whether a model of the server drafts for the request."""
        is_asked = first_number(self._tensors, "num_draft_tokens", 0) > 0
        return self._parts.draft is not None and is_asked and can_speculate(inputs)

    def _answers(self, inputs: Tensors) -> TextAnswers:
        tensors = self._tensors
        num_rows = tensors["text_input"].shape[0]
        is_beams = first_number(tensors, "beam_width", 1) > 1
        least = read_numbers(tensors, "min_tokens", num_rows)
        names = set(self.reply.output_names)
        if not first_flag(tensors, "return_num_output_tokens"):
            names.discard("num_output_tokens")
        is_gathering = self._is_gathering(inputs)
        prompts: list[list[int]] = []
        if is_gathering and not first_flag(inputs, "exclude_input_in_output"):
            lengths = inputs["input_lengths"].reshape(-1).tolist()
            prompts = [ids[:n].tolist() for ids, n in zip(inputs["input_ids"], lengths, strict=True)]
        return TextAnswers(
            self._parts.make_stream,
            stop_words=read_texts(tensors, "stop_words", num_rows),
            min_tokens=[0] * num_rows if least is None else [int(row[0]) for row in least],
            num_sequences=1 if is_beams else int(first_number(tensors, "num_return_sequences", 1)),
            names=frozenset(names),
            accumulate=self._parts.accumulate and not is_beams and first_flag(tensors, "stream"),
            whole=is_gathering,
            prompts=prompts,
        )

    def _stop_inner(self) -> None:
        for model in (self._parts.target, self._parts.draft):
            try:
                if model is not None:
                    model.stop(self.inner_id)
            except Error:  # it has gone, and so has what was to stop
                pass
