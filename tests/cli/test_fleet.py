"""plansmith fleet plan, status and matrix, as they are typed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fleet_records import put
from plansmith.fleet.fleet_file import read_fleet
from plansmith.fleet.store.local import LocalStore
from plansmith.fleet.units import units_of

Run = Callable[..., Any]

TEXT = """\
version: 1
name: chat
limits: {max_batch_size: 4, max_num_tokens: 64, max_seq_len: 128}
models:
  tiny: {checkpoint: CHECKPOINT}
recipes:
  int8: {gate: "kl<=0.05"}
skus:
  cpu:
  l4:
"""


@pytest.fixture
def folder(tmp_path: Path, tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a fleet file, which is the current one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user_cache"))
    place = tmp_path / "fleet"
    place.mkdir()
    (place / "plansmith.yaml").write_text(TEXT.replace("CHECKPOINT", str(tiny_checkpoint("llama"))))
    monkeypatch.chdir(place)
    return place


def build_all(folder: Path) -> None:
    """Note in the fleet's store that everything was built, and measured."""
    from plansmith.builder.build_key import inputs_key
    from plansmith.fleet.store.record import Record

    fleet = read_fleet(folder)
    store = LocalStore(Path(fleet.store))
    for unit in units_of(fleet):
        put(store, unit)
        bounds = [{"metric": "kl", "compare": "<=", "wanted": 0.05, "got": 0.0123456, "passed": True}]
        content = {"gate": {"passed": True, "bounds": bounds}}
        key = inputs_key(unit.gate_inputs)
        store.put_record(Record(key, "gate", dict(unit.gate_inputs), (), content, {}))


def test_plan(plansmith: Run, folder: Path) -> None:
    result = plansmith("fleet", "plan")
    assert result.status == 0, result.err
    assert "tiny/int8/sm89" in result.out and "new" in result.out
    assert "chat: 2 units, 0 in the store, to build: 2 here, 0 on a runner; 0 cannot be built" in result.out
    assert not (folder / ".plansmith").exists()
    build_all(folder)
    result = plansmith("fleet", "plan", "--only", "*/l4")
    assert "in the store" in result.out
    assert "chat: 1 unit, 1 in the store" in result.out


def test_plan_as_json(plansmith: Run, folder: Path) -> None:
    report = json.loads(plansmith("fleet", "plan", "--json", "-f", folder).out)
    assert report["summary"] == {"kept": 0, "here": 2, "runner": 0, "nowhere": 0, "gates": 0}
    assert report["store"] == str(folder / ".plansmith/store")
    unit = report["units"][1]
    assert (unit["unit"], unit["members"], unit["action"], unit["why"]) == (
        "tiny/int8/sm89",
        ["tiny/int8/l4"],
        "build",
        ["new"],
    )
    assert len(unit["key"]) == 64 and len(unit["checkpoint"]["fingerprint"]) == 64


def test_shards_are_the_whole(plansmith: Run, folder: Path) -> None:
    names = [
        one["unit"]
        for part in ("1/2", "2/2")
        for one in json.loads(plansmith("fleet", "plan", "--json", "--shard", part).out)["units"]
    ]
    assert sorted(names) == ["tiny/int8/cpu", "tiny/int8/sm89"]
    result = plansmith("fleet", "plan", "--shard", "3/2")
    assert result.status == 1 and "--shard is '3/2'" in result.err


def test_status(plansmith: Run, folder: Path) -> None:
    result = plansmith("fleet", "status")
    assert result.status == 1
    assert "missing" in result.out and "gate of tiny-int8: not measured" in result.out
    build_all(folder)
    result = plansmith("fleet", "status")
    assert result.status == 0, result.out
    assert "gate of tiny-int8: passed: kl is 0.01235, wanted <= 0.05" in result.out
    assert "chat: 2 of 2 members are current" in result.out
    file = folder / "plansmith.yaml"
    file.write_text(file.read_text().replace("max_batch_size: 4", "max_batch_size: 8").replace("  l4:\n", ""))
    result = plansmith("fleet", "status")
    assert result.status == 1
    assert "limits.max_batch_size: 4 -> 8" in result.out
    assert "orphan: tiny/int8/l4 is in the store and not in the file" in result.out
    report = json.loads(plansmith("fleet", "status", "--json").out)
    assert report["is_true"] is False and report["orphans"] == ["tiny/int8/l4"]
    assert report["members"][0]["changes"][0] == {"input": "limits.max_batch_size", "old": "4", "new": "8"}


