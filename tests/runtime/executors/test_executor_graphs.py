"""CUDA graphs of decode runs, and what their padding leaves alone."""

from __future__ import annotations

import dataclasses
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
