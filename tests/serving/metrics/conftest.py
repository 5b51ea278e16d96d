"""A tiny engine, and a real tritonserver whose model shows that engine's metrics."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from triton_servers import RunningTriton, TritonServers

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "runtime"))  # the fake executor


@pytest.fixture(scope="session")
def engine_dir(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the engine directory of a tiny Llama."""
    from tiny_engines import build_tiny

    return build_tiny(tiny_checkpoint("llama"), tmp_path_factory.mktemp("metrics") / "engine")


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServers]:
    """Return a maker of servers, which all end with the session."""
    made = TritonServers(tmp_path_factory.mktemp("servers"))
    yield made
    made.stop_all()


@pytest.fixture(scope="session")
def repository(engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the repository of `triton`."""
    from metrics_model import make_repository

    return make_repository(tmp_path_factory.mktemp("models"), engine_dir)


@pytest.fixture(scope="session")
def triton(servers: TritonServers, repository: Path) -> RunningTriton:
    """Return a server with the model `engine`, for all tests: what they count, they count from where it was."""
    return servers(repository, ["engine"])
