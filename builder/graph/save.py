"""Writing a graph to disk without holding its weights."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir


def save(model: ir.Model, path: str | Path) -> None:
    """Write `path` and, beside it, `<path>.data` with every weight over 256 bytes, one weight in memory at a time.

    The model stays as it is, its weights lazy. Both files are replaced if they exist.
    """
    path = Path(path)
    ir.save(model, path, external_data=f"{path.name}.data")
