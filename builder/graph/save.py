"""Writing a graph to disk without holding its weights."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from ...runtime.errors import Error


def save(model: ir.Model, path: str | Path) -> None:
    """Write `path` and, beside it, `<path>.data` with every weight over 256 bytes, one weight in memory at a time.

    The model stays as it is, its weights lazy. Both files are replaced if they exist.
    raises : what reading a weight raises, of weights that lie in `path` itself too
    """
    path = Path(path)
    try:
        ir.save(model, path, external_data=f"{path.name}.data")
    except ir.serde.SerdeError as error:
        raise _reason(error) from error


def _reason(error: BaseException) -> BaseException:
    """Return the error of ours that onnx_ir wrapped, or the wrapped one where there is none."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, Error | OSError):
        inner = inner.__cause__
    return inner or error
