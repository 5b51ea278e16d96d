"""The model `tensorrt_llm_bls`: text in, text out, by calls of the engine's model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import triton_python_backend_utils as pb_utils

from ...runtime.errors import Error, InvalidArgumentError
from .bls_call import ModelCaller, let_go
from .bls_inputs import TEXT_INPUTS, BlsInputs
from .bls_request import BlsParts, BlsRequest
from .cancel_watch import CancelWatch
from .delta_text import stream_maker
from .read_row import is_stop
from .text_encoder import TextEncoder
from .text_model import read_settings
from .triton_reply import TritonReply, request_parameters, request_tensors
from .turns import TurnBoard

_CANCELLATION_CHECK_S = 0.1
_LET_GO_S = 5.0  # also while nothing runs: what has ended may hold logits
# Triton waits for open requests before it finalizes; what is open even so waits for a model whose process has died.
_DRAIN_S = 2.0


class TritonPythonModel:
    """Tokenizes and detokenizes in its own process; `execute` never waits.

    A thread waits for the answers of each request. There is no other way: under asyncio the wait is that of the loop.
    The engine's model bounds their number by its queue.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the tokenizer that the parameters name.

        raises TritonModelException with one sentence that names the parameter or the file
        """
        self._turns = TurnBoard()
        try:
            self._parts = _parts(args, self._turns)
        except Error as error:
            self._turns.close()
            raise pb_utils.TritonModelException(f"{args['model_name']}: {error}") from error
        self._watch = CancelWatch(_CANCELLATION_CHECK_S, on_round=let_go, idle_s=_LET_GO_S)
        self._changed = threading.Condition()
        self._open: dict[BlsRequest, None] = {}

    def execute(self, requests: Sequence[Any]) -> None:
        """Start requests; their answers come from other threads. An error is that of its request alone."""
        for request in requests:
            reply = TritonReply(request, is_decoupled=self._parts.is_decoupled)
            try:
                self._take(request, reply)
            except Exception as error:
                reply.fail(error)

    def finalize(self) -> None:
        """End what is still open; Triton has waited for it."""
        with self._changed:
            left = list(self._open)
        for request in left:
            _start(request.cancel)
        with self._changed:
            self._changed.wait_for(lambda: not self._open, _DRAIN_S)
        self._watch.stop()
        self._turns.close()

    def _take(self, request: Any, reply: TritonReply) -> None:
        reply.identify(request)
        tensors = request_tensors(request)
        if is_stop(tensors):
            _start(lambda: self._stop(reply))
            return
        with self._changed:
            made = BlsRequest(
                self._parts,
                reply,
                tensors,
                request_parameters(request),
                on_end=self._ended,
            )
            self._open[made] = None
        self._watch.add(cast(Any, made))
        _start(made.run)

    def _stop(self, reply: TritonReply) -> None:
        """End the requests of an id, here or in another instance, and answer."""
        try:
            if not reply.request_id:
                raise InvalidArgumentError(
                    "a stop request has no id; send it with the request id of the one that is to end"
                )
            with self._changed:
                named = [one for one in self._open if one.reply.request_id == reply.request_id]
            for one in named:
                one.cancel()
            if not named:
                self._parts.target.stop(reply.request_id)
            reply.send({}, final=True)
        except Exception as error:
            reply.fail(error)

    def _ended(self, request: BlsRequest) -> None:
        self._watch.remove(cast(Any, request))
        with self._changed:
            self._open.pop(request, None)
            self._changed.notify_all()


def _start(run: Callable[[], None]) -> None:
    """Run something on a thread of its own, which the process does not wait for when it ends."""
    threading.Thread(target=run, name="plansmith-bls", daemon=True).start()


def _parts(args: Mapping[str, str], turns: TurnBoard) -> BlsParts:
    settings = read_settings(args)
    tokenizer = settings.open_tokenizer()
    encoder = TextEncoder(
        tokenizer,
        add_special_tokens=settings.add_special_tokens,
        names=TEXT_INPUTS,
        max_text_bytes=settings.max_text_bytes(),
    )

    def caller(name: str) -> ModelCaller:
        return ModelCaller(name, is_decoupled=settings.is_decoupled, turns=turns)

    return BlsParts(
        inputs=BlsInputs(encoder),
        make_stream=stream_maker(tokenizer, skip_special_tokens=settings.skip_special_tokens),
        target=caller(settings.engine_model),
        draft=caller(settings.draft_model) if settings.draft_model else None,
        accumulate=settings.accumulate_tokens,
        is_decoupled=settings.is_decoupled,
    )
