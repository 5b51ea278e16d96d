"""The command itself: exit codes, messages, and how quickly it starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.cli import _app
from plansmith.runtime.errors import BuildError

Run = Callable[..., Any]
COMMANDS = ("build", "verify", "inspect", "generate", "bench")


def test_help_lists_every_command(plansmith: Run) -> None:
    result = plansmith("--help")
    assert result.status == 0
    for name in (*COMMANDS, "checkpoint"):
        assert name in result.out
    assert plansmith("checkpoint", "--help").out.count("demo") == 1


@pytest.mark.parametrize("command", [*((name,) for name in COMMANDS), ("checkpoint", "demo")])
def test_every_command_has_help_and_json(plansmith: Run, command: tuple[str, ...]) -> None:
    result = plansmith(*command, "--help")
    assert result.status == 0
    assert "--json" in result.out


def test_version(plansmith: Run) -> None:
    from plansmith import __version__

    assert plansmith("--version").out == f"plansmith {__version__}\n"


@pytest.mark.parametrize(
    "words", [("bild",), ("inspect",), ("inspect", "x", "--no-such"), ("checkpoint", "x")]
)
def test_usage_errors_exit_with_2(plansmith: Run, words: tuple[str, ...]) -> None:
    result = plansmith(*words)
    assert result.status == 2
    assert result.out == "" and "Usage" in result.err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom plansmith.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'numpy', 'onnx', 'onnx_ir', 'torch', 'tokenizers', 'cffi'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def raising(error: BaseException) -> Callable[..., None]:
    def body(as_json: bool = False) -> None:
        raise error

    return _app.guarded(body)


def test_errors_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        raising(BuildError("no plan; do this", ["a", "b"]))(as_json=True)
    out, err = capsys.readouterr()
    assert exit_.value.code == 1
    assert err == "plansmith: no plan; do this\n    a\n    b\n"
    assert out == '{"error": {"kind": "BuildError", "message": "no plan; do this"}}\n'


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (PermissionError(13, "Permission denied", "/x"), 1, "Permission denied: /x"),
        (ModuleNotFoundError("No module named 'onnxruntime'"), 1, "pip install 'plansmith"),
        (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero; this is a bug"),
    ],
)
def test_other_exceptions(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, words: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        raising(error)()
    assert exit_.value.code == code
    assert words in capsys.readouterr().err


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANSMITH_TRACEBACK", "1")
    with pytest.raises(BuildError):
        raising(BuildError("x"))()


def test_a_reader_that_leaves(engine_dir: Path) -> None:
    """`plansmith inspect … | head -1` ends without a traceback."""
    code = "from plansmith.cli import main; main()"
    child = subprocess.Popen(
        [sys.executable, "-c", code, "inspect", str(engine_dir), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    assert b"Traceback" not in child.stderr.read()
    assert child.wait() != 0
    child.stderr.close()
