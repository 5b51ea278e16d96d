"""Requests that a model makes of another one in the same server."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from ...runtime.errors import Error, ExecutorError
from .inner_error import ERROR_NAMES, IS_INNER, raise_error
from .turns import TURN, Turn, TurnBoard

Tensors = Mapping[str, NDArray[Any]]

# The stub lets go of a request's answers some time after the last was read, on a thread of its own. Were that the last
# to hold them, it would free their arrays without Python's lock: a stub under load has crashed that did not hold them.
_LINGER_S = 20.0


class _Lingering:
    """Holds what has ended for a while. Any thread."""

    def __init__(self) -> None:
        self._ended: collections.deque[tuple[float, Any]] = collections.deque()
        self._lock = threading.Lock()

    def add(self, answers: Any) -> None:
        with self._lock:
            self._ended.append((time.monotonic() + _LINGER_S, answers))

    def let_go(self) -> None:
        """Drop what was held long enough."""
        now = time.monotonic()
        with self._lock:
            old = []
            while self._ended and self._ended[0][0] < now:
                old.append(self._ended.popleft())


_LINGERING = _Lingering()
let_go = _LINGERING.let_go


class ModelCaller:
    """Calls the model `tensorrt_llm` of some name. Any thread; each waits for its own answers.

    is_decoupled : as this model is, so is that one: a request may have several answers
    turns : of this model, for all its calls
    """

    def __init__(self, model_name: str, *, is_decoupled: bool, turns: TurnBoard) -> None:
        self._model_name = model_name
        self._is_decoupled = is_decoupled
        self._turns = turns

    def call(
        self, tensors: Tensors, names: Collection[str], request_id: str, parameters: Mapping[str, Any]
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """Start a request, and return its answers as they come, each as its outputs by name.

        raises the error that the model answered with, here or from the iterator
        """
        turn = self._turns.take()
        request = pb_utils.InferenceRequest(
            model_name=self._model_name,
            request_id=request_id,
            requested_output_names=sorted({*names, *ERROR_NAMES}),
            inputs=[pb_utils.Tensor(name, np.ascontiguousarray(array)) for name, array in tensors.items()],
            parameters={**parameters, IS_INNER: True, TURN: turn.address},
        )
        try:
            answers = request.exec(decoupled=True) if self._is_decoupled else [request.exec()]
        except pb_utils.TritonModelException as error:
            turn.release()
            raise ExecutorError(f"{self._model_name} cannot be called: {error}") from error
        return _outputs(answers, turn)

    def stop(self, request_id: str) -> None:
        """End a running request, which answers with what it has. Nothing for an id that does not run."""
        one = np.ones((1, 1), np.int32)
        tensors = {
            "input_ids": one,
            "input_lengths": one,
            "request_output_len": one,
            "stop": np.ones((1, 1), np.bool_),
        }
        for _ in self.call(tensors, ["output_ids"], request_id, {}):
            pass


def _outputs(answers: Iterable[Any], turn: Turn) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield answers, and read them to the last, an error's too: left with unread ones, the server hangs or crashes."""
    failure: Exception | None = None
    for answer in answers:
        turn.has_read()
        try:
            if answer.has_error():  # of another model than ours, or of the server
                raise ExecutorError(answer.error().message())
            outputs = {tensor.name(): tensor.as_numpy() for tensor in answer.output_tensors()}
            raise_error(outputs)
        except Error as error:
            failure = failure or error
            continue
        if outputs and failure is None:
            yield outputs
    turn.release()
    _LINGERING.add(answers)
    if failure is not None:
        raise failure
