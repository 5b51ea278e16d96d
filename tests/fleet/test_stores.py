"""Several stores as one."""

from __future__ import annotations

from pathlib import Path

import pytest
from plansmith.fleet.store.errors import DamagedError
from plansmith.fleet.store.local import LocalStore
from plansmith.fleet.store.record import Record, Ref
from plansmith.fleet.stores import FirstOf

ONE, TWO, THREE = "1" * 64, "2" * 64, "3" * 64


def record(key: str, note: str) -> Record:
    return Record(key, "unit", {}, (), {"note": note}, {})


def test_what_an_earlier_store_has_goes_first(tmp_path: Path) -> None:
    near, far = LocalStore(tmp_path / "near"), LocalStore(tmp_path / "far")
    near.put_record(record(ONE, "near"))
    far.put_record(record(ONE, "far"))
    far.put_record(record(TWO, "far"))
    near.set_ref("chat", "a/b/c", Ref(ONE, "2026-02-01T00:00:00Z"))
    far.set_ref("chat", "a/b/c", Ref(TWO, "2026-01-01T00:00:00Z"))
    far.set_ref("chat", "a/b/d", Ref(TWO, "2026-01-01T00:00:00Z"))
    both = FirstOf([near, far])
    assert [one and one.content["note"] for one in map(both.record, (ONE, TWO, THREE))] == [
        "near",
        "far",
        None,
    ]
    assert {name: ref.key for name, ref in both.refs("chat").items()} == {"a/b/c": ONE, "a/b/d": TWO}
    (tmp_path / "near/records" / f"{ONE}.json").write_text("{")
    found = both.record(ONE)
    assert found is not None and found.content["note"] == "far"
    (tmp_path / "far/records" / f"{ONE}.json").unlink()
    with pytest.raises(DamagedError):
        both.record(ONE)
