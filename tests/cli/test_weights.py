"""--weights: every command that runs a cpu plan takes it to where the plan is opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.builder.targets.cpu import session
from plansmith.runtime import opening
from plansmith.runtime.executor import cpu_executor

Run = Callable[..., Any]
COMMANDS = {
    "bench": ("--requests", 1, "--input-len", 4, "--output-len", 2, "--threads", 1),
    "generate": ("hello", "--raw", "--max-tokens", 2, "--threads", 1),
    "eval": ("--length", 60, "--contexts", "16", "--threads", 1),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return where weights were asked to be, a plan that was opened each; they are opened for real."""
    found: list[str] = []

    def opened(path: str, **options: Any) -> Any:
        found.append(options["weights"])
        return cpu_executor(path, **options)

    for module in (opening, session):
        monkeypatch.setattr(module, "cpu_executor", opened)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_they_lie_where_the_flag_says(
    plansmith: Run, engine_dir: Path, asked: list[str], command: str
) -> None:
    result = plansmith(command, engine_dir, *COMMANDS[command], "--weights", "mapped")
    assert result.status == 0, result.err
    assert asked and set(asked) == {"mapped"}


def test_layers_are_measured_there_too(
    plansmith: Run, tiny_checkpoint: Callable[[str], Path], asked: list[str]
) -> None:
    words = ("-p", "int4", "--sensitivity", "--sensitivity-tokens", 16, "--weights", "mapped")
    result = plansmith("eval", tiny_checkpoint("llama"), *COMMANDS["eval"], *words)
    assert result.status == 0, result.err
    assert len(asked) > 4 and set(asked) == {
        "mapped"
    }  # two for the text, two for greedy outputs, and the layers


@pytest.mark.parametrize("command", [*COMMANDS, "serve"])
def test_another_word_is_refused_before_anything_is_opened(
    plansmith: Run, tmp_path: Path, command: str
) -> None:
    arguments = COMMANDS.get(command, ("--port", 0))
    result = plansmith(command, tmp_path / "no-engine", *arguments, "--weights", "nowhere")
    assert result.status == 1
    assert result.err == ("plansmith: weights is 'nowhere', it must be one of auto, mapped, huge_pages\n")
