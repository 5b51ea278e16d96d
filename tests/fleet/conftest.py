"""Fleet files over tiny checkpoints, and an empty store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from plansmith.fleet.fleet_file import Fleet, read_fleet
from plansmith.fleet.store.local import LocalStore
from tiny_fleets import QuickRtx, TinyFleet

MakeFleet = Callable[..., Fleet]

SMALL = """\
version: 1
name: chat
limits: {max_batch_size: 4, max_num_tokens: 64, max_seq_len: 128}
models:
  tiny: {checkpoint: CHECKPOINT}
recipes:
  int8: {draft: int4}
  fp16:
skus:
  cpu:
  l4:
  l40s:
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what is remembered of checkpoints out of the user's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user_cache"))


@pytest.fixture
def make_fleet(tmp_path: Path, tiny_checkpoint: Callable[[str], Path]) -> MakeFleet:
    """Return a function that gives the fleet of a text, in which CHECKPOINT is the tiny llama's path.

    changes : pairs of what is replaced in the text
    """

    def make(text: str = SMALL, **changes: str) -> Fleet:
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "plansmith.yaml"
        path.write_text(text.replace("CHECKPOINT", str(tiny_checkpoint("llama"))))
        return read_fleet(path)

    return make


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def tiny_fleet(tmp_path: Path, tiny_checkpoint: Callable[[str], Path]) -> Callable[..., TinyFleet]:
    """Return a function that makes a fleet with checkpoints of its own.

    models : name -> family; recipes, skus : as the file has them; name : of its folder
    """

    def make(models: str | dict[str, str] = "llama", name: str = "fleet", **fields: str) -> TinyFleet:
        families = {"tiny": models} if isinstance(models, str) else models
        checkpoints = {one: tiny_checkpoint(family) for one, family in families.items()}
        return TinyFleet(tmp_path / name, checkpoints, **fields)

    return make


@pytest.fixture
def quick_rtx(monkeypatch: pytest.MonkeyPatch) -> QuickRtx:
    """Stand in for the GPU compiler and that of device kernels, in tests of what is compiled and when."""
    from plansmith.builder import compile, device_kernels
    from tiny_fleets import quick_kernels

    fake = QuickRtx()
    monkeypatch.setattr(compile, "_compile_rtx", fake)
    monkeypatch.setattr(device_kernels, "compile_tasks", quick_kernels)
    return fake
