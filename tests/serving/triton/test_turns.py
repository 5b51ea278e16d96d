"""Counters of answers that were read, between two models: right across processes, and no file of anyone else's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from plansmith.runtime.errors import InvalidArgumentError, QueueFullError
from plansmith.serving.triton import turns
from plansmith.serving.triton.turns import TurnBoard, TurnReader


def test_a_reader_sees_what_a_caller_has_read() -> None:
    board = TurnBoard(4)
    try:
        first, second = board.take(), board.take()
        reader = TurnReader()
        read_first, read_second = reader.open(first.address), reader.open(second.address)
        assert (read_first(), read_second()) == (0, 0)
        first.has_read()
        first.has_read()
        second.has_read()
        assert (read_first(), read_second()) == (2, 1)
        first.release()
        again = board.take()
        assert again.address == first.address and reader.open(again.address)() == 0
    finally:
        board.close()
    again.has_read()
    assert read_first() == 1, "a file that is open outlives its name"


def test_another_process_sees_it() -> None:
    board = TurnBoard(2)
    try:
        turn = board.take()
        turn.has_read()
        code = "import sys, plansmith.serving.triton.turns as t; print(t.TurnReader().open(sys.argv[1])())"
        told = subprocess.run(
            [sys.executable, "-c", code, turn.address], capture_output=True, text=True, check=True
        )
        assert told.stdout.strip() == "1"
    finally:
        board.close()


def test_more_calls_than_places_are_refused() -> None:
    board = TurnBoard(2)
    try:
        held = [board.take(), board.take()]
        with pytest.raises(QueueFullError, match="2 calls are running"):
            board.take()
        held[0].release()
        board.take()
    finally:
        board.close()
    board.close()


@pytest.mark.parametrize(
    "address",
    [5, None, "", "/etc/passwd:0", "../x:0", "plansmithturns-1-00:0", "plansmithturns-1-" + "0" * 32 + ":-1"],
)
def test_what_no_caller_gives_is_refused(address: object) -> None:
    with pytest.raises(InvalidArgumentError, match="the parameter turn"):
        TurnReader().open(address)


def test_files_of_other_kinds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "folder", lambda: tmp_path)
    name = "plansmithturns-1-" + "0" * 32
    with pytest.raises(InvalidArgumentError, match="No such file"):
        TurnReader().open(f"{name}:0")
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(InvalidArgumentError, match="no file of counters"):
        TurnReader().open(f"{name}:0")
    (tmp_path / name).unlink()
    (tmp_path / "secret").write_bytes(b"12345678")
    (tmp_path / name).symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidArgumentError, match="names no file"):
        TurnReader().open(f"{name}:0")
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(InvalidArgumentError, match="no file of counters"):
        TurnReader().open(f"{name}:0")
    (tmp_path / name).unlink()
    (tmp_path / name).write_bytes(b"\1\0\0\0")
    assert TurnReader().open(f"{name}:0")() == 1
    with pytest.raises(InvalidArgumentError, match="no place 1"):
        TurnReader().open(f"{name}:1")
