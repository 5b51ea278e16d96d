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
    printed = json.loads(capsys.readouterr().out)
    assert not exit_.value.code
    if command == "generate":
        assert len(printed["token_ids"]) == printed["usage"]["completion_tokens"] == 3
    else:
        assert printed["target"] == "sm89" and printed["generated_tokens"] == 6
    assert machine.cuda.calls.counts["cuMemcpyHtoDAsync"] > 0
    assert machine.problems() == []
