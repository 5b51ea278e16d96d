"""What the models without an engine share: requests are answered one by one, so a bad one is an error of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from ...runtime.errors import Error, InvalidArgumentError, ShapeError, UnsupportedError
from .text_settings import TextSettings

Tensors = dict[str, NDArray[Any]]


class TextModel:
    """A model of tensors in, tensors out."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the parameters and open what they name."""
        self.open(read_settings(args))

    def open(self, settings: TextSettings) -> None:
        """Make ready what `convert` needs."""
        raise NotImplementedError

    def convert(self, tensors: Tensors) -> Tensors:
        """Return a request's outputs; raises Error for what is wrong with it."""
        raise NotImplementedError

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return one response a request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            outputs = self.convert(read_tensors(request))
        except Exception as error:
            return error_response(error)
        wanted = request.requested_output_names()
        return response({name: array for name, array in outputs.items() if name in wanted})


def read_settings(args: Mapping[str, str]) -> TextSettings:
    """Return the settings of a model; args are those of its initialize."""
    # model_repository is the model's own directory; the repository of a relative path is the one around it.
    return TextSettings.read(json.loads(args["model_config"]), Path(args["model_repository"]).parent)


def read_tensors(request: Any) -> Tensors:
    """Return a request's inputs by name; BYTES are arrays of objects. Valid while the request is."""
    return {one.name(): one.as_numpy() for one in request.inputs()}


def response(outputs: Mapping[str, NDArray[Any]]) -> Any:
    """Return a response of these outputs."""
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])


def error_response(error: Exception) -> Any:
    """Return a response that is an error; the client's mistakes are told from ours by their code."""
    code = pb_utils.TritonError.INTERNAL
    if isinstance(error, (InvalidArgumentError, ShapeError)):
        code = pb_utils.TritonError.INVALID_ARG
    elif isinstance(error, UnsupportedError):
        code = pb_utils.TritonError.UNSUPPORTED
    text = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}; this is a bug"
    return pb_utils.InferenceResponse([], pb_utils.TritonError(text, code))