def test_another_store(plansmith: Run, folder: Path) -> None:
    build_all(folder)
    (folder / ".plansmith/store").rename(folder / "elsewhere")
    assert plansmith("fleet", "status").status == 1
    assert plansmith("fleet", "status", "--store", "elsewhere").status == 0
    url = f"file://{folder}/elsewhere"
    assert plansmith("fleet", "status", "--remote", url).status == 0
    result = plansmith("fleet", "status", "--store", url)
    assert result.status == 1 and f"give --remote {url}" in result.err
    result = plansmith("fleet", "status", "--store", folder)  # which holds other things
    assert result.status == 1 and "is no store" in result.err
    result = plansmith("fleet", "status", "--store", folder / "plansmith.yaml")
    assert result.status == 1 and "is a file, a store is a folder" in result.err


def test_a_remote_store_is_what_counts(plansmith: Run, folder: Path) -> None:
    """Status and the matrix are of what other machines get; a plan also of what is here."""
    build_all(folder)  # into the folder of this machine
    file = folder / "plansmith.yaml"
    file.write_text(file.read_text() + f"store: file://{folder}/shared\n")
    assert plansmith("fleet", "status").status == 1
    assert len(json.loads(plansmith("fleet", "matrix").out)["include"]) == 2
    assert json.loads(plansmith("fleet", "plan", "--json").out)["summary"]["kept"] == 2
    (folder / ".plansmith/store").rename(folder / "shared")
    assert plansmith("fleet", "status").status == 0
    assert json.loads(plansmith("fleet", "matrix").out) == {"include": []}
    assert json.loads(plansmith("fleet", "plan", "--json").out)["summary"]["kept"] == 2
    assert not (folder / ".plansmith/store").exists()


def test_trust(plansmith: Run, folder: Path) -> None:
    build_all(folder)
    file = folder / "plansmith.yaml"
    file.write_text(file.read_text() + "trust: ['ed25519:AAAA']\n")
    result = plansmith("fleet", "status")
    assert result.status == 1 and "'ed25519:AAAA' is no public key" in result.err
    from plansmith.fleet.store.signing import make_key

    key = make_key(folder / "key.pem")
    file.write_text(file.read_text().replace("ed25519:AAAA", key))
    assert [one["status"] for one in json.loads(plansmith("fleet", "status", "--json").out)["members"]] == [
        "lost",
        "lost",
    ]


def test_matrix(plansmith: Run, folder: Path) -> None:
    result = plansmith("fleet", "matrix", "--github-output", folder / "out")
    assert result.status == 0, result.err
    assert result.out.count("\n") == 1
    assert [one["only"] for one in json.loads(result.out)["include"]] == ["tiny/int8/cpu", "tiny/int8/sm89"]
    assert (folder / "out").read_text().startswith("any=true\nmatrix={")
    pipeline = json.loads(plansmith("fleet", "matrix", "--format", "gitlab", "--only", "*/cpu").out)
    assert pipeline["tiny/int8/cpu"]["script"] == [
        "plansmith fleet build --file plansmith.yaml --only tiny/int8/cpu --complete"
    ]
    url = f"file://{folder}/shared"
    pipeline = json.loads(plansmith("fleet", "matrix", "--format", "gitlab", "--remote", url).out)
    assert pipeline["tiny/int8/cpu"]["script"][0].endswith(f"--push --no-assemble --remote {url}")
    build_all(folder)
    result = plansmith("fleet", "matrix", "--github-output", folder / "out")
    assert json.loads(result.out) == {"include": []}
    assert (folder / "out").read_text().endswith('any=false\nmatrix={"include":[]}\n')  # appended
    assert len(json.loads(plansmith("fleet", "matrix", "--all", "--max-jobs", 1).out)["include"]) == 1


def test_errors(plansmith: Run, folder: Path) -> None:
    result = plansmith("fleet", "plan", "-f", "other.yaml")
    assert (result.status, result.err) == (
        1,
        "plansmith: other.yaml is missing; write one, or name yours with -f (see docs/fleet.md)\n",
    )
    result = plansmith("fleet", "plan", "--only", "big/*")
    assert result.status == 1 and "matches no unit and no member" in result.err
    result = plansmith("fleet", "matrix", "--format", "jenkins")
    assert result.status == 2 and "jenkins" in result.err
    result = plansmith("fleet", "matrix", "--github-output", folder / "no" / "out")
    assert result.status == 1 and "--github-output" in result.err


@pytest.fixture
def pinned(folder: Path, tiny_checkpoint: Callable[[str], Path], plansmith: Run) -> Path:
    """Return the folder with a checkpoint of its own, whose revision the file has."""
    shutil.copytree(tiny_checkpoint("llama"), folder / "tiny")
    report = json.loads(plansmith("fleet", "plan", "--json").out)
    revision = report["units"][0]["checkpoint"]["fingerprint"]
    file = folder / "plansmith.yaml"
    file.write_text(file.read_text().replace(str(tiny_checkpoint("llama")), f"tiny, revision: '{revision}'"))
    return folder


