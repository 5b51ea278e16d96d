"""A real tritonserver for tests: `triton_server(repository)`; see tests/triton_servers.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from plansmith.builder.build import build_engine, plan_build
from tiny_engines import LIMITS
from tiny_models import make_tiny
from triton_servers import TritonServers


@pytest.fixture(scope="session")
def triton_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServers]:
    """Return `triton_server(repository, models=(), environ=..., arguments=..., fresh=False)` -> RunningTriton.

    One server a repository is shared by the session. All are drained at its end, and nothing of them may be left.
    """
    servers = TritonServers(tmp_path_factory.mktemp("triton"))
    yield servers
    servers.stop_all()


@pytest.fixture(scope="session")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny engine whose texts are long enough to be stopped in the middle; do not change its files."""
    folder = tmp_path_factory.mktemp("long_engine")
    checkpoint = make_tiny("llama", folder / "checkpoint", max_position_embeddings=8192)
    limits = {**LIMITS, "max_beam_width": 2, "max_seq_len": 8192}
    build_engine(plan_build(checkpoint, ["cpu"], precision="fp32", limits=limits), folder / "engine")
    return folder / "engine"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Show what the servers said when a test of them fails."""
    report = yield
    servers = getattr(item, "funcargs", {}).get("triton_server")
    if report.failed and isinstance(servers, TritonServers):
        report.sections.append(("tritonserver", servers.logs()))
    return report
