"""The tests' own tritonserver answers, over a trivial model."""

from __future__ import annotations

from pathlib import Path

from tiny_triton import make_repository
from triton_servers import TritonServers


def test_a_model_and_an_ensemble_answer(triton_server: TritonServers, tmp_path: Path) -> None:
    server = triton_server(make_repository(tmp_path / "models"), fresh=True)
    assert server.api.generate("counter", {"COUNT": 1}, 10)["INDEX"] == 0
    assert server.api.generate("all", {"COUNT": 2}, 10)["INDEX"] == 0
    assert "nv_inference_request_success" in server.api.metrics(5)
    assert server.log(500).count("successfully loaded 'counter'") == 1  # not again for the ensemble
    assert triton_server.stop(server) == 0
