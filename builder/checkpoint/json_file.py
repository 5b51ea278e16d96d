"""JSON files of checkpoints and tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...runtime.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; CheckpointError when it is missing, not JSON, or no object."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing; give a complete checkpoint directory") from None
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror}); check its rights") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: is not valid JSON ({e}); download or save it again") from e
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: holds a {type(value).__name__}, wanted a JSON object; download it again"
        )
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object, {} where there is no such file; raises as read_json."""
    return read_json(path) if path.exists() else {}
