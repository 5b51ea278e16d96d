"""JSON files of checkpoints and tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...runtime.json_file import read_json_object


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; CheckpointError when it is missing, not JSON, or no object."""
    return read_json_object(path, "give a complete checkpoint directory")


def read_optional_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object, {} where there is no such file; raises as read_json."""
    return read_json(path) if path.exists() else {}
