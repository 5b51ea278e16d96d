"""CUDA graphs of decode runs, and TensorRT-RTX's compiled kernels kept from one start to the next."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_machine import Machine
from plansmith.runtime.engine import SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
GetEngine = Callable[..., Any]


def decode(machine: Machine, path: Path, prompts: list[list[int]], graphs: str) -> list[list[int]]:
    with machine.engine(path, manual_step=True, cuda_graphs=graphs) as engine:
        return [list(one.token_ids) for one in engine.generate(prompts, GREEDY)]


def test_a_bucket_is_captured_once_and_replayed(rtx_engine: GetEngine) -> None:
    built = rtx_engine()
    prompts = [[n, n + 1] for n in range(3, 6)]  # 3 sequences of one and then two blocks: two buckets
    plain, machine = Machine(built), Machine(built)
    assert decode(machine, built.path, prompts, "own") == decode(plain, built.path, prompts, "off")
    counts = machine.cuda.calls.counts
    assert counts["cuGraphInstantiate"] == 2
    # 11 decode steps, of each bucket two as usual; the second is recorded, too, and runs no more than once.
    assert counts["cuGraphLaunch"] == 11 - 2 * 2
    assert counts["trt.run"] == 3 + 2 * 2 + 2
    assert plain.cuda.calls.counts["cuGraphLaunch"] == 0
    assert machine.problems() == [] and plain.problems() == []


@pytest.mark.parametrize("graphs", ["auto", "own"])
def test_padding_changes_no_token_and_no_block_of_others(rtx_engine: GetEngine, graphs: str) -> None:
    """Every batch size of a bucket, sequences of other lengths beside, more and fewer as they end."""
    built = rtx_engine()
    machine, plain = Machine(built), Machine(built)
    with (
        machine.engine(built.path, manual_step=True, cuda_graphs=graphs) as padded,
        plain.engine(built.path, manual_step=True, cuda_graphs="off") as exact,
    ):
        for count in range(1, 9):
            jobs = [
                (list(range(10 + n, 12 + 3 * n + count)), dataclasses.replace(GREEDY, max_tokens=3 + n))
                for n in range(count)
            ]
            got = []
            for engine in (padded, exact):
                handles = [engine.submit(*job) for job in jobs]
                while engine.step():
                    pass
                got.append([list(one.result().token_ids) for one in handles])
            assert got[0] == got[1], count
    assert machine.problems() == [] and plain.problems() == []


def test_what_padding_writes_reaches_no_block_of_the_core(rtx_engine: GetEngine) -> None:
    """Blocks that no sequence holds stay as they were cleared, whatever padded runs write."""
    built = rtx_engine()
    machine = Machine(built)
    with machine.engine(built.path, manual_step=True, kv_cache_bytes=64 * 8192) as engine:
        engine.generate([[5, 6, 7]] * 5, GREEDY)
        gpu = engine._gpu
        assert gpu is not None and gpu._pools is not None
        pools = gpu._pools
        used = 0
        for layer in range(built.spec.num_layers):
            raw = machine.cuda.memory.view(
                pools.address(layer, False), pools.num_blocks * pools.shape.slab_bytes, "the test", "device"
            )
            blocks = raw.view(np.float16).reshape(pools.num_blocks, -1)
            used = max(used, int(blocks.any(axis=1).sum()))
        assert 0 < used <= 5 * 2  # five sequences of 14 positions, in blocks of 8
    assert machine.problems() == []


@pytest.fixture
def own_copy(rtx_engine: GetEngine, tmp_path: Path) -> Any:
    """Return an engine whose directory the test may change."""
    built = rtx_engine()
    return dataclasses.replace(
        built,
        path=Path(
            shutil.copytree(built.path, tmp_path / "engine", ignore=shutil.ignore_patterns("runtime_cache*"))
        ),
    )


def compiled(own_copy: Any) -> int:
    """Return how many kernels TensorRT-RTX compiles in a start that answers one prompt."""
    machine = Machine(own_copy)
    decode(machine, own_copy.path, [[5, 6]], "auto")
    assert machine.problems() == []
    return machine.trt.num_compiled


def test_compiled_kernels_are_kept(own_copy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert compiled(own_copy) > 0
    assert compiled(own_copy) == 0
    (cache,) = own_copy.path.rglob("runtime_cache.*.bin")
    cache.write_bytes(cache.read_bytes()[:-3])  # cut short
    assert compiled(own_copy) > 0
    assert compiled(own_copy) == 0
    data = bytearray(cache.read_bytes())
    data[40] ^= 1
    cache.write_bytes(data)
    assert compiled(own_copy) > 0


def test_kernels_are_kept_elsewhere_where_the_engine_cannot_be_written(
    own_copy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tempfile

    make = tempfile.mkstemp

    def refuse(*args: Any, **options: Any) -> Any:
        if str(own_copy.path) in str(options.get("dir")):
            raise PermissionError(13, "Permission denied")
        return make(*args, **options)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert compiled(own_copy) > 0
    assert compiled(own_copy) == 0
    assert list((tmp_path / "cache").rglob("runtime_cache.*.bin"))
