"""Errors between the models of a server, as outputs.

Of a request that a model makes, the server delivers an error as its first answer alone: one that comes later is lost,
or the caller waits for ever; and the error's code is always lost (found in Triton 24.10). So an answer to such a
request says it in outputs: `finish_reasons` below 0, and the text's UTF-8 bytes as `output_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.errors import STATUS_CLASSES, Error, InternalError

# Request parameter of a request that a model makes: its errors are outputs, and where it may have several answers the
# first is empty and comes at once: the server waits for that one with one of few threads (32 an instance), so that as
# many long prompts would hold up all others.
IS_INNER = "is_inner"
ERROR_NAMES = ("finish_reasons", "output_ids")


def error_text(error: BaseException) -> str:
    """Return what a client is told of an error; of one that is none of ours, also what it is."""
    return str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}; this is a bug"


def error_outputs(error: BaseException) -> dict[str, NDArray[Any]]:
    """Return an error as outputs, its kind and text."""
    status = next((code for code, kind in STATUS_CLASSES.items() if isinstance(error, kind)), _INTERNAL)
    data = np.frombuffer(error_text(error).encode("utf-8", "replace"), np.uint8)
    return {
        "finish_reasons": np.array([[-status]], np.int32),
        "output_ids": data.astype(np.int32).reshape(1, 1, -1),
        "sequence_length": np.array([[data.size]], np.int32),
    }


def raise_error(outputs: Mapping[str, NDArray[Any]]) -> None:
    """Raise the error that an answer is; nothing for another answer."""
    reasons = outputs.get("finish_reasons")
    if reasons is None or not reasons.size or reasons.flat[0] >= 0:
        return
    kind: type[Error] = STATUS_CLASSES.get(-int(reasons.flat[0]), InternalError)
    text = outputs["output_ids"].astype(np.uint8).tobytes().decode("utf-8", "replace")
    raise kind(text)


_INTERNAL = next(code for code, kind in STATUS_CLASSES.items() if kind is InternalError)
