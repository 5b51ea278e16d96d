"""plansmith fleet push, pull, gc, verify and keygen, as they are typed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_fleets import TinyFleet, generated, names

Run = Callable[..., Any]
TWO = {"a": "llama", "b": "qwen3"}


@pytest.fixture
def fleet(
    tmp_path: Path, tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> TinyFleet:
    """Return a fleet whose store is shared, built; its folder is the current one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user_cache"))
    made = TinyFleet(tmp_path / "fleet", {name: tiny_checkpoint(family) for name, family in TWO.items()})
    made.edit("limits:", f"store: file://{tmp_path}/remote\nlimits:")
    monkeypatch.chdir(made.folder)
    return made


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return tmp_path / "remote"


@pytest.fixture
def built(fleet: TinyFleet, plansmith: Run) -> TinyFleet:
    result = plansmith("fleet", "build")
    assert result.status == 0, result.err
    return fleet


def elsewhere(tmp_path: Path, name: str = "elsewhere") -> tuple[str, Path, str, Path]:
    """Return the options of a pull on another machine."""
    return "--store", tmp_path / name / "store", "-o", tmp_path / name / "engines"


def test_push_and_pull(plansmith: Run, built: TinyFleet, tmp_path: Path) -> None:
    result = plansmith("fleet", "push", "--only", "a/*")
    assert result.status == 0 and result.out.startswith("pushed 1 records"), result.err
    result = plansmith("fleet", "pull", *elsewhere(tmp_path))
    assert result.status == 1  # one is not there
    assert "engines/a-fp16: assembled" in result.out
    assert "b/fp16/cpu: the remote store has no plan of it" in result.out
    assert plansmith("fleet", "push").status == 0
    result = plansmith("fleet", "push", "--json")
    assert json.loads(result.out)["num_bytes"] == 0
    report = json.loads(plansmith("fleet", "pull", "--json", *elsewhere(tmp_path)).out)
    assert [one["status"] for one in report["engines"]] == ["kept", "assembled"] and report["absent"] == []
    assert generated(tmp_path / "elsewhere/engines/b-fp16") == generated(built.folder / "engines/b-fp16")


def test_pull_without_checkpoints_or_assembling(plansmith: Run, built: TinyFleet, tmp_path: Path) -> None:
    assert plansmith("fleet", "push").status == 0
    for name in TWO:
        shutil.rmtree(built.folder / name)
    shutil.rmtree(built.folder / ".plansmith")
    shutil.rmtree(built.folder / "engines")
    result = plansmith("fleet", "pull", "--no-assemble")
    assert result.status == 0 and not (built.folder / "engines").exists()
    result = plansmith("fleet", "pull", "--only", "a/*")
    assert result.status == 0, result.err
    assert [path.name for path in (built.folder / "engines").iterdir()] == ["a-fp16"]


def test_what_is_not_built_is_told(plansmith: Run, fleet: TinyFleet) -> None:
    """A push of nothing fails; one of a part only where all of it was wanted."""
    assert plansmith("fleet", "build", "--only", "a/*").status == 0
    result = plansmith("fleet", "push")
    assert result.status == 0 and "not built here: b/fp16/cpu" in result.out
    assert json.loads(plansmith("fleet", "push", "--json").out)["not_built"] == ["b/fp16/cpu"]
    assert plansmith("fleet", "push", "--complete").status == 1
    assert plansmith("fleet", "push", "--complete", "--only", "a/*").status == 0
    result = plansmith("fleet", "push", "--only", "b/*")
    assert result.status == 1 and "not built here: b/fp16/cpu" in result.out
    shutil.rmtree(fleet.folder / ".plansmith/store/records")
    assert plansmith("fleet", "push").status == 1


