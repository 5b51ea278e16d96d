"""The command itself: exit codes, messages, and how quickly it starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.cli import _app
from plansmith.runtime.errors import BuildError

Run = Callable[..., Any]
COMMANDS = ("build", "verify", "inspect", "generate", "bench", "triton-repo")
GROUPED = (("checkpoint", "demo"), ("triton", "start"), ("triton", "stop"), ("triton", "status"))


def test_help_lists_every_command(plansmith: Run) -> None:
    result = plansmith("--help")
    assert result.status == 0
    for name in (*COMMANDS, "checkpoint", "serve", "triton"):
        assert name in result.out
    assert plansmith("checkpoint", "--help").out.count("demo") == 1


@pytest.mark.parametrize("command", [*((name,) for name in COMMANDS), *GROUPED])
def test_every_command_has_help_and_json(plansmith: Run, command: tuple[str, ...]) -> None:
    result = plansmith(*command, "--help")
    assert result.status == 0
    assert "--json" in result.out


@pytest.mark.parametrize("width", ["60", "200"])
def test_help_shows_names_and_defaults_whole(
    plansmith: Run, monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    text = " ".join(plansmith("bench", "--help").out.split())
    assert "--kv-cache-free-gpu-mem-fraction, --kv-cache-free-gpu-memory-fraction SHARE" in text
    assert "[default: 0.9;" in text and "\u2026" not in text
    assert text.count("docs/serving.md") >= 2  # --device, --cuda-graphs


def test_every_precision_is_in_the_help_of_build(plansmith: Run) -> None:
    from plansmith.builder.precision import PRECISIONS, RECIPES

    text = plansmith("build", "--help").out
    assert {*PRECISIONS, *RECIPES} <= set(re.findall(r"\w+", text)) and "docs/quantization.md" in text


def test_version(plansmith: Run) -> None:
    from plansmith import __version__

    assert plansmith("--version").out == f"plansmith {__version__}\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("bild",), "there is no command 'bild', did you mean 'build'?; see: plansmith --help"),
        (("checkpoint", "x"), "there is no command 'x'; see: plansmith checkpoint --help"),
        (("inspect",), "ENGINE_DIR is missing; see: plansmith inspect --help"),
        (
            ("inspect", "x", "y"),
            "'y' is more than this command takes; leave it out; see: plansmith inspect --help",
        ),
        (("inspect", "x", "--no_such"), "there is no option --no_such; see: plansmith inspect --help"),
        (
            ("verify", "x", "--against", "gpt"),
            "--against is 'gpt', it must be one of reference, transformers, all",
        ),
        (
            ("verify", "x", "--length=abc"),
            "--length is 'abc', it must be a whole number; see: plansmith verify",
        ),
        (
            ("verify", "x", "--sequences", "0"),
            "--sequences is '0', it must be greater than or equal to 1; see",
        ),
        (
            ("build", "x", "--max_seq_len", "1.5"),
            "--max_seq_len is '1.5', it must be a whole number; see: plansmith b",
        ),
        (
            ("build", "x", "--max_seq_len"),
            "--max_seq_len has no value, give one; see: plansmith build --help",
        ),
        (("build", "x", "--force=3"), "--force takes no value; see: plansmith build --help"),
        (
            ("build",),
            "give one checkpoint, as CHECKPOINT or as --checkpoint-dir; see: plansmith build --help",
        ),
    ],
)
def test_usage_errors_are_one_sentence(plansmith: Run, words: tuple[str, ...], sentence: str) -> None:
    result = plansmith(*words)
    assert result.status == 2 and result.out == ""
    assert result.err.startswith(f"plansmith: {sentence}") and result.err.count("\n") == 1
    if words[-1] not in ("--max_seq_len", "bild", "x"):  # there --json is read otherwise
        result = plansmith(*words, "--json")
        error = json.loads(result.out)["error"]
        assert (result.status, error["kind"]) == (2, "UsageError")
        assert result.err == f"plansmith: {error['message']}\n" and error["message"].startswith(sentence)


@pytest.mark.parametrize(
    "words", [("inspect", "\udcff"), ("build", "x", "-o", "a\udcffb"), ("generate", "x", "\ud800")]
)
def test_arguments_are_utf8(plansmith: Run, words: tuple[str, ...]) -> None:
    result = plansmith(*words, "--json")
    assert result.status == 1 and "is not UTF-8; write it in UTF-8" in result.err
    assert json.loads(result.out)["error"]["kind"] == "InvalidArgumentError"


def test_arguments_in_a_locale_without_their_characters(plansmith: Run) -> None:
    """In the C locale Python gives the bytes of a letter one by one."""
    name = "größe".encode().decode("ascii", "surrogateescape")
    assert "größe does not exist" in plansmith("inspect", name).err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom plansmith.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'numpy', 'onnx', 'onnx_ir', 'torch', 'tokenizers', 'cffi'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def raising(error: BaseException, as_json: bool = False) -> Callable[[], None]:
    def body() -> None:
        raise error

    return _app.guarded(body, as_json)


def test_errors_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        raising(BuildError("no plan; do this", ["a", "b"]), as_json=True)()
    out, err = capsys.readouterr()
    assert exit_.value.code == 1
    assert err == "plansmith: no plan; do this\n    a\n    b\n"
    assert out == '{"error": {"kind": "BuildError", "message": "no plan; do this"}}\n'


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (PermissionError(13, "Permission denied", "/x"), 1, "/x: Permission denied; check the path"),
        (OSError(28, "No space left on device"), 1, "No space left on device; free some space"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), 1, "not UTF-8"),
        (MemoryError("931 TiB"), 1, "out of memory (931 TiB)"),
        (
            ModuleNotFoundError("No module named 'x'"),
            1,
            "'plansmith[rtx,verify,guided,quantize,serve,triton,fleet]'",
        ),
        (ModuleNotFoundError("No module 'uvicorn.x'", name="uvicorn.x"), 1, "'plansmith[serve]'"),
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


@pytest.mark.parametrize(
    ("words", "package"),
    [(("serve",), "fastapi"), (("verify", "--against", "reference"), "onnxruntime")],
)
def test_a_missing_package_names_its_extra(engine_dir: Path, words: tuple[str, ...], package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from plansmith.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, words[0], str(engine_dir), *words[1:]],
        capture_output=True,
        text=True,
        check=False,
    )
    extra = _app._EXTRAS[package]
    assert done.returncode == 1
    assert f"pip install 'plansmith[{extra}]'" in done.stderr


def test_triton_commands_need_neither_numpy_nor_a_web_framework(tmp_path: Path) -> None:
    """They watch over a server in another environment."""
    code = (
        "import sys\nfrom plansmith.cli import main\n"
        "try:\n    main(['triton', 'status', sys.argv[1]])\nexcept SystemExit:\n    pass\n"
        "heavy = {'numpy', 'cffi', 'fastapi', 'starlette', 'uvicorn', 'torch'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], check=True, capture_output=True)


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


def run_child(*words: object, redirect: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    code = f"exec '{sys.executable}' -c 'from plansmith.cli import main; main()' \"$@\" {redirect}"
    command = ["sh", "-c", code, "sh", *map(str, words)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="the system has no /dev/full")
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_output_to_a_full_disk(engine_dir: Path, flags: tuple[str, ...]) -> None:
    for words in (("inspect", engine_dir), ("generate", engine_dir, "x", "--max-tokens", 2)):
        done = run_child(*words, *flags, redirect=">/dev/full")
        assert (done.returncode, done.stderr) == (
            1,
            "plansmith: standard output: No space left on device; free some space, or write elsewhere\n",
        )


@pytest.mark.parametrize("redirect", [">&-", "<&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_standard_streams(engine_dir: Path, redirect: str) -> None:
    for words in (("inspect", engine_dir), ("generate", engine_dir, "x", "--max-tokens", 2)):
        done = run_child(*words, redirect=redirect)
        assert (done.returncode, done.stderr) == (0, "")
    failed = run_child("inspect", "nowhere", "--json", redirect=redirect)
    assert failed.returncode == 1
    assert not failed.stdout or json.loads(failed.stdout)["error"]["kind"] == "EngineFileError"


def test_a_terminal_without_the_characters(engine_dir: Path) -> None:
    done = run_child("inspect", engine_dir, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "\\u2026" in done.stdout  # the ellipsis behind a hash
    done = run_child("generate", engine_dir, "é", "--json", "--max-tokens", 9, PYTHONIOENCODING="ascii")
    assert done.stdout.isascii() and json.loads(done.stdout)["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("bench", "ENGINE", "--profile-json", ""), "--profile-json"),
        (("bench", "ENGINE", "--profile_plot="), "--profile_plot"),
        (("build", "CHECKPOINT", "-o", ""), "-o"),
        (("build", "CHECKPOINT", "--output_dir="), "--output_dir"),
        (("build", "--checkpoint-dir", ""), "--checkpoint-dir"),
        (("eval", "ENGINE", "--html", ""), "--html"),
        (("generate", "ENGINE", "--input", ""), "--input"),
        (("triton", "start", "--log", ""), None),
    ],
)
def test_an_empty_path_is_a_usage_error(plansmith: Run, words: tuple[str, ...], flag: str | None) -> None:
    """Path("") would be the current directory."""
    result = plansmith(*words, "--json")
    assert result.status == 2
    if flag is not None:
        assert f"{flag} is '': a path is empty" in result.err
    assert json.loads(result.out)["error"]["kind"] == "UsageError"


def test_an_empty_word_elsewhere_is_none(plansmith: Run, tmp_path: Path) -> None:
    result = plansmith("generate", tmp_path, "--prompt", "", "--raw")
    assert "a path is empty" not in result.err
    assert "a path is empty" not in plansmith("build", tmp_path, "--", "-o", "").err


INTERRUPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
from plansmith.cli import main
main(["inspect", sys.argv[2]])
"""


@pytest.mark.parametrize(
    "module",
    [
        "plansmith.cli._app",
        "typer",
        "plansmith.runtime.errors",
        "plansmith.cli.inspect",
        "plansmith.runtime.manifest",
    ],
)
def test_interrupted_in_an_import(engine_dir: Path, module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, module, str(engine_dir)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "plansmith: interrupted\n")