def outputs(plansmith: Run, *arguments: object) -> list[tuple[int, str]]:
    """Return what the three commands say."""
    found = []
    for words in (("plan",), ("plan", "--json"), ("status",), ("status", "--json"), ("matrix",)):
        done = plansmith("fleet", *words, *arguments)
        found.append((done.status, done.out))
    return found


def test_without_weights(plansmith: Run, pinned: Path) -> None:
    """Once the fleet is pushed, a machine with the file alone says what one with the checkpoint says."""
    build_all(pinned)
    shared = f"file://{pinned}/shared"
    assert plansmith("fleet", "push", "--remote", shared).status == 0
    with_weights = outputs(plansmith, "--remote", shared)
    shutil.rmtree(pinned / "tiny")
    shutil.rmtree(pinned / ".plansmith")
    assert outputs(plansmith, "--remote", shared) == [
        (status, out.replace('"missing_weights": ""', '"missing_weights": "it does not exist"'))
        for status, out in with_weights
    ]
    assert with_weights[-1] == (0, '{"include": []}\n')
    assert not (pinned / ".plansmith").exists()


def test_a_push_of_nothing_else(plansmith: Run, pinned: Path) -> None:
    """As that error says: from a folder where nothing was ever built."""
    shared = f"file://{pinned}/shared"
    before = outputs(plansmith, "--remote", shared)
    result = plansmith("fleet", "push", "--remote", shared)
    assert result.status == 0, result.err
    assert "pushed 1 records" in result.out and "not built here: tiny/int8/cpu, tiny/int8/sm89" in result.out
    shutil.rmtree(pinned / "tiny")
    shutil.rmtree(pinned / ".plansmith")
    (status, out), *_ = outputs(plansmith, "--remote", shared)
    assert (status, out.splitlines()[:-1]) == (before[0][0], before[0][1].splitlines())
    assert "to be fetched before anything is built of it here (it does not exist" in out.splitlines()[-1]


def test_what_to_fetch(plansmith: Run, pinned: Path) -> None:
    """A plan says it of what would be compiled here, each checkpoint once; a build says it of every unit."""
    result = plansmith("fleet", "plan")
    assert "to be fetched" not in result.out
    (pinned / "tiny").rename(pinned / "away")
    result = plansmith("fleet", "plan")
    assert result.status == 1
    assert result.err.startswith("plansmith: plansmith.yaml:5: the weights of ")
    assert "or run `plansmith fleet build` or `plansmith fleet push` once where it is" in result.err
    (pinned / "away").rename(pinned / "tiny")
    assert plansmith("fleet", "build", "--only", "*/cpu", "--no-assemble").status == 0
    shutil.rmtree(pinned / "tiny")
    result = plansmith("fleet", "plan", "--only", "*/cpu")
    assert result.status == 0 and "to be fetched" not in result.out
    result = plansmith("fleet", "plan")
    assert result.status == 0
    assert (
        result.out.count(f"{pinned / 'tiny'}: to be fetched before anything is built of it here (it does")
        == 1
    )
    result = plansmith("fleet", "build", "--no-assemble")
    assert result.status == 1
    assert "fetch the checkpoint of revision" in result.out and "kept" in result.out


def test_a_build_opens_no_other_checkpoints(plansmith: Run, pinned: Path) -> None:
    """Who builds some units needs the weights of these alone, also where their engine is assembled."""
    file = pinned / "plansmith.yaml"
    file.write_text(file.read_text().replace("recipes:", "  other: {checkpoint: nowhere}\nrecipes:"))
    file.write_text(file.read_text().replace('int8: {gate: "kl<=0.05"}', "int8:"))
    result = plansmith("fleet", "build", "--only", "tiny/*/cpu")
    assert result.status == 0, result.err
    assert plansmith("fleet", "build").status == 1


def test_the_fleets_modules_load_no_graph() -> None:
    """Its library takes longest to import, and a fleet that is current needs none of it."""
    code = (
        "import sys\n"
        "from plansmith.fleet.fleet_file import read_fleet\n"
        "from plansmith.fleet import compare, plan, status, matrix, units\n"
        "assert 'onnx_ir' not in sys.modules and 'torch' not in sys.modules\n"
        "assert 'plansmith.fleet.store' not in sys.modules\n"  # which only what asks a store needs
    )
    subprocess.run([sys.executable, "-c", code], check=True)