@pytest.mark.parametrize("url", ["s3//bucket/x", "s3:/bucket/x", "file://shared"])
def test_nearly_a_url(plansmith: Run, built: TinyFleet, url: str) -> None:
    """No command makes a folder of it."""
    before = sorted(built.folder.iterdir())
    for command in ("build", "plan", "status", "matrix", "push", "pull", "gc", "verify"):
        for option in ("--remote", "--store"):
            result = plansmith("fleet", command, option, url)
            assert result.status == 1 and f"{option} {url} " in result.err, (command, option)
            assert "did you mean" in result.err
    assert sorted(built.folder.iterdir()) == before


def test_a_folder_as_the_shared_store(plansmith: Run, built: TinyFleet, tmp_path: Path) -> None:
    assert plansmith("fleet", "push", "--remote", "./s3").status == 0
    assert plansmith("fleet", "pull", "--remote", "s3", *elsewhere(tmp_path)).status == 0
    assert (built.folder / "s3/plansmith-store.json").exists()


def test_trust_that_comes_later(plansmith: Run, built: TinyFleet, tmp_path: Path) -> None:
    """Beside a remote store the folder is this machine's own, whoever names that store; a push signs what is in it."""
    remote = f"file://{tmp_path}/other"
    public = json.loads(plansmith("fleet", "keygen", "-o", tmp_path / "key.pem", "--json").out)["public_key"]
    built.edit(f"store: file://{tmp_path}/remote\n", f"trust: ['{public}']\n")
    result = plansmith("fleet", "push", "--remote", remote)
    assert result.status == 1 and "a/fp16/cpu" in result.err, result.err
    assert "no key is given; give --sign-key KEY.pem, or set PLANSMITH_SIGNING_KEY" in result.err
    result = plansmith("fleet", "push", "--remote", remote, "--sign-key", tmp_path / "key.pem")
    assert result.status == 0 and result.out.startswith("pushed 2 records"), result.err
    assert plansmith("fleet", "status", "--remote", remote).status == 0
    assert (
        plansmith("fleet", "build", "--remote", remote).status == 0
    )  # nothing is compiled, for that takes a key
    assert plansmith("fleet", "pull", "--remote", remote, *elsewhere(tmp_path)).status == 0


def test_a_folder_that_others_may_write_to_signs_nothing(
    plansmith: Run, built: TinyFleet, tmp_path: Path
) -> None:
    """A folder that the file names may be anybody's, so what lies there unsigned is not signed by a push."""
    remote = f"file://{tmp_path}/other"
    (built.folder / ".plansmith/store").rename(tmp_path / "team")
    public = json.loads(plansmith("fleet", "keygen", "-o", tmp_path / "key.pem", "--json").out)["public_key"]
    built.edit(f"store: file://{tmp_path}/remote\n", f"store: {tmp_path}/team\ntrust: ['{public}']\n")
    words = ("fleet", "push", "--remote", remote, "--sign-key", tmp_path / "key.pem")
    result = plansmith(*words)
    assert result.status == 1 and "a/fp16/cpu: " in result.err and "is not signed" in result.err
    assert f"if nobody does, say so with --store {tmp_path}/team" in result.err
    assert not (tmp_path / "other/records").exists()
    assert plansmith(*words, "--store", tmp_path / "team").status == 0


def test_an_altered_engine(plansmith: Run, built: TinyFleet) -> None:
    assert plansmith("fleet", "push").status == 0
    plan = built.folder / "engines/a-fp16/targets/cpu/model.plan"
    tamper(plan)
    result = plansmith("fleet", "verify", "--engines")
    assert result.status == 1 and f"{plan} was altered" in result.out
    assert "run plansmith fleet pull --check-hashes" in result.out
    report = json.loads(plansmith("fleet", "verify", "--engines", "--json").out)
    assert report["problems"] == [] and [one["name"] for one in report["engines"]] == [str(plan)]
    assert plansmith("fleet", "verify", "--engines", "-o", "elsewhere").status == 0  # there are none
    result = plansmith("fleet", "pull", "--check-hashes")
    assert result.status == 0 and "written anew, for they were altered: targets/cpu/model.plan" in result.out
    assert plansmith("fleet", "verify", "--engines").status == 0
    tamper(plan)
    built.edit(f"store: file://{built.folder.parent}/remote\n", "")
    result = plansmith("fleet", "verify", "--engines")
    assert "delete that engine's directory, then run plansmith fleet build" in result.out
    shutil.rmtree(built.folder / "engines/a-fp16")
    assert plansmith("fleet", "build").status == 0
    assert plansmith("fleet", "verify", "--engines").status == 0


