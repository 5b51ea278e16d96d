"""docs/migration.md: its commands run as they stand, its tables are the code's, its links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import migration_tables
import pytest
from manifests import known_options
from old_repos import FILLED, write_old
from triton_servers import find_install

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "migration.md"
_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.M | re.S)


@pytest.fixture
def migration(
    tiny_checkpoint: Callable[[str], Path], environ: dict[str, str], tmp_path: Path
) -> Iterator[dict[str, str]]:
    """Return the environment of the page's commands; ends the server that they leave."""
    find_install()
    checkpoint = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    triton_env = os.environ.get("PLANSMITH_TRITON_ENV") or str(ROOT / ".venv-triton")
    made = environ | {
        "CHECKPOINT": str(checkpoint),
        "OLD_REPO": str(write_old(tmp_path / "old", FILLED)),
        "TRITON_ENV": triton_env,
    }
    yield made
    subprocess.run(["plansmith", "triton", "stop", "repo", "--force"], env=made, cwd=tmp_path, check=False)


def test_the_commands_run_as_they_stand(migration: dict[str, str], tmp_path: Path) -> None:
    blocks = _BLOCK.findall(PAGE.read_text())
    assert [kind for kind, _ in blocks] == ["sh", "sh", "sh", "sh", "python", "sh"]
    outputs = []
    ports = {}
    for kind, text in blocks:
        if "plansmith triton start" in text:  # the ports of the page may be taken here
            text = text.replace("triton start", "triton start --http-port 0 --grpc-port 0 --metrics-port 0")
        for port, real in ports.items():
            text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{real}")
        words = ["bash", "-euo", "pipefail", "-c", text] if kind == "sh" else [sys.executable, "-c", text]
        done = subprocess.run(
            words, env=migration, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, text + done.stdout + done.stderr
        outputs.append(done.stdout + done.stderr)
        if "plansmith triton start" in text:
            shown = ["plansmith", "triton", "status", "repo", "--json"]
            state = json.loads(
                subprocess.run(shown, env=migration, cwd=tmp_path, capture_output=True, check=True).stdout
            )
            ports = {8000: state["http_port"], 8001: state["grpc_port"], 8002: state["metrics_port"]}
    build, carried, started, called, stopped_by_id, stopped = outputs
    assert "--gemm_plugin auto is ignored" in build
    for line in (
        "carried max_batch_size = 8",
        "changed gpt_model_path",
        "kv_cache_free_gpu_mem_fraction = 0.85",
    ):
        assert line in carried
    assert "ensemble: ready" in started
    assert called.count('"text_output"') >= 2 and "nv_trt_llm_request_metrics{" in called
    found = re.search(r"(\d+) tokens, finish reason (\d)", stopped_by_id)
    assert found is not None and int(found[1]) < 2000 and found[2] == "5", stopped_by_id
    assert "stopped" in stopped


def test_the_tables_are_those_of_the_code() -> None:
    assert migration_tables.main(["--check", str(PAGE)]) == 0, (
        "run tools/migration_tables.py docs/migration.md"
    )
    names = re.findall(r"<!-- table (\w+) -->", PAGE.read_text())
    assert sorted(names) == sorted(migration_tables.TABLES)


def test_a_table_that_is_out_of_date_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    text = PAGE.read_text()
    page.write_text(text.replace("| `max_beam_width` | `1` |", "| `max_beam_width` | `2` |"))
    assert page.read_text() != text
    assert migration_tables.main(["--check", str(page)]) == 1
    assert "-| `max_beam_width` | `2` |" in capsys.readouterr().out
    assert migration_tables.main([str(page)]) == 0 and page.read_text() == text


@pytest.mark.parametrize("page", ["docs/migration.md", "docs/scaling.md", "deploy/README.md", "README.md"])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", path.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        linked = (path.parent / target).resolve() if target else path
        assert linked.exists(), f"{page}: {target}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in heads}
            assert anchor in anchors, f"{page}: {target}#{anchor}"


@pytest.mark.parametrize(
    "page", ["docs/migration.md", "docs/scaling.md", "docs/triton.md", "docs/openai.md", "deploy/README.md"]
)
def test_options_of_commands_on_the_page_exist(page: str, environ: dict[str, str]) -> None:
    text = (ROOT / page).read_text().replace("\\\n", " ")
    found = re.findall(
        r"plansmith (triton start|triton stop|triton status|triton-repo|serve|verify|inspect)\b([^\n`|]*)",
        text,
    )
    assert found
    for command, rest in found:
        options = known_options(command, environ)
        for option in re.findall(r"(?<![\w=-])--[a-z][a-z_-]*", rest):
            assert option.replace("_", "-") in options, f"{page}: plansmith {command} has no {option}"
