"""What the models without an engine share: requests are answered one by one, so a bad one is an error of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from ...runtime.errors import Error
from .text_settings import TextSettings
from .triton_reply import error_response, request_tensors

Tensors = dict[str, NDArray[Any]]


class TextModel:
    """A model of tensors in, tensors out."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the parameters and open what they name.

        raises TritonModelException with one sentence that names the parameter or the file
        """
        try:
            self.open(read_settings(args))
        except Error as error:
            raise pb_utils.TritonModelException(f"{args['model_name']}: {error}") from error

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
            outputs = self.convert(request_tensors(request))
        except Exception as error:
            return error_response(error)
        wanted = request.requested_output_names()
        return response({name: array for name, array in outputs.items() if name in wanted})


def read_settings(args: Mapping[str, str]) -> TextSettings:
    """Return the settings of a model; args are those of its initialize."""
    # model_repository is the model's own directory; the repository of a relative path is the one around it.
    return TextSettings.read(json.loads(args["model_config"]), Path(args["model_repository"]).parent)


def response(outputs: Mapping[str, NDArray[Any]]) -> Any:
    """Return a response of these outputs."""
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])
