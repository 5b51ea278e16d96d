"""A GPU that is lost while an engine runs: requests fail in words, and whoever watches is told to restart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_machine import Machine
from plansmith.runtime.engine import SamplingParams
from plansmith.runtime.errors import Error
from plansmith.serving.openai.lifecycle import Lifecycle
from plansmith.serving.openai.settings import Settings

PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def test_a_lost_gpu_is_told_to_who_watches(rtx_engine: Callable[..., Any]) -> None:
    built = rtx_engine()
    machine = Machine(built)
    with machine.engine(built.path) as engine:
        lifecycle = Lifecycle(engine, Settings(("model",)))  # type: ignore[arg-type]
        engine.generate([[5, 6]], PARAMS)
        assert engine.device_failure() is None and lifecycle.trouble() is None
        machine.cuda.calls.fail("cuMemcpyHtoDAsync", 1, "CUDA_ERROR_ILLEGAL_ADDRESS")
        for words in ("CUDA_ERROR_ILLEGAL_ADDRESS.*context is lost", "the GPU failed before"):
            with pytest.raises(Error, match=words):
                engine.generate([[5, 6]], PARAMS)
        assert "ILLEGAL_ADDRESS" in (engine.device_failure() or "")
        trouble = lifecycle.trouble()
        assert trouble is not None and "every request fails: cuMemcpyHtoDAsync failed" in trouble


def test_an_error_that_passes_is_not_a_lost_gpu(rtx_engine: Callable[..., Any]) -> None:
    built = rtx_engine()
    machine = Machine(built)
    with machine.engine(built.path) as engine:
        lifecycle = Lifecycle(engine, Settings(("model",)))  # type: ignore[arg-type]
        machine.cuda.calls.fail("cuMemcpyHtoDAsync", 1)
        with pytest.raises(Error, match="cuMemcpyHtoDAsync failed"):
            engine.generate([[5, 6]], PARAMS)
        assert len(engine.generate([[5, 6]], PARAMS)[0].token_ids) == 4
        assert engine.device_failure() is None and lifecycle.trouble() is None
    assert machine.problems() == []
