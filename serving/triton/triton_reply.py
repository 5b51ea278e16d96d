"""Tensors and errors of Triton's Python backend, in and out."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from ...runtime.errors import (
    Error,
    InvalidArgumentError,
    NotFoundError,
    QueueFullError,
    ShapeError,
    ShutdownError,
    UnsupportedError,
)
from .inner_error import error_outputs, error_text
from .input_specs import OLDER_NAMES

__all__ = ["TritonReply", "error_response", "request_parameters", "request_tensors"]

# A model that has not read an answer for so long is dead; its request must not stay for ever.
_PATIENCE_S = 30.0
_CODES: tuple[tuple[tuple[type[Error], ...], str], ...] = (
    ((InvalidArgumentError, ShapeError), "INVALID_ARG"),
    ((QueueFullError, ShutdownError), "UNAVAILABLE"),
    ((NotFoundError,), "NOT_FOUND"),
    ((UnsupportedError,), "UNSUPPORTED"),
)


def request_tensors(request: Any) -> dict[str, NDArray[Any]]:
    """Return a request's inputs by the names they have now; the newer counts where a request has both.

    BYTES are arrays of objects. Valid while the request is.
    """
    tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    for older, name in OLDER_NAMES.items():
        if older in tensors:
            tensors.setdefault(name, tensors[older])
            del tensors[older]
    return tensors


def request_parameters(request: Any) -> dict[str, Any]:
    """Return a request's parameters, {} without any; InvalidArgumentError for what is not UTF-8."""
    try:
        text = request.parameters()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"the request's parameters are not UTF-8 ({error.reason}); send text, other bytes are for tensors"
        ) from error
    return dict(json.loads(text)) if text else {}


def error_response(error: BaseException) -> Any:
    """Return a response that is an error; clients' mistakes are told from ours by its code."""
    text = (
        error_text(error).encode("utf-8", "replace").decode()
    )  # of a surrogate Triton makes an error of its own
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(text, _code(error)))


class TritonReply:
    """Sends the answers of one request.

    request_id, output_names : of the request, once it has been identified; before that an error can be sent
    is_decoupled : the model's; else a request has one answer, not none
    is_inner : a model of this server made the request, see inner_error
    """

    def __init__(self, request: Any, *, is_decoupled: bool) -> None:
        self.request_id = ""
        self.output_names: frozenset[str] = frozenset()
        self.is_inner = False
        self._sender = request.get_response_sender()
        self._is_decoupled = is_decoupled
        self._num_sent = 0
        self._num_read: Callable[[], int] | None = None
        self._waits_since_s: float | None = None
        # The server frees what is_cancelled asks as soon as the final flag is sent.
        self._lock = threading.Lock()
        self._is_closed = False

    def identify(self, request: Any) -> None:
        """Read what the client calls the request and which outputs it wants; InvalidArgumentError for no UTF-8."""
        try:
            self.request_id = request.request_id()
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(
                f"the request's id is not UTF-8 ({error.reason}); send text"
            ) from error
        self.output_names = frozenset(request.requested_output_names())

    def take_turns(self, num_read: Callable[[], int]) -> None:
        """Wait with each answer until the one before it has been read, see turns; `num_read` tells how many have."""
        self._num_read = num_read

    def acknowledge(self) -> None:
        """Send the empty first answer to a request of a model."""
        if self.is_inner and self._is_decoupled:
            self.send({}, final=False)

    def is_ready(self) -> bool:
        """Return whether the next answer may be sent: all before it have been read, or nobody has for long."""
        if self._num_read is None or self._num_read() >= self._num_sent:
            self._waits_since_s = None
            return True
        now = time.monotonic()
        self._waits_since_s = self._waits_since_s or now
        return now - self._waits_since_s > _PATIENCE_S

    def send(self, outputs: dict[str, NDArray[Any]], final: bool) -> None:
        """Send one answer; with no outputs and `final`, the end alone."""
        response = None
        if outputs or not (final and self._is_decoupled):
            tensors = [pb_utils.Tensor(name, np.ascontiguousarray(a)) for name, a in outputs.items()]
            response = pb_utils.InferenceResponse(output_tensors=tensors)
        self._send(response, final)

    def fail(self, error: BaseException) -> None:
        """Send an error, which is the last answer."""
        if self.is_inner:
            self.send(error_outputs(error), final=True)
            return
        self._send(error_response(error), final=True)

    def is_cancelled(self) -> bool:
        """Return whether the client has gone or cancelled; False once the last answer is out."""
        if not self._lock.acquire(blocking=False):
            return False  # the last answer is going; a server that hangs in it must not keep this thread too
        try:
            return False if self._is_closed else bool(self._sender.is_cancelled())
        finally:
            self._lock.release()

    def _send(self, response: Any, final: bool) -> None:
        self._num_sent += 1
        if not final:
            self._sender.send(response)
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            arguments = () if response is None else (response,)
            self._sender.send(*arguments, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _code(error: BaseException) -> Any:
    for classes, name in _CODES:
        if isinstance(error, classes):
            return getattr(pb_utils.TritonError, name)
    return pb_utils.TritonError.INTERNAL
