"""What tests/gpu/test_engine.py asks of an engine on a real GPU: the double passes it, and wrong engines do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from executor_checks import check_engine_runs
from fake_machine import Machine


@pytest.mark.parametrize(
    ("graphs", "device_sampling"), [("auto", False), ("own", True), ("own", False), ("off", True)]
)
def test_the_double_passes_the_check_of_real_gpus(
    rtx_engine: Callable[..., Any], graphs: str, device_sampling: bool
) -> None:
    built = rtx_engine()
    machine = Machine(built, device_sampling=device_sampling)
    with machine.engine(built.path, cuda_graphs=graphs) as engine:
        check_engine_runs(built.path, engine, draws_on_device=device_sampling)
    assert machine.problems() == []


def test_another_models_tokens_do_not_pass(rtx_engine: Callable[..., Any]) -> None:
    other = rtx_engine("qwen3")
    machine = Machine(other)
    with machine.engine(other.path) as engine:
        with pytest.raises(AssertionError):
            check_engine_runs(rtx_engine().path, engine, draws_on_device=False)
        with pytest.raises(AssertionError):
            check_engine_runs(other.path, engine, draws_on_device=True)