def test_the_orphan_of_a_shared_store(plansmith: Run, built: TinyFleet, tmp_path: Path) -> None:
    """What status says drops it does."""
    assert plansmith("fleet", "push").status == 0
    built.edit("a: a, b: b", "a: a")
    result = plansmith("fleet", "status")
    assert (
        "orphan: b/fp16/cpu is in the store and not in the file; plansmith fleet gc --of-remote drops it"
        in result.out
    )
    assert plansmith("fleet", "gc", "--of-remote").status == 0
    assert "orphan" not in plansmith("fleet", "status").out
    built.edit(f"store: file://{tmp_path}/remote\n", "")
    assert "plansmith fleet gc drops it" in plansmith("fleet", "status").out
    assert plansmith("fleet", "gc").status == 0
    assert "orphan" not in plansmith("fleet", "status").out


def test_an_orphan_of_another_remote(plansmith: Run, built: TinyFleet, tmp_path: Path) -> None:
    remote = f"file://{tmp_path}/other"
    assert plansmith("fleet", "push", "--remote", remote).status == 0
    built.edit("a: a, b: b", "a: a")
    result = plansmith("fleet", "status", "--remote", remote)
    assert f"plansmith fleet gc --of-remote --remote {remote} drops it" in result.out


def test_without_a_remote(plansmith: Run, built: TinyFleet) -> None:
    built.edit(f"store: file://{built.folder.parent}/remote\n", "")
    for words in (("push",), ("pull",), ("gc", "--of-remote"), ("verify", "--of-remote")):
        result = plansmith("fleet", *words)
        assert result.status == 1 and "name a shared one: --remote" in result.err, words


@pytest.mark.parametrize("command", ["push", "gc", "verify"])
def test_without_a_store(plansmith: Run, fleet: TinyFleet, command: str) -> None:
    """Nothing was built: that is said, and no store is made."""
    result = plansmith("fleet", command)
    assert result.status == 1 and "there is no store at" in result.err
    assert not (fleet.folder / ".plansmith").exists()


