"""A shared store whose refs somebody without the key has led elsewhere: no machine gets another model's engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from plansmith.fleet.share import pull_fleet, push_fleet
from plansmith.fleet.store import RemoteStore, load_private, load_public, make_key, open_store
from tiny_fleets import TinyFleet

MakeFleet = Callable[..., TinyFleet]


def test_a_member_gets_no_other_ones_engine(tiny_fleet: MakeFleet, tmp_path: Path) -> None:
    """Both records are signed; only the ref says which of them is the member's."""
    trusted = load_public(make_key(tmp_path / "key.pem"))
    fleet = tiny_fleet({"a": "llama", "b": "qwen3"})
    fleet.build(assemble=False)
    signing = open_store(fleet.fleet.store, key=load_private(tmp_path / "key.pem"))
    url = f"file://{tmp_path}/remote"
    remote = RemoteStore(url, trust=[trusted])
    push_fleet(fleet.fleet, fleet.units(), signing, remote)
    genuine = remote.refs("chat")
    machine, there = (
        open_store(tmp_path / "machine"),
        dataclasses.replace(fleet.fleet, output=tmp_path / "engines"),
    )

    careless = RemoteStore(url)  # who has it open so needs no key to write there
    for ref in (dataclasses.replace(genuine["b/fp16/cpu"], signatures=()), genuine["b/fp16/cpu"]):
        careless.set_ref("chat", "a/fp16/cpu", ref)
        pulled = pull_fleet(there, ["a/*"], machine, remote)
        assert list(pulled.damaged) == ["a/fp16/cpu"]
        assert "refs/chat/a/fp16/cpu.json" in pulled.damaged["a/fp16/cpu"]
        assert not there.output.exists() and list(machine.records()) == []
    assert [one.name for one in pull_fleet(there, ["b/*"], machine, remote).engines] == ["b-fp16"]

    push_fleet(fleet.fleet, fleet.units(), signing, remote)  # puts it right
    pulled = pull_fleet(there, (), machine, remote)
    assert {one.name: one.status for one in pulled.engines} == {"a-fp16": "assembled", "b-fp16": "kept"}
