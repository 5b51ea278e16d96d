"""The commands that run an engine, on a GPU target: what they print is JSON and says what was open."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fake_machine import Machine
from plansmith.cli import main


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "hello", "--max-tokens", "3", "--ignore-eos", "--kv-cache-bytes", "1048576"),
        ("bench", "--requests", "2", "--input-len", "4", "--output-len", "3", "--warmup", "0"),
    ],
)
def test_commands_on_a_gpu_target(
    rtx_engine: Callable[..., Any], capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    built = rtx_engine()
    machine = Machine(built, total_bytes=64 << 20)
    command, *rest = words
    with machine.installed(), pytest.raises(SystemExit) as exit_:
        main([command, str(built.path), *rest, "--target", "auto", "--json"])
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert not exit_.value.code
    name = machine.cuda.cuDeviceGetName(64, 0)[1].decode().rstrip("\0")
    assert f"plansmith: target auto is sm89, on {name}" in err
    if command == "generate":
        assert len(printed["token_ids"]) == printed["usage"]["completion_tokens"] == 3
    else:
        assert printed["generated_tokens"] == 6
    assert printed["target"] == "sm89"
    assert machine.cuda.calls.counts["cuMemcpyHtoDAsync"] > 0
    assert machine.problems() == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--device", "0"),
            "--device 0 is of GPU targets, and the target is cpu; give --target auto or a GPU target",
        ),
        (("--cuda-graphs", "off"), "--cuda-graphs off is of GPU targets, and the target is cpu"),
        (("--device", "0", "--cuda-graphs", "own"), "--device 0 and --cuda-graphs own are of GPU targets"),
        (("--target", "auto", "--device", "7"), "device '7' is not there; choose one of 0:"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "bench", "serve"])
def test_what_is_asked_of_a_gpu_is_not_lost(
    rtx_engine: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    command: str,
    flags: tuple[str, ...],
    words: str,
) -> None:
    built = rtx_engine()
    rest = {"generate": ["hello"], "serve": ["--port", "0"]}.get(command, [])
    with Machine(built).installed(), pytest.raises(SystemExit) as exit_:
        main([command, str(built.path), *rest, *flags])
    assert exit_.value.code == 1 and words in capsys.readouterr().err


def test_auto_with_a_device_that_runs_no_target_is_refused(
    rtx_engine: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    built = rtx_engine()
    with Machine(built, sm=(7, 5)).installed(), pytest.raises(SystemExit) as exit_:
        main(["generate", str(built.path), "hello", "--target", "auto", "--device", "0"])
    assert exit_.value.code == 1
    said = capsys.readouterr().err
    assert "no GPU target of" in said and "give --target sm89 to be told why" in said
