"""A file that holds one JSON object, of a checkpoint or an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .file_kind import no_file


def read_json_object(path: Path, give: str) -> dict[str, Any]:
    """Return a file's JSON object; CheckpointError when it is missing, no regular file, unreadable, not
    JSON, or no object.

    give : what to do where the file is missing, e.g. "give a complete checkpoint directory"
    """
    try:
        if (wrong := no_file(path)) is not None:  # a pipe would never end
            raise CheckpointError(f"{path}: {wrong}; {give}")
        value = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check its rights") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error}); download or save it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: holds a {type(value).__name__}, wanted a JSON object; download it again"
        )
    return value
