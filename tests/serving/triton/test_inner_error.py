"""Errors between models keep their kind and text."""

from __future__ import annotations

import numpy as np
import pytest
from plansmith.runtime.errors import STATUS_CLASSES, InternalError
from plansmith.serving.triton.inner_error import ERROR_NAMES, error_outputs, raise_error


@pytest.mark.parametrize("kind", STATUS_CLASSES.values())
def test_an_error_comes_out_as_it_went_in(kind: type[Exception]) -> None:
    text = "prompt ist zu groß 😀: 5 > 4"
    outputs = error_outputs(kind(text))
    with pytest.raises(kind) as caught:
        raise_error({name: outputs[name] for name in ERROR_NAMES})
    assert type(caught.value) is kind and str(caught.value) == text


def test_what_is_no_error_of_ours_is_internal() -> None:
    with pytest.raises(InternalError, match="KeyError: 'no such key'; this is a bug"):
        raise_error(error_outputs(KeyError("no such key")))


@pytest.mark.parametrize("reasons", [[[0]], [[1, 3]], [[5]]])
def test_other_answers_are_no_errors(reasons: list[list[int]]) -> None:
    raise_error({"finish_reasons": np.array(reasons, np.int32), "output_ids": np.array([[[65]]], np.int32)})
    raise_error({})
