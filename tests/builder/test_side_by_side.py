"""Graphs that builds share: each written once, by whoever asks first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from plansmith.builder.side_by_side import SharedGraphs


def writes(text: str) -> Callable[[Path], None]:
    """Return what writes a graph that holds a text."""

    def write(path: Path) -> None:
        path.write_text(text)

    return write


def test_many_ask_at_once_and_one_writes(tmp_path: Path) -> None:
    graphs, written = SharedGraphs(tmp_path / "graphs"), list[str]()
    start = threading.Barrier(8)

    def ask(name: str) -> str:
        def write(path: Path) -> None:
            written.append(name)
            path.write_text(name)

        start.wait()
        return graphs.file(name, write).read_text()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, ["a", "b"] * 4)) == ["a", "b"] * 4
    assert sorted(written) == ["a", "b"]


def test_a_graph_that_could_not_be_written_is_tried_again(tmp_path: Path) -> None:
    graphs = SharedGraphs(tmp_path)

    def breaks(path: Path) -> None:
        path.write_text("half")
        (path.parent / "weights").write_text("half")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        graphs.file("a", breaks)
    assert list(tmp_path.iterdir()) == []
    assert graphs.file("a", writes("whole")).read_text() == "whole"


def test_two_graphs_are_written_side_by_side(tmp_path: Path) -> None:
    """A large one holds up nobody who wants another."""
    graphs, other_is_done = SharedGraphs(tmp_path), threading.Event()

    def slow(path: Path) -> None:
        assert other_is_done.wait(60)
        path.write_text("slow")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(graphs.file, "slow", slow)
        graphs.file("quick", writes("quick"))
        other_is_done.set()
        assert waiting.result().read_text() == "slow"


def test_what_is_dropped_is_written_again(tmp_path: Path) -> None:
    graphs, written = SharedGraphs(tmp_path / "graphs"), list[Path]()

    def write(path: Path) -> None:
        written.append(path)
        path.write_text("graph")

    graphs.drop_all()  # there is nothing yet
    graphs.file("a", write)
    graphs.drop_all()
    assert list((tmp_path / "graphs").iterdir()) == []
    graphs.file("a", write)
    assert len(written) == 2
