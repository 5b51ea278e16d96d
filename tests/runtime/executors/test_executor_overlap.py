"""What a step costs the host, and what it does while the device works: the order of calls, and their number."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_machine import Machine
from plansmith.builder.batch import StepBatch
from plansmith.plugins.sampling import spec
from plansmith.runtime.batch import LOGIT_EDIT, ROW_SAMPLE, SAMPLING_ROW, StepSampling
from plansmith.runtime.executors import rectangular
from plansmith.runtime.executors.executor import TensorRtExecutor
from plansmith.runtime.executors.options import GpuOptions

GetEngine = Callable[..., Any]
MAKERS = ("cuMemAlloc", "cuMemHostAlloc", "cuEventCreate", "cuStreamCreate", "trt.create_context")


def step_of(lens: list[int], kv_lens: list[int], wanted: list[int]) -> StepBatch:
    """Return a step of sequences that hold blocks one after another, in blocks of 8."""
    cu = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    positions = [np.arange(kv - n, kv) for n, kv in zip(lens, kv_lens, strict=True)]
    table = np.full((len(lens), 16), -1, np.int32)
    used = 0
    for b, held in enumerate(kv_lens):
        needed = -(-held // 8)
        table[b, :needed] = np.arange(used, used + needed)
        used += needed
    return StepBatch(
        input_ids=np.arange(3, 3 + cu[-1], dtype=np.int32),
        position_ids=np.concatenate(positions).astype(np.int32),
        query_lens=np.array(lens, np.int32),
        kv_lens=np.array(kv_lens, np.int32),
        cu_query_lens=cu,
        block_table=table,
        logits_rows=np.array(wanted, np.int32),
    )


def greedy(num_rows: int) -> StepSampling:
    rows = np.zeros(num_rows, SAMPLING_ROW)
    rows["mask_idx"], rows["top_p"] = -1, 1.0
    return StepSampling(rows, np.empty(0, LOGIT_EDIT), np.empty((0, 0), np.uint32), None)


def launch(executor: TensorRtExecutor, step: StepBatch) -> None:
    executor.launch(step)  # type: ignore[arg-type]


@pytest.fixture
def machine(rtx_engine: GetEngine) -> Iterator[Machine]:
    made = Machine(rtx_engine())
    yield made
    assert made.problems() == []


def opened(machine: Machine, rtx_engine: GetEngine, **options: Any) -> TensorRtExecutor:
    executor = machine.executor(rtx_engine().path, options=GpuOptions(**options))
    executor.open(64)
    machine.cuda.calls.names.clear()
    return executor


def test_a_run_is_with_the_device_before_the_next_ones_arrays_are_made(
    machine: Machine, rtx_engine: GetEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = opened(machine, rtx_engine)
    names, make = machine.cuda.calls.names, rectangular.rectangle

    def noted(*args: Any) -> Any:
        names.append("arrays")
        return make(*args)

    monkeypatch.setattr(rectangular, "rectangle", noted)
    launch(executor, step_of([1, 1, 9, 6], [5, 9, 9, 14], [0, 1, 10, 16]))
    order = [one for one in names if one in ("arrays", "cuMemcpyHtoDAsync", "trt.run")]
    assert order == ["arrays", "cuMemcpyHtoDAsync", "trt.run"] * 3
    assert machine.cuda.streams.pending, "nothing has waited for the device"
    assert "cuStreamSynchronize" not in names and "cuCtxSynchronize" not in names
    names.clear()
    logits = executor.collect(None)
    assert logits.shape == (4, rtx_engine().spec.vocab_size) and np.isfinite(logits).all()
    assert names.count("cuStreamSynchronize") == 1
    executor.close()


@pytest.mark.parametrize("graphs", ["off", "own"])
def test_a_decode_step_is_a_few_calls_and_makes_nothing(
    machine: Machine, rtx_engine: GetEngine, graphs: str
) -> None:
    executor = opened(machine, rtx_engine, cuda_graphs=graphs)
    step = step_of([1, 1, 1], [5, 9, 12], [0, 1, 2])
    for _ in range(3):
        launch(executor, step)
        first = executor.collect(greedy(3))["token"].tolist()
    machine.cuda.calls.names.clear()
    launch(executor, step)
    launched = list(machine.cuda.calls.names)
    again = executor.collect(greedy(3))
    names = list(machine.cuda.calls.names)
    assert again.dtype == ROW_SAMPLE and again["token"].tolist() == first
    assert not set(names) & set(MAKERS)
    run = "cuGraphLaunch" if graphs == "own" else "trt.run"
    assert launched == [
        *("cuCtxPushCurrent", "cuEventSynchronize", "cuMemcpyHtoDAsync", "cuEventRecord"),
        *(run, "cuCtxPopCurrent"),
    ]
    assert names[len(launched) :] == [
        *("cuCtxPushCurrent", "cuEventSynchronize", "cuMemcpyHtoDAsync", "cuEventRecord"),
        *("cuLaunchKernel", "cuLaunchKernel", "cuMemcpyDtoHAsync", "cuStreamSynchronize", "cuCtxPopCurrent"),
    ]
    executor.close()


def alone(step: StepBatch, b: int) -> StepBatch:
    """Return one of a step's sequences as a step of its own."""
    first, last = step.cu_query_lens[b : b + 2]
    return dataclasses.replace(
        step,
        input_ids=step.input_ids[first:last],
        position_ids=step.position_ids[first:last],
        query_lens=step.query_lens[b : b + 1],
        kv_lens=step.kv_lens[b : b + 1],
        cu_query_lens=np.array([0, last - first], np.int32),
        block_table=step.block_table[b : b + 1],
        logits_rows=np.array([last - first - 1], np.int32),
    )


