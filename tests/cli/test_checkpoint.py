"""plansmith checkpoint demo, with the fetching stood in for: no test needs a network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.builder.checkpoint import demo
from plansmith.runtime.errors import CheckpointError

Run = Callable[..., Any]


def test_says_what_comes_next(
    plansmith: Run,
    tiny_checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Path] = []

    def fetch(dest: Path) -> Path:
        asked.append(dest)
        return tiny_checkpoint("llama")

    monkeypatch.setattr(demo, "fetch_demo_checkpoint", fetch)
    result = plansmith("checkpoint", "demo", "-o", tmp_path / "here")
    assert asked == [tmp_path / "here"]
    assert result.status == 0 and "next: plansmith build" in result.out
    facts = json.loads(plansmith("checkpoint", "demo", "--json").out)
    assert facts["family"] == "llama" and facts["num_parameters"] > 0


def test_failure(plansmith: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(dest: Path) -> Path:
        raise CheckpointError("the registry cannot be reached; try again")

    monkeypatch.setattr(demo, "fetch_demo_checkpoint", fetch)
    result = plansmith("checkpoint", "demo")
    assert (result.status, result.err) == (1, "plansmith: the registry cannot be reached; try again\n")
