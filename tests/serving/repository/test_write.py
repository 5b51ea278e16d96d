"""A repository is there whole or not at all, and nothing that is not ours is replaced."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from old_repos import write_old
from plansmith.runtime.errors import InvalidArgumentError, UnsupportedError
from plansmith.serving.repository.plan import Overrides, make_plan, read_assignments
from plansmith.serving.repository.write import MARKER, write_repository


def write(engine_dir: Path, out: Path, *, force: bool = False, **variables: str) -> list[str]:
    return write_repository(make_plan(engine_dir, out, Overrides(dict(variables))), out, force=force)


def test_what_is_written(engine_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "repo"
    files = write(engine_dir, out)
    assert sorted(files) == [
        "ensemble/1/.keep",
        "ensemble/config.pbtxt",
        *(
            f"{model}/{name}"
            for model in ("postprocessing", "preprocessing", "tensorrt_llm", "tensorrt_llm_bls")
            for name in ("1/model.py", "config.pbtxt")
        ),
    ]
    marker = json.loads((out / MARKER).read_text())
    assert marker["engine_dir"] == str(engine_dir) and marker["files"].keys() == set(files)
    assert [one.name for one in out.parent.iterdir()] == ["repo"]  # no lock, no work directory


def test_ours_is_renewed_but_not_over_changes(engine_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "repo"
    write(engine_dir, out)
    (out / "ensemble" / "1" / "__pycache__").mkdir()  # the server's
    (out / "ensemble" / "1" / "__pycache__" / "x.pyc").touch()
    write(engine_dir, out, triton_max_batch_size="3")
    assert "max_batch_size: 3" in (out / "ensemble" / "config.pbtxt").read_text()

    def change(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    for name in ("ensemble/config.pbtxt", "reranker/config.pbtxt", MARKER):
        change(out / name, "{}")
        with pytest.raises(
            InvalidArgumentError, match=rf"was changed.*{name.split('.')[0]}.*--from .*--force"
        ):
            write(engine_dir, out)
        assert (out / name).read_text() == "{}"
        write(engine_dir, out, force=True)
    (out / "tensorrt_llm" / "1" / "model.py").unlink()
    with pytest.raises(InvalidArgumentError, match=r"tensorrt_llm/1/model\.py"):
        write(engine_dir, out)


def test_a_foreign_directory_is_replaced_only_as_a_repository_and_by_force(
    engine_dir: Path, tmp_path: Path
) -> None:
    old = write_old(tmp_path / "old")
    with pytest.raises(InvalidArgumentError, match=r"not made here.*--force"):
        write(engine_dir, old)
    write(engine_dir, old, force=True)
    assert (old / MARKER).is_file()

    home = tmp_path / "home"
    (home / "documents").mkdir(parents=True)
    (home / "documents" / "letter").touch()
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "todo").touch()
    mixed = write_old(tmp_path / "mixed")
    (mixed / "documents").mkdir()
    for place in (home, notes, mixed, notes / "todo"):
        for force in (False, True):
            with pytest.raises(InvalidArgumentError, match=r"not replaced|is a file"):
                write(engine_dir, place, force=force)
    assert (home / "documents" / "letter").exists() and (notes / "todo").exists()


def test_an_engine_inside_is_not_replaced_with_it(engine_dir: Path) -> None:
    for out in (engine_dir, engine_dir.parent):
        with pytest.raises(InvalidArgumentError, match=r"the engine .* lies in it"):
            write(engine_dir, out, force=True)


def test_an_empty_directory_is_used(engine_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(engine_dir, tmp_path / "empty")


LOOP = """
import sys
from pathlib import Path
from plansmith.serving.repository.plan import Overrides, make_plan
from plansmith.serving.repository.write import write_repository
engine, out = map(Path, sys.argv[1:])
for size in range(1, 10**6):
    plan = make_plan(engine, out, Overrides({"triton_max_batch_size": str(size)}))
    write_repository(plan, out)
    print(size, flush=True)
"""


def test_a_killed_run_leaves_a_whole_repository(engine_dir: Path, tmp_path: Path) -> None:
    chance = random.Random(5)
    out = tmp_path / "repo"
    write(engine_dir, out)
    for _ in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", LOOP, str(engine_dir), str(out)], stdout=subprocess.PIPE, env=os.environ
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(chance.random() * 0.2)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        sizes = {
            line
            for path in out.glob("*/config.pbtxt")
            for line in path.read_text().splitlines()
            if line.startswith("max_batch_size")
        }
        assert len(sizes) == 1
        write(engine_dir, out)  # also: it is as its marker says, and nothing blocks it
    assert [one.name for one in tmp_path.iterdir()] == ["repo"]


def test_paths(engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "repo"
    plan = make_plan(engine_dir, out, Overrides(), relative=True)
    relative = plan.parameters("tensorrt_llm")["gpt_model_path"]
    assert relative.startswith("../")
    assert Path(os.path.normpath(out / relative)) == engine_dir
    monkeypatch.chdir(engine_dir.parent)
    absolute = make_plan(Path(engine_dir.name), out, Overrides())
    assert absolute.parameters("preprocessing")["tokenizer_dir"] == f"{engine_dir}/tokenizer"
    link = tmp_path / "current"
    link.symlink_to(engine_dir)
    assert make_plan(link, out, Overrides()).parameters("tensorrt_llm")["gpt_model_path"] == str(link)


def test_a_tokenizer_is_needed(engine_dir: Path, tmp_path: Path) -> None:
    bare = tmp_path / "engine"
    bare.mkdir()
    (bare / "manifest.json").write_bytes((engine_dir / "manifest.json").read_bytes())
    with pytest.raises(UnsupportedError, match=r"has no tokenizer.*--tokenizer-dir"):
        make_plan(bare, tmp_path / "repo", Overrides())
    with pytest.raises(InvalidArgumentError, match=r"has no tokenizer\.json"):
        make_plan(bare, tmp_path / "repo", Overrides(), tokenizer_dir=tmp_path)
    for given in (engine_dir / "tokenizer", engine_dir):
        plan = make_plan(bare, tmp_path / "repo", Overrides(), tokenizer_dir=given)
        for model in ("preprocessing", "postprocessing", "tensorrt_llm_bls"):
            assert plan.parameters(model)["tokenizer_dir"] == f"{engine_dir}/tokenizer"


def test_assignments() -> None:
    assert read_assignments(
        ["num_threads=4", "preprocessing.mine= a=b ", "tensorrt_llm.enable_block_reuse=false"]
    ) == {
        ("tensorrt_llm", "num_threads"): "4",
        ("preprocessing", "mine"): " a=b ",
        ("tensorrt_llm", "enable_kv_cache_reuse"): "false",
    }
    for text, says in (
        ("num_threads", "is no MODEL.KEY=VALUE"),
        ("=4", "is no MODEL.KEY=VALUE"),
        ("nobody.x=1", "the models are"),
        ("num_thread=4", "did you mean num_threads"),
        ("num_threads=many", "num_threads is 'many', it must be"),
        ("postprocessing.skip_special_token=1", "did you mean skip_special_tokens"),
        ("tokenizer_dir=/x", "give --tokenizer-dir"),
        ("gpt_model_path=/x", "follows from ENGINE_DIR"),
    ):
        with pytest.raises(InvalidArgumentError, match=says):
            read_assignments([text])