def test_rows_come_in_the_steps_order_whatever_the_runs_are(machine: Machine, rtx_engine: GetEngine) -> None:
    """Decode tokens behind and between chunks are computed first, in a run of their own."""
    executor = opened(machine, rtx_engine)
    step = step_of([9, 1, 4, 1], [9, 6, 4, 11], [8, 9, 13, 14])
    launch(executor, step)
    together = np.array(executor.collect(None))
    launch(executor, step)
    drawn = executor.collect(greedy(4))["token"].tolist()
    assert drawn == together.argmax(axis=1).tolist() and len(set(drawn)) > 1
    for b in range(4):
        launch(executor, alone(step, b))
        (row,) = np.array(executor.collect(None))
        # Two layers of float16 activations: some 20 roundings of 2^-11 of values up to the largest logit.
        np.testing.assert_allclose(together[b], row, atol=20 * 2.0**-11 * np.abs(row).max())
        others = [other for other in range(4) if other != b]
        assert all(np.abs(together[other] - row).max() > 0.1 for other in others), "rows that differ"
    executor.close()


def test_any_thread_may_be_the_one(machine: Machine, rtx_engine: GetEngine) -> None:
    """Opened here, launched and collected in two others, asked by a fourth, closed by a fifth."""
    executor = opened(machine, rtx_engine)
    step = step_of([1, 4], [3, 4], [0, 4])
    launch(executor, step)
    wanted = np.array(executor.collect(None))
    found: list[Any] = []

    def elsewhere(call: Callable[[], Any]) -> None:
        thread = threading.Thread(target=lambda: found.append(call()))
        thread.start()
        thread.join()

    elsewhere(lambda: launch(executor, step))
    elsewhere(lambda: np.array(executor.collect(None)))
    elsewhere(executor.device_use)
    elsewhere(executor.close)
    assert np.array_equal(found[1], wanted)
    assert found[2].used + found[2].free == found[2].total and len(found) == 4


def test_rows_that_nobody_wants_are_not_drawn(machine: Machine, rtx_engine: GetEngine) -> None:
    """A chunk in the middle of a prompt has no rows; one-token chunks in a full batch have rows for nobody."""
    executor = opened(machine, rtx_engine)
    launch(executor, step_of([6], [6], []))
    assert executor.collect(greedy(0)).size == 0
    assert machine.cuda.num_launches == 0
    launch(executor, step_of([6], [6], [5]))  # the workspace of more rows than before is another
    assert executor.collect(greedy(1)).size == 1
    step = step_of([1] * 8, [4] * 8, [2, 5])
    launch(executor, step)
    logits = np.array(executor.collect(None))
    launch(executor, step)
    samples = executor.collect(greedy(2))
    assert logits.shape[0] == 2 and samples["token"].tolist() == logits.argmax(axis=1).tolist()
    executor.close()


def test_a_bucket_is_set_again_behind_a_run_without_one(machine: Machine, rtx_engine: GetEngine) -> None:
    """7 unwanted decode rows, padded, and 4 of a chunk would be too many: that run has its own shape."""
    executor = opened(machine, rtx_engine)
    decode = step_of([1] * 7, [4] * 7, list(range(7)))
    launch(executor, decode)
    first = np.array(executor.collect(None))
    launch(executor, step_of([1] * 7 + [4], [4] * 8, [7, 8, 9, 10]))
    assert executor.collect(None).shape[0] == 4
    launch(executor, decode)
    assert np.array_equal(first, executor.collect(None))
    executor.close()


def test_regions_of_the_workspace_are_those_of_each_number_of_rows(
    machine: Machine, rtx_engine: GetEngine
) -> None:
    executor = opened(machine, rtx_engine)
    sampler = executor._parts.sampler
    assert sampler is not None
    for count in (1, 2, 1):
        launch(executor, step_of([1] * count, [4] * count, list(range(count))))
        executor.collect(greedy(count))
        for name, one in spec.regions(count, rtx_engine().spec.vocab_size).items():
            assert sampler._cells[name].value == sampler._workspace + one.offset, (count, name)
    executor.close()
