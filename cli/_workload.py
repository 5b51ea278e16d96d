"""Workloads of the bench command: from a file, or random."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from ..runtime.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class Work:
    """One request: its prompt's ids and how many tokens it must generate."""

    prompt_ids: list[int]
    output_len: int


def random_workload(
    num_requests: int, input_len: int, output_len: int, vocab_size: int, seed: int
) -> list[Work]:
    """Return requests of uniformly random token ids, the same for the same seed."""
    random = np.random.default_rng(seed)
    prompts = random.integers(0, vocab_size, size=(num_requests, input_len))
    return [Work(prompt.tolist(), output_len) for prompt in prompts]


def read_workload(path: Path, name: str | None) -> list[Work]:
    """Return the requests of a workload file.

    path : JSON: a list of {"prompt_ids": [..], "output_len": n}, or an object of named sets; a set is such a list, one
        such object, or an object with the list as "requests"
    name : which set; None = the only one, or "requests16"
    raises InvalidArgumentError for a file of another form
    """
    if not path.is_file():
        raise InvalidArgumentError(f"--workload {path} is not a file; give a JSON file of requests")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"--workload {path} is not JSON: {error}; write it again") from error
    if isinstance(content, list):
        if name is not None:
            raise InvalidArgumentError(f"{path} is one list of requests without named sets; leave --set out")
        return _requests(content, str(path))
    if not isinstance(content, dict):
        raise InvalidArgumentError(
            f"{path} holds a {type(content).__name__}, it must be a list or named sets"
        )
    sets = {key: value for key, value in content.items() if isinstance(value, list | dict)}
    chosen = name or ("requests16" if "requests16" in sets else next(iter(sets), ""))
    if chosen not in sets:
        raise InvalidArgumentError(
            f"{path} has no set {chosen!r}, only {', '.join(sets) or 'none'}; give --set"
        )
    value = sets[chosen]
    if isinstance(value, dict):
        value = value.get("requests", [value])
    return _requests(value, f"{path}, set {chosen}")


def _requests(entries: Any, where: str) -> list[Work]:
    if not isinstance(entries, list) or not entries:
        raise InvalidArgumentError(f"{where} has no requests; it must be a list of at least one")
    return [_request(entry, f"{where}, request {i}") for i, entry in enumerate(entries)]


def _request(entry: Any, where: str) -> Work:
    ids = entry.get("prompt_ids") if isinstance(entry, dict) else None
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise InvalidArgumentError(f"{where} has no prompt_ids, a list of at least one token id")
    output_len = entry.get("output_len")
    if type(output_len) is not int or output_len < 1:
        raise InvalidArgumentError(
            f"{where} has the output_len {output_len!r}, it must be an integer of at least 1"
        )
    return Work(ids, output_len)
