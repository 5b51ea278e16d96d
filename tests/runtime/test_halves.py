"""Executors written in Python whose step has two halves, and which may draw the tokens themselves."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest
from fake_executor import INFO, FakeModel, greedy
from plansmith.runtime import batch as batches
from plansmith.runtime import errors
from plansmith.runtime._native import native
from plansmith.runtime.batch import LOGIT_EDIT, ROW_SAMPLE, SAMPLING_ROW, StepSampling
from plansmith.runtime.engine import Engine, SamplingParams
from plansmith.runtime.executor import Executor, PythonExecutor
from plansmith.runtime.native_engine import EngineOptions

PROMPT = [1, 2, 3, 2, 1, 2]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


def changed(**fields: Any) -> SamplingParams:
    return dataclasses.replace(GREEDY, **fields)


def draw(sampling: StepSampling, logits: Any) -> Any:
    """Draw greedily what `sampling` asks for: an independent reading of masks and edits."""
    samples = np.zeros(len(logits), ROW_SAMPLE)
    for row, raw, sample in zip(sampling.rows, logits, samples, strict=True):
        assert row["temperature"] == 0
        x = raw.copy()
        if row["mask_idx"] >= 0:
            bits = np.unpackbits(sampling.masks[row["mask_idx"]].view(np.uint8), bitorder="little")
            x[bits[: len(x)] == 0] = -np.inf
        for edit in sampling.edits[row["edit_begin"] : row["edit_end"]]:
            i = edit["id"]
            x[i] = x[i] / edit["factor"] if x[i] > 0 else x[i] * edit["factor"]
            x[i] = x[i] - edit["minus"]
            x[i] = x[i] + edit["plus"]
        sample["token"] = np.argmax(x) if np.isfinite(x).any() else batches.ROW_FORBIDDEN
        if row["num_logprobs"] > 0:
            wide = raw.astype(np.float64)
            logprobs = (wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()).astype(np.float32)
            best = np.argsort(-raw, kind="stable")[: row["num_logprobs"]]
            sample["logprob"], sample["num_top"] = logprobs[sample["token"]], len(best)
            sample["top_ids"][: len(best)], sample["top_logprobs"][: len(best)] = best, logprobs[best]
    return samples


class Halves:
    """The fake model in two halves: launch hands over the batch, collect computes."""

    def __init__(self, samples_rows: int = 1) -> None:
        self.inner = FakeModel(dataclasses.replace(INFO, samples_rows=samples_rows))
        self.samplings: list[bool] = []  # of each step: whether it was drawn here
        self._batch: Any = None

    def describe(self) -> Any:
        return self.inner.describe()

    def open(self, num_blocks: int) -> None:
        self.inner.open(num_blocks)

    def launch(self, batch: Any) -> None:
        assert self._batch is None
        self._batch = batch

    def collect(self, sampling: StepSampling | None) -> Any:
        logits = self.inner.step(self._batch)
        self._batch = None
        self.samplings.append(sampling is not None)
        return logits if sampling is None else draw(sampling, logits)

    def copy_blocks(self, copies: Any) -> None:
        assert self._batch is None
        self.inner.copy_blocks(copies)

    def close(self) -> None:
        self.inner.close()


@pytest.mark.parametrize(
    ("dtype", "struct"),
    [
        (SAMPLING_ROW, "psm_sampling_row"),
        (LOGIT_EDIT, "psm_logit_edit"),
        (ROW_SAMPLE, "psm_row_sample"),
    ],
)
def test_the_types_have_the_structs_layout(dtype: np.dtype[Any], struct: str) -> None:
    ffi = native().ffi
    fields = dict(ffi.typeof(struct).fields)
    assert dtype.fields is not None
    assert {name: (f.offset, ffi.sizeof(f.type)) for name, f in fields.items()} == {
        name: (entry[1], entry[0].itemsize) for name, entry in dtype.fields.items()
    }
    assert dtype.itemsize == ffi.sizeof(struct)


def test_the_constants_are_the_headers() -> None:
    lib = native().lib
    assert batches.MAX_TOP_LOGPROBS == lib.PSM_MAX_TOP_LOGPROBS
    assert (batches.ROW_BAD_LOGITS, batches.ROW_FORBIDDEN, batches.ROW_OVERFLOW) == (
        lib.PSM_ROW_BAD_LOGITS,
        lib.PSM_ROW_FORBIDDEN,
        lib.PSM_ROW_OVERFLOW,
    )


def test_a_step_sampling_is_views_of_the_cores_arrays() -> None:
    core = native()
    struct = core.new("psm_step_sampling")
    rows = core.ffi.new("psm_sampling_row[2]")
    edits = core.ffi.new("psm_logit_edit[3]", [(4, 1.5, 0.25, -1.0), (5, 1, 0, 0), (9, 1, 0, float("-inf"))])
    masks = core.ffi.new("uint32_t[]", [1, 2, 3, 4])
    rows[0].seed, rows[0].output_idx, rows[1].mask_idx = 2**63 + 5, 7, 1
    struct.num_rows, struct.num_edits, struct.num_masks, struct.mask_words = 2, 3, 2, 2
    struct.rows, struct.edits, struct.masks = rows, edits, masks
    sampling = StepSampling.from_pointer(struct)
    assert sampling.rows["seed"][0] == 2**63 + 5
    assert sampling.rows["output_idx"][0] == 7
    assert sampling.rows["mask_idx"].tolist() == [0, 1]
    assert sampling.edits["factor"].tolist() == [1.5, 1.0, 1.0]
    assert sampling.edits["plus"][2] == -np.inf
    assert sampling.masks.tolist() == [[1, 2], [3, 4]]
    rows[1].top_k = 12
    assert sampling.rows["top_k"][1] == 12


@pytest.mark.parametrize(
    ("params", "is_drawn"),
    [
        (GREEDY, True),
        (changed(repetition_penalty=1.8, frequency_penalty=0.5, presence_penalty=-0.25), True),
        (changed(logit_bias={3: 4.0, 9: -np.inf}, bad_words=[[2], [1, 5]]), True),
        (changed(no_repeat_ngram_size=1, min_tokens=6, stop_token_ids=list(range(40))), True),
        (changed(n=2, best_of=2), True),
        (changed(draft_token_ids=[*greedy(PROMPT, 3), 0, 0]), True),
        (changed(logprobs=4), True),
        (changed(return_generation_logits=True), False),
        (changed(beam_width=2), False),
    ],
)
@pytest.mark.parametrize("manual_step", [True, False])
def test_the_tokens_are_those_of_a_step_in_one(
    params: SamplingParams, is_drawn: bool, manual_step: bool
) -> None:
    model = Halves()
    with Engine.from_executor(PythonExecutor(FakeModel())) as engine:
        (wanted,) = engine.generate([PROMPT], params)
    with Engine.from_executor(PythonExecutor(model), EngineOptions(manual_step=manual_step)) as engine:
        handle = engine.submit(PROMPT, params)
        while manual_step and engine.step():
            pass
        result = handle.result(timeout=60)
    assert [list(output.token_ids) for output in result.outputs] == [
        list(output.token_ids) for output in wanted.outputs
    ]
    assert all(model.samplings) if is_drawn else not any(model.samplings)
    if params.logprobs is not None:
        assert result.outputs[0].logprobs is not None
        assert wanted.outputs[0].logprobs is not None
        for one, other in zip(result.outputs[0].logprobs, wanted.outputs[0].logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, rel=1e-5)  # each from its own sum in float32
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_without_samples_rows_collect_brings_logits() -> None:
    model = Halves(samples_rows=0)
    with Engine.from_executor(PythonExecutor(model)) as engine:
        assert engine.model_info.samples_rows == 0
        assert list(engine.generate([PROMPT], GREEDY)[0].token_ids) == greedy(PROMPT, 12)
    assert not any(model.samplings)


def test_samples_rows_means_nothing_without_collect() -> None:
    with Engine.from_executor(PythonExecutor(FakeModel(dataclasses.replace(INFO, samples_rows=1)))) as engine:
        assert engine.model_info.samples_rows == 0
        assert list(engine.generate([PROMPT], GREEDY)[0].token_ids) == greedy(PROMPT, 12)


@pytest.mark.parametrize("missing", ["launch", "collect"])
def test_half_of_a_step_is_refused(missing: str) -> None:
    class Half(FakeModel):
        pass

    setattr(Half, "collect" if missing == "launch" else "launch", lambda *_: None)
    with pytest.raises(errors.InvalidArgumentError, match=f"{missing} is NULL"):
        Engine.from_executor(PythonExecutor(Half()))


@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("error", [RuntimeError("the device was löst"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_in_a_half_fails_the_steps_requests_and_no_more(
    where: str, error: BaseException
) -> None:
    class Breaks(Halves):
        count = 0

        def maybe(self, name: str) -> None:
            if name == where:
                self.count += 1
                if self.count == 3:
                    self._batch = None
                    raise error

        def launch(self, batch: Any) -> None:
            self.maybe("launch")
            super().launch(batch)

        def collect(self, sampling: StepSampling | None) -> Any:
            self.maybe("collect")
            return super().collect(sampling)

    executor = PythonExecutor(Breaks())
    with Engine.from_executor(executor) as engine:
        with pytest.raises(errors.ExecutorError, match=type(error).__name__) as caught:
            engine.generate([PROMPT], GREEDY)
        assert str(error) in str(caught.value)
        assert executor.callback_thread is None
        assert list(engine.generate([PROMPT], GREEDY)[0].token_ids) == greedy(PROMPT, 12)


@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("manual_step", [True, False])
def test_a_half_may_close_its_own_engine_and_what_was_launched_is_collected(
    where: str, manual_step: bool
) -> None:
    class Closes(Halves):
        engine: Engine | None = None
        num_launched = 0

        def launch(self, batch: Any) -> None:
            super().launch(batch)
            self.num_launched += 1
            self.close_in("launch")

        def collect(self, sampling: StepSampling | None) -> Any:
            self.close_in("collect")
            return super().collect(sampling)

        def close_in(self, name: str) -> None:
            if name == where and self.engine is not None:
                self.engine._core.close()

    model = Closes()
    engine = Engine.from_executor(PythonExecutor(model), EngineOptions(manual_step=manual_step))
    model.engine = engine
    handle = engine.submit(PROMPT, GREEDY)
    if manual_step:
        with pytest.raises(errors.ShutdownError):
            engine.step()
    deadline = time.monotonic() + 20
    while model.inner.closed == 0 and time.monotonic() < deadline:
        time.sleep(0.002)
    assert model.inner.closed == 1
    assert model.num_launched == len(model.samplings) == 1
    engine.close()
    with pytest.raises(errors.ShutdownError):
        handle.result(timeout=20)


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        (np.zeros(2, ROW_SAMPLE), "ROW_SAMPLE of shape"),
        (np.zeros(1, np.int32), "ROW_SAMPLE of shape"),
        (None, "ROW_SAMPLE of shape"),
        (np.full((1, 44), 10**6, np.int32).view(ROW_SAMPLE).reshape(1), "no token of the vocabulary"),
        (np.full((1, 44), -1, np.int32).view(ROW_SAMPLE).reshape(1), "NaN or \\+infinity"),
    ],
)
def test_what_is_no_draw_fails_the_request(drawn: Any, message: str) -> None:
    class Wrong(Halves):
        def collect(self, sampling: StepSampling | None) -> Any:
            super().collect(sampling)
            return drawn

    wanted = pytest.raises(errors.ExecutorError, match=message)
    with Engine.from_executor(PythonExecutor(Wrong())) as engine, wanted:
        engine.generate([PROMPT], GREEDY)


class Forwards:
    """An executor over another one's function table, halves and all."""

    def __init__(self, inner: Executor, in_one: bool) -> None:
        self.inner = inner
        if in_one:
            self.step = inner.step
        else:
            self.launch = inner.launch
            self.collect = inner.collect

    def describe(self) -> Any:
        return self.inner.describe()

    def open(self, num_blocks: int) -> None:
        self.inner.open(num_blocks)

    def close(self) -> None:
        self.inner.close()


@pytest.mark.parametrize("in_one", [True, False])
def test_an_executor_in_halves_can_be_called_from_python(in_one: bool) -> None:
    model = Halves()
    inner = PythonExecutor(model)
    assert inner.can("launch")
    assert not inner.can("step")
    with Engine.from_executor(PythonExecutor(Forwards(inner, in_one))) as engine:
        assert list(engine.generate([PROMPT], GREEDY)[0].token_ids) == greedy(PROMPT, 12)
    assert all(sampled != in_one for sampled in model.samplings)
    assert model.inner.closed == 1
