"""One server for all tests of clients: the five models of a repository as it is written for a user, and some others."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from plansmith.builder.build import build_engine, plan_build
from plansmith.runtime.engine import Engine
from plansmith.runtime.sampling import SamplingParams
from tiny_engines import LIMITS
from tiny_models import make_tiny
from triton_servers import RunningTriton, TritonServers

pytest.importorskip("tritonclient.grpc")
sys.path.insert(0, str(Path(__file__).parent))

BLS = "tensorrt_llm_bls"
Tokens = Callable[..., list[list[int]]]
_SETTINGS = ("num_threads=1", "stream_interval_ms=0", "max_beam_width=4", "cancellation_check_period_ms=20")


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return "target" and "draft", which is the same checkpoint in INT8."""
    folder = tmp_path_factory.mktemp("clients")
    checkpoint = make_tiny("llama", folder / "checkpoint", max_position_embeddings=8192)
    limits = {
        **LIMITS,
        "max_batch_size": 16,
        "max_num_tokens": 128,
        "max_input_len": 1024,
        "max_beam_width": 4,
    }
    limits["max_seq_len"] = 8192
    for name, precision in (("target", "fp32"), ("draft", "int8")):
        build_engine(plan_build(checkpoint, ["cpu"], precision=precision, limits=limits), folder / name)
    return {name: folder / name for name in ("target", "draft")}


def write(engine: Path, out: Path, *arguments: str) -> Path:
    """Write a repository by the command."""
    command = [sys.executable, "-m", "plansmith.cli", "triton-repo", str(engine), "-o", str(out)]
    for setting in _SETTINGS:
        command += ["--set", setting]
    made = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return out


def add_model(models: Path, source: Path, name: str, **replaced: str) -> None:
    """Put a model of another repository beside the others under a name of its own."""
    shutil.copytree(source, models / name)
    config = models / name / "config.pbtxt"
    text = config.read_text().replace(f'name: "{source.name}"', f'name: "{name}"', 1)
    for old, new in replaced.items():
        assert f'"{old}"' in text
        text = text.replace(f'"{old}"', f'"{new}"')
    config.write_text(text)


@pytest.fixture(scope="session")
def models(engines: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository: the five models; the draft's; `..._once`, of the draft's engine and not decoupled; and
    `bls_overwrite`, whose answers have all text so far.
    """
    folder = tmp_path_factory.mktemp("repositories")
    models = write(engines["target"], folder / "models")
    draft = write(engines["draft"], folder / "draft")
    once = write(engines["draft"], folder / "once", "--no-decoupled")
    overwrite = write(engines["target"], folder / "overwrite", "--set", f"{BLS}.accumulate_tokens=true")
    add_model(models, draft / "tensorrt_llm", "tensorrt_llm_draft")
    add_model(models, once / "tensorrt_llm", "tensorrt_llm_once")
    add_model(models, once / "ensemble", "ensemble_once", tensorrt_llm="tensorrt_llm_once")
    add_model(models, overwrite / BLS, "bls_overwrite")
    return models


@pytest.fixture(scope="session")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    servers = TritonServers(tmp_path_factory.mktemp("servers"))
    yield servers(models)
    servers.stop_all()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Show what the server said when a test of it fails."""
    report = yield
    server = getattr(item, "funcargs", {}).get("server")
    if report.failed and isinstance(server, RunningTriton):
        report.sections.append(("tritonserver", server.log()))
    return report


@pytest.fixture(scope="session")
def engine(engines: dict[str, Path]) -> Iterator[Engine]:
    with Engine.open(engines["target"], num_threads=1) as made:
        yield made


def tokens_of(engine: Engine, prompt: str | Sequence[int], max_tokens: int, **params: Any) -> list[list[int]]:
    """Return what an engine in this process makes of a prompt, a list an output."""
    chosen = {"temperature": 0.0, "detokenize": False, "min_tokens": 1, **params}
    asked = prompt if isinstance(prompt, str) else list(prompt)
    (made,) = engine.generate([asked], SamplingParams(max_tokens=max_tokens, **chosen))
    return [list(output.token_ids) for output in made.outputs]


@pytest.fixture(scope="session")
def expected(engine: Engine) -> Tokens:
    """Return `expected(prompt, max_tokens, **params)`, the tokens of the engine itself; greedy unless params say."""
    return lambda prompt, max_tokens, **params: tokens_of(engine, prompt, max_tokens, **params)


@pytest.fixture(scope="session")
def drafted(engines: dict[str, Path]) -> Iterator[Tokens]:
    """Return the same of the draft's engine."""
    with Engine.open(engines["draft"], num_threads=1) as made:
        yield lambda prompt, max_tokens, **params: tokens_of(made, prompt, max_tokens, **params)


@pytest.fixture(scope="session")
def text_of_ids(engine: Engine) -> Callable[[Sequence[int]], str]:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
