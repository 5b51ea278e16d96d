"""The processes that run the models' Python, by model."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from . import processes
from .process import TOKEN_VARIABLE

_PROGRAM = "triton_python_backend_stub"


def living_stubs(session: int, token: str) -> dict[str, list[int]]:
    """Return model -> pids of its living stubs, of one server."""
    found: dict[str, list[int]] = collections.defaultdict(list)
    for one in processes.living_of(f"{TOKEN_VARIABLE}={token}", session):
        words = processes.command_line(one.pid)
        if len(words) > 1 and Path(words[0]).name == _PROGRAM:
            found[Path(words[1]).parent.parent.name].append(
                one.pid
            )  # <repository>/<model>/<version>/model.py
    return dict(found)


def kill_stubs(session: int, token: str, model: str) -> int:
    """Kill a model's stubs and return how many there were."""
    pids = living_stubs(session, token).get(model, [])
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def num_wanted(config: dict[str, Any]) -> int:
    """Return how many stubs a model of this configuration has; 0 for those that are not of the Python backend."""
    if config.get("backend") != "python":
        return 0
    return sum(one["count"] * max(1, len(one.get("gpus", ()))) for one in config.get("instance_group", ()))
