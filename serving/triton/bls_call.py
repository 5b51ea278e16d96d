"""Requests that a model makes of another one in the same server."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from ...runtime.errors import (
    Error,
    ExecutorError,
    InvalidArgumentError,
    NotFoundError,
    QueueFullError,
    UnsupportedError,
)

Tensors = Mapping[str, NDArray[Any]]

_ACKNOWLEDGE = {"acknowledge": True}  # see engine_model.ACKNOWLEDGE
_CODES = {
    "INVALID_ARG": InvalidArgumentError,
    "UNAVAILABLE": QueueFullError,
    "NOT_FOUND": NotFoundError,
    "UNSUPPORTED": UnsupportedError,
}


class ModelCaller:
    """Calls the model `tensorrt_llm` of some name. Any thread; each waits for its own answers.

    is_decoupled : as this model is, so is that one: a request may have several answers
    """

    def __init__(self, model_name: str, *, is_decoupled: bool) -> None:
        self._model_name = model_name
        self._is_decoupled = is_decoupled

    def call(
        self, tensors: Tensors, names: Collection[str], request_id: str, parameters: Mapping[str, Any]
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """Start a request, and return its answers as they come, each as its outputs by name.

        raises the error that the model answered with, here or from the iterator
        """
        request = pb_utils.InferenceRequest(
            model_name=self._model_name,
            request_id=request_id,
            requested_output_names=sorted(names),
            inputs=[pb_utils.Tensor(name, np.ascontiguousarray(array)) for name, array in tensors.items()],
            parameters={**parameters, **(_ACKNOWLEDGE if self._is_decoupled else {})},
        )
        try:
            return _outputs(request.exec(decoupled=True) if self._is_decoupled else [request.exec()])
        except pb_utils.TritonModelException as error:
            raise ExecutorError(f"{self._model_name} cannot be called: {error}") from error

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


def _outputs(answers: Iterable[Any]) -> Iterator[dict[str, NDArray[Any]]]:
    for answer in answers:
        if answer.has_error():
            raise _error(answer.error())
        outputs = {tensor.name(): tensor.as_numpy() for tensor in answer.output_tensors()}
        if outputs:
            yield outputs


def _error(error: Any) -> Error:
    """Return the error of an answer as one of ours."""
    for name, kind in _CODES.items():
        if error.code() == getattr(pb_utils.TritonError, name):
            return kind(error.message())
    return ExecutorError(error.message())
