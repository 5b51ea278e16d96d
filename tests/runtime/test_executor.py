"""Executors written in Python, and the function table as Python sees it."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_executor import INFO, FakeModel, greedy
from plansmith.runtime import errors
from plansmith.runtime.engine import Engine, SamplingParams
from plansmith.runtime.executor import Batch, Executor, PythonExecutor, cpu_executor
from plansmith.runtime.native_engine import EngineOptions, NativeEngine

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


class Breaks(FakeModel):
    """Raises in the named method."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__()
        self._where, self._error = where, error

    def _maybe(self, where: str) -> None:
        if where == self._where:
            raise self._error

    def describe(self) -> Any:
        self._maybe("describe")
        return super().describe()

    def open(self, num_blocks: int) -> None:
        self._maybe("open")
        super().open(num_blocks)

    def step(self, batch: Any) -> Any:
        self._maybe("step")
        return super().step(batch)


@pytest.mark.parametrize("where", ["describe", "open"])
@pytest.mark.parametrize("error", [RuntimeError("no memory for ünits"), KeyError("k"), SystemExit(3)])
def test_an_exception_while_starting_fails_the_engine_with_its_text(where: str, error: BaseException) -> None:
    model = Breaks(where, error)
    with pytest.raises(errors.ExecutorError, match=type(error).__name__) as caught:
        Engine.from_executor(PythonExecutor(model))
    assert str(error) in str(caught.value)
    assert model.closed == 1


@pytest.mark.parametrize("error", [ValueError("bad ünit"), AssertionError(), KeyboardInterrupt()])
def test_an_exception_in_a_step_fails_its_requests_with_its_text(error: BaseException) -> None:
    with Engine.from_executor(PythonExecutor(Breaks("step", error))) as engine:
        with pytest.raises(errors.ExecutorError, match=type(error).__name__) as caught:
            engine.generate([[1, 2]], GREEDY)
        assert str(error) in str(caught.value)


@pytest.mark.parametrize("shape", [(1, 63), (2, 64), (64,)])
def test_logits_of_another_shape_fail_the_step(shape: tuple[int, ...]) -> None:
    class Wrong(FakeModel):
        def step(self, batch: Any) -> Any:
            return np.zeros(shape, np.float32)

    wanted = pytest.raises(errors.ExecutorError, match=r"shape .*, the step wants \(1, 64\)")
    with Engine.from_executor(PythonExecutor(Wrong())) as engine, wanted:
        engine.generate([[1, 2]], GREEDY)


class GivesCandidates(FakeModel):
    """Writes each row's largest logits, and gives logits that would draw another token."""

    def __init__(self, every_step: bool) -> None:
        super().__init__(dataclasses.replace(INFO, samples_rows=2))
        self._every_step = every_step
        self.wanted: list[tuple[int, int]] = []

    def step(self, batch: Batch) -> Any:
        logits = super().step(batch)
        if batch.candidates is None:
            return logits
        self.wanted.append(batch.candidates.shape)
        best = np.argsort(-logits, axis=1, kind="stable")[:, : batch.candidates.shape[1]]
        if self._every_step or len(self.wanted) == 1:
            batch.candidates["token_id"] = best
            batch.candidates["logit"] = np.take_along_axis(logits, best, axis=1)
            return -logits
        return logits


@pytest.mark.parametrize("every_step", [True, False])
def test_draws_look_at_the_candidates_that_a_step_wrote(every_step: bool) -> None:
    """And at the logits in a step that left them alone."""
    model = GivesCandidates(every_step)
    with Engine.from_executor(PythonExecutor(model)) as engine:
        assert list(engine.generate([[1, 2]], GREEDY)[0].token_ids) == greedy([1, 2], 4)
    assert model.wanted == [(1, 1)] * 4


def test_top_k_draws_from_candidates_as_from_logits() -> None:
    params = SamplingParams(max_tokens=4, temperature=1.5, top_k=3, seed=7)
    model = GivesCandidates(True)
    with Engine.from_executor(PythonExecutor(model)) as engine:
        drawn = [output.token_ids for output in engine.generate([[1, 2], [3]], params)]
    with Engine.from_executor(PythonExecutor(FakeModel())) as engine:
        assert drawn == [output.token_ids for output in engine.generate([[1, 2], [3]], params)]
    assert {each for _, each in model.wanted} == {4}  # one more than is kept, to see where equal ones are cut


def test_logits_of_another_type_and_layout_are_converted() -> None:
    class Other(FakeModel):
        def step(self, batch: Any) -> Any:
            return np.asfortranarray(super().step(batch).astype(np.float64))

    with Engine.from_executor(PythonExecutor(Other())) as engine:
        assert list(engine.generate([[1, 2]], GREEDY)[0].token_ids) == greedy([1, 2], 4)


def test_an_executor_can_wrap_another() -> None:
    class Doubled:
        """Greedy tokens do not change when all logits are doubled."""

        def __init__(self, inner: Executor) -> None:
            self.inner = inner

        def describe(self) -> Any:
            return self.inner.describe()

        def open(self, num_blocks: int) -> None:
            self.inner.open(num_blocks)

        def step(self, batch: Any) -> Any:
            return self.inner.step(batch) * 2

        def close(self) -> None:
            self.inner.close()

    model = FakeModel()
    with Engine.from_executor(PythonExecutor(Doubled(PythonExecutor(model)))) as engine:
        assert engine.model_info == INFO
        assert list(engine.generate([[1, 2]], GREEDY)[0].token_ids) == greedy([1, 2], 4)
    assert model.closed == 1


@pytest.mark.parametrize("manual_step", [True, False])
def test_a_step_may_close_its_own_engine(manual_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    destroy = NativeEngine._destroy

    def destroy_late(core: NativeEngine) -> None:
        time.sleep(0.2)  # as on a busy machine: the thread that stops the engine comes after more steps
        destroy(core)

    monkeypatch.setattr(NativeEngine, "_destroy", destroy_late)

    class Closes(FakeModel):
        engine: Engine | None = None

        def step(self, batch: Any) -> Any:
            if self.engine is not None:
                self.engine._core.close()
            return super().step(batch)

    model = Closes()
    engine = Engine.from_executor(PythonExecutor(model), EngineOptions(manual_step=manual_step))
    model.engine = engine
    handle = engine.submit([1, 2], GREEDY)
    if manual_step:
        with pytest.raises(errors.ShutdownError):
            engine.step()
    deadline = time.monotonic() + 20
    while model.closed == 0 and time.monotonic() < deadline:
        time.sleep(0.002)
    assert model.closed == 1
    assert model.num_steps == 1
    engine.close()
    with pytest.raises(errors.ShutdownError):
        handle.result(timeout=20)


@pytest.mark.parametrize("content", [None, b"", b"not a plan at all", b"\0" * 4096])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "model.plan"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(errors.EngineFileError, match=r"model\.plan"):
        cpu_executor(path)
