"""The same fleet built twice by the real compilers: the same plans byte for byte, and those that a build makes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from plansmith.builder.build import build_engine, plan_build
from plansmith.fleet.store.record import Record
from tiny_fleets import TinyFleet, engines, files, manifest_json, without_host

LIMITS = {"max_batch_size": 4, "max_num_tokens": 64, "max_seq_len": 128, "tokens_per_block": 8}


def may_fix_the_layout() -> bool:
    """Whether a process may turn the kernel's random addresses off; containers may forbid it."""
    code = "import ctypes, sys; sys.exit(ctypes.CDLL(None).personality(ctypes.c_ulong(0x0040000)) < 0)"
    return (
        sys.platform == "linux" and subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    )


@contextlib.contextmanager
def many_open_files() -> Iterator[None]:
    """Open files until their numbers have another length."""
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(120)]
    try:
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)


def records(fleet: TinyFleet) -> list[Record]:
    found = [fleet.store.record(unit.key) for unit in fleet.units()]
    return [one for one in found if one is not None]


def test_two_stores_and_a_build(
    tiny_fleet: Callable[..., TinyFleet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not may_fix_the_layout():
        pytest.skip("this container forbids personality(ADDR_NO_RANDOMIZE)")
    pytest.importorskip("tensorrt_rtx")
    fleet = tiny_fleet(skus="[cpu, sm89]")
    assert engines(fleet.build()) == {"tiny-fp16": "assembled"}
    out = fleet.folder / "engines/tiny-fp16"
    first = (records(fleet), files(out), manifest_json(out))
    fleet.edit("limits:", "store: a_store_with_a_longer_name\noutput: elsewhere\nlimits:")
    monkeypatch.setenv("SOMETHING_OF_THE_SHELL", "x" * 3000)
    with many_open_files():
        assert engines(fleet.build()) == {"tiny-fp16": "assembled"}
    out = fleet.folder / "elsewhere/tiny-fp16"
    again = (records(fleet), files(out), manifest_json(out))
    for one, other in zip(first[0], again[0], strict=True):
        assert (one.key, one.inputs) == (other.key, other.inputs)
        assert _kept(one) == _kept(other)
        assert without_host(dict(one.content["manifest"])) == without_host(dict(other.content["manifest"]))
    assert first[1:] == again[1:]
    # And what plansmith build makes, whose graph nobody shares.
    shutil.rmtree(fleet.folder / "elsewhere")
    build_engine(
        plan_build(fleet.folder / "tiny", ["cpu", "sm89"], precision="fp16", limits=LIMITS),
        tmp_path / "built",
    )
    assert files(tmp_path / "built") == first[1]
    assert manifest_json(tmp_path / "built") == first[2]


def _kept(record: Record) -> dict[str, str]:
    """Return a record's files, without logs, which tell times."""
    return {file.path: file.sha256 for file in record.files if not file.path.endswith(".log")}