def test_a_remote_that_is_none(plansmith: Run, built: TinyFleet, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("mine")
    for command in ("push", "pull"):
        result = plansmith("fleet", command, "--remote", f"file://{tmp_path}/mine")
        assert result.status == 1 and "is no store" in result.err, command
    result = plansmith("fleet", "pull", "--remote", f"file://{tmp_path}/nothing")
    assert result.status == 1 and "Traceback" not in result.err
    result = plansmith("fleet", "push", "--remote", "gopher://host/store")
    assert result.status == 1 and "gopher" in result.err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["file"]


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def tamper(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def test_a_tampered_plan(plansmith: Run, built: TinyFleet, remote: Path, tmp_path: Path) -> None:
    assert plansmith("fleet", "push").status == 0
    chunk = largest(remote / "chunks")
    tamper(chunk)
    result = plansmith("fleet", "pull", *elsewhere(tmp_path))
    assert result.status == 1 and chunk.name in result.err and "was altered" in result.err
    other, spoiled = sorted(result.out.splitlines()[1:], key=lambda line: "failed" in line)
    name = spoiled.partition(": failed")[0].rpartition("/")[2]
    assert spoiled.endswith(f"/{name}: failed ({name[0]}/fp16/cpu did not come whole)")
    assert f"{name[0]}/fp16/cpu: file://" in result.err and other.endswith(": assembled")
    assert [path.name for path in (tmp_path / "elsewhere/engines").iterdir()] != [name]
    report = json.loads(plansmith("fleet", "pull", "--json", *elsewhere(tmp_path)).out)
    assert list(report["damaged"]) == [f"{name[0]}/fp16/cpu"]
    result = plansmith("fleet", "verify", "--of-remote")
    assert result.status == 1 and chunk.name in result.out and "1 problem" in result.out
    assert "delete it there, then push again" in result.out
    chunk.unlink()
    assert plansmith("fleet", "push").status == 0
    assert plansmith("fleet", "verify", "--of-remote").status == 0
    assert plansmith("fleet", "pull", *elsewhere(tmp_path)).status == 0


def test_verify(plansmith: Run, built: TinyFleet) -> None:
    result = plansmith("fleet", "verify")
    assert result.status == 0 and "no problems" in result.out
    folder = built.folder / ".plansmith/store"
    chunk = largest(folder / "chunks")
    tamper(chunk)
    report = json.loads(plansmith("fleet", "verify", "--json").out)
    assert [one["name"] for one in report["problems"]] == [chunk.relative_to(folder).as_posix()]
    assert "delete that file, then build or pull again" in report["problems"][0]["fix"]
    chunk.unlink()
    assert plansmith("fleet", "build").status == 0
    assert plansmith("fleet", "verify").status == 0


def test_signing(
    plansmith: Run, built: TinyFleet, remote: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = plansmith("fleet", "keygen", "-o", tmp_path / "key.pem")
    assert result.status == 0 and (tmp_path / "key.pem").stat().st_mode & 0o077 == 0
    public = result.out.strip().rpartition("- ")[2]
    assert json.loads(plansmith("fleet", "keygen", "-o", tmp_path / "other.pem", "--json").out)
    assert plansmith("fleet", "keygen", "-o", tmp_path / "key.pem").status == 1  # no key is overwritten
    built.edit("limits:", f"trust: ['{public}']\nlimits:")
    for words in ((), ("--sign-key", tmp_path / "other.pem")):
        result = plansmith("fleet", "push", *words)
        given = "another" if words else "no"
        assert result.status == 1 and "plansmith: a/fp16/cpu: " in result.err, words
        assert f"{given} key is given; give --sign-key KEY.pem, or set PLANSMITH_SIGNING_KEY" in result.err
        assert not (remote / "records").exists()
    assert plansmith("fleet", "push", "--sign-key", tmp_path / "missing.pem").status == 1
    monkeypatch.setenv("PLANSMITH_SIGNING_KEY", (tmp_path / "key.pem").read_text())
    result = plansmith("fleet", "push")
    assert result.status == 0, result.err
    monkeypatch.delenv("PLANSMITH_SIGNING_KEY", raising=False)
    assert plansmith("fleet", "pull", *elsewhere(tmp_path)).status == 0
    # Who trusts another key takes none of it.
    strange = json.loads(plansmith("fleet", "keygen", "-o", tmp_path / "third.pem", "--json").out)[
        "public_key"
    ]
    built.edit(public, strange)
    result = plansmith("fleet", "pull", *elsewhere(tmp_path, "third"))
    assert result.status == 1 and "sign" in result.err
    assert not (tmp_path / "third/engines").exists()
    assert plansmith("fleet", "verify", "--of-remote").status == 1
    built.edit(strange, "ed25519:AAAA")
    result = plansmith("fleet", "pull", *elsewhere(tmp_path, "third"))
    assert result.status == 1 and "is no public key" in result.err


def test_build_and_push_signs(plansmith: Run, fleet: TinyFleet, tmp_path: Path) -> None:
    public = json.loads(plansmith("fleet", "keygen", "-o", tmp_path / "key.pem", "--json").out)["public_key"]
    fleet.edit("limits:", f"trust: ['{public}']\nlimits:")
    assert plansmith("fleet", "keygen", "-o", tmp_path / "other.pem").status == 0
    for words in ((), ("--sign-key", tmp_path / "other.pem")):
        result = plansmith("fleet", "build", "--push", *words)
        assert result.status == 1 and "give --sign-key KEY.pem" in result.err
    assert names(open_local(fleet)) == []  # nothing is compiled for that
    result = plansmith("fleet", "build", "--push", "--sign-key", tmp_path / "key.pem")
    assert result.status == 0, result.out + result.err
    assert plansmith("fleet", "pull", *elsewhere(tmp_path)).status == 0
    assert plansmith("fleet", "status").status == 0
    assert plansmith("fleet", "build", "--push").status == 0  # there is nothing to sign


def test_a_folder_that_is_trusted_to_some(plansmith: Run, fleet: TinyFleet, tmp_path: Path) -> None:
    """Without a remote store the folder may be anybody's: what lies there has to be signed as well."""
    public = json.loads(plansmith("fleet", "keygen", "-o", tmp_path / "key.pem", "--json").out)["public_key"]
    fleet.edit(f"store: file://{tmp_path}/remote\n", "")
    assert plansmith("fleet", "build").status == 0
    fleet.edit("limits:", f"trust: ['{public}']\nlimits:")
    result = plansmith("fleet", "build")
    assert result.status == 1 and "give --sign-key KEY.pem" in result.err
    assert plansmith("fleet", "status").status == 1
    report = json.loads(plansmith("fleet", "build", "--sign-key", tmp_path / "key.pem", "--json").out)
    assert {one["status"] for one in report["units"]} == {"built"}
    assert plansmith("fleet", "status").status == 0
    assert {one["status"] for one in json.loads(plansmith("fleet", "build", "--json").out)["units"]} == {
        "kept"
    }


def test_gc(plansmith: Run, built: TinyFleet, remote: Path) -> None:
    assert plansmith("fleet", "push").status == 0
    result = plansmith("fleet", "gc", "--keep-days", 0)
    assert result.status == 0 and "removed: 0 records" in result.out and "2 records stay" in result.out
    built.edit("a: a, b: b", "a: a")
    result = plansmith("fleet", "gc", "--dry-run", "--keep-days", 0)
    assert result.status == 0 and "b/fp16/cpu: no member of chat any more" in result.out
    assert len(names(open_local(built))) == 2
    report = json.loads(plansmith("fleet", "gc", "--keep-days", 0, "--json").out)
    assert (report["forgotten"], report["records"], report["kept_records"]) == (["b/fp16/cpu"], 1, 1)
    assert report["waiting"] > 0 and report["waiting_bytes"] > 0
    told = plansmith("fleet", "gc", "--keep-days", 0).out.splitlines()[-1]
    assert told.startswith(f"{report['waiting']} objects (") and "not a day old" in told
    assert len(names(open_local(built))) == 1
    assert plansmith("fleet", "verify").status == 0
    shutil.rmtree(built.folder / "engines")
    assert plansmith("fleet", "build").status == 0
    assert len(generated(built.folder / "engines/a-fp16")) == 6
    result = plansmith("fleet", "gc", "--of-remote", "--keep-days", 0)
    assert result.status == 0 and "b/fp16/cpu: no member" in result.out
    assert plansmith("fleet", "verify", "--of-remote").status == 0
    assert plansmith("fleet", "gc", "--keep-days", -1).status == 2


def open_local(fleet: TinyFleet) -> Any:
    from plansmith.fleet.store import open_store

    return open_store(fleet.folder / ".plansmith/store")


def test_a_dry_run_says_what_would_go(plansmith: Run, built: TinyFleet) -> None:
    """The same numbers as the run behind it."""
    built.edit("a: a, b: b", "a: a")
    would = json.loads(plansmith("fleet", "gc", "--dry-run", "--keep-days", 0, "--json").out)
    did = json.loads(plansmith("fleet", "gc", "--keep-days", 0, "--json").out)
    assert would == did
