"""A packed TensorRT plan on the double: one run a step, its graphs padded with sequences of no positions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from executor_checks import GREEDY, PROMPTS, check_greedy, tokens
from fake_machine import Machine
from fake_packed import packed_engine, packed_plan


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_a_packed_plan_gives_the_cpu_targets_tokens(
    rtx_engine: Callable[..., Any], tiny_checkpoint: Callable[[str], Path], tmp_path: Path, graphs: str
) -> None:
    built = rtx_engine()
    path, data = packed_engine(built, tmp_path / "packed")
    machine = Machine(is_rtx=False)
    machine.trt.know(packed_plan(tiny_checkpoint("llama"), built), data)
    with machine.engine(path, cuda_graphs=graphs, kv_cache_bytes=96 * 8192, max_num_tokens=20) as engine:
        got = tokens(engine.generate(PROMPTS, GREEDY))
        steps = engine.stats().iter
    check_greedy(path, PROMPTS, got)
    runs = machine.trt.num_runs + machine.cuda.calls.counts["cuGraphLaunch"]
    captured = machine.cuda.calls.counts["cuGraphInstantiate"]
    assert runs - captured == steps and (captured > 0) == (graphs == "auto")
    assert machine.problems() == []
