"""Engines on the double of a GPU give the cpu target's tokens, and break none of the double's rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_machine import Machine
from plansmith.runtime.engine import Engine, SamplingParams

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
PROMPTS = [[1, 5, 9, 33], list(range(10, 80)), [77], [8] * 9, [1, 2, 3] * 11]


def tokens(completions: Any) -> list[list[int]]:
    return [list(one.token_ids) for one in completions]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("graphs", ["auto", "own", "off"])
def test_greedy_tokens_are_the_cpu_targets(rtx_engine: Callable[..., Any], graphs: str, eager: bool) -> None:
    engine = rtx_engine()
    machine = Machine(engine)
    machine.cuda.streams.eager = eager
    with machine.engine(engine.path, cuda_graphs=graphs) as double:
        got = double.generate(PROMPTS, GREEDY)
    with Engine.open(engine.path, num_threads=1) as cpu:
        assert tokens(got) == tokens(cpu.generate(PROMPTS, GREEDY))
    assert machine.problems() == []
