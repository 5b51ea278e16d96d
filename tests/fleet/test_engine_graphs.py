"""Lowered graphs of engines: shared while units of them are compiled, and gone behind the last."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from plansmith.fleet.engine_graphs import EngineGraphs


@pytest.fixture
def graphs(tmp_path: Path) -> EngineGraphs:
    return EngineGraphs(tmp_path, threading.Event())


def made(graphs: EngineGraphs, engine: str) -> Path:
    """Write an engine's graph, unless it is there."""

    def write(path: Path) -> None:
        path.write_text(engine)

    return graphs.of(engine).graphs.file("graph", write)


def test_a_graph_goes_with_the_last_unit(graphs: EngineGraphs) -> None:
    for _ in range(2):
        graphs.expect("a")
    graphs.expect("b")
    with graphs.used("a"):
        first = made(graphs, "a")
    assert first.read_text() == "a"
    with graphs.used("b"):
        other = made(graphs, "b")
        assert other != first
    assert first.exists() and not other.exists()
    with graphs.used("a"):
        assert made(graphs, "a") == first
    assert not first.exists()


def test_a_unit_that_fails_is_done_with(graphs: EngineGraphs) -> None:
    graphs.expect("a")
    with pytest.raises(OSError, match="broken"), graphs.used("a"):
        path = made(graphs, "a")
        raise OSError("broken")
    assert not path.exists()


def test_all_share_one_wish_to_stop(tmp_path: Path) -> None:
    stop = threading.Event()
    graphs = EngineGraphs(tmp_path, stop)
    assert graphs.of("a").stop is stop and graphs.of("b").stop is stop
    assert graphs.of("a") is graphs.of("a")
