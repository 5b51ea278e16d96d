"""CUDA graphs of decode runs: when they are made, what they compute, what happens where they cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from plansmith.runtime.errors import CudaError, OutOfMemoryError
from plansmith.runtime.executors.cuda import Context, Driver, StickyCudaError
from plansmith.runtime.executors.graphs import DecodeGraphs
from plansmith.runtime.executors.runs import Bucket


class Work:
    """A buffer on the device, and runs that copy 64 bytes of one half to the other."""

    def __init__(self, fake: FakeCuda) -> None:
        self.fake = fake
        driver = Driver(fake)
        self.context: Context = driver.open(driver.devices()[0])
        self.num_runs = 0
        with self.context.current():
            self.stream = self.context.stream()
            self.buffer = self.context.alloc(512)
            self.context.zero(self.buffer, 512, self.stream)
            self.pinned = self.context.alloc_pinned(64)

    def run(self, stream: int = 0) -> None:
        self.num_runs += 1
        self.fake.cuMemcpyDtoDAsync(self.buffer + 256, self.buffer, 64, self.stream)

    def give(self, value: int) -> None:
        self.context.wait(self.stream)
        self.pinned.bytes[:] = value
        self.context.copy_to_device(self.buffer, self.pinned.address, 64, self.stream)

    def result(self) -> int:
        self.context.copy_to_host(self.pinned.address, self.buffer + 256, 64, self.stream)
        self.context.wait(self.stream)
        (value,) = np.unique(self.pinned.bytes)
        return int(value)

    def close(self) -> None:
        with self.context.current():
            self.context.wait(self.stream)
            self.context.free(self.buffer)
            self.context.free_pinned(self.pinned)
            self.context.destroy_stream(self.stream)
        self.context.close()


@pytest.fixture
def work() -> Iterator[Work]:
    made = Work(FakeCuda())
    with made.context.current():
        yield made
    made.close()
    assert made.fake.problems() == []


class Ctx:
    """An execution context; fails : what a run in a capture raises."""

    live = 0

    def __init__(self, work: Work, *, can_capture: bool = True, fails: Exception | None = None) -> None:
        self.work, self.can_capture, self.fails, self.num_runs = work, can_capture, fails, 0
        self.is_open = True
        Ctx.live += 1

    def run(self, stream: int) -> None:
        assert self.is_open and stream == int(self.work.stream)
        self.num_runs += 1
        if self.fails is not None and self.num_runs > 1:
            raise self.fails
        self.work.run()

    def is_capturable(self, stream: int) -> bool:
        return self.can_capture

    def close(self) -> None:
        assert self.work.fake.streams.pending == [] or not self.num_runs, "its run is still queued"
        Ctx.live -= self.is_open
        self.is_open = False


@pytest.fixture(autouse=True)
def no_context_is_left() -> Iterator[None]:
    Ctx.live = 0
    yield
    assert Ctx.live == 0


def step(graphs: DecodeGraphs[Ctx], work: Work, bucket: Bucket, **how: Any) -> bool:
    """Run a bucket as the executor does; return whether a graph did it."""
    if graphs.replay(bucket, work.stream):
        return True
    context = graphs.context(bucket, lambda: Ctx(work, **how))
    if context is None:
        work.run()
    else:
        context.run(int(work.stream))
    graphs.after_run(bucket, work.stream)
    return False


def close(graphs: DecodeGraphs[Ctx], work: Work) -> None:
    work.context.wait(work.stream)
    graphs.close()
    graphs.close()


def test_the_third_run_of_a_bucket_is_a_graph(work: Work) -> None:
    graphs: DecodeGraphs[Ctx] = DecodeGraphs(work.context)
    bucket, other = Bucket(4, 2), Bucket(8, 2)
    seen = []
    for value in (3, 5, 7, 9):
        work.give(value)
        seen.append(step(graphs, work, bucket))
        assert work.result() == value
    assert seen == [False, False, True, True] and len(graphs) == 1
    assert work.num_runs == 3  # two as usual, one recorded
    assert not graphs.replay(other, work.stream)
    close(graphs, work)


def test_each_graph_has_a_context_of_its_own(work: Work) -> None:
    graphs: DecodeGraphs[Ctx] = DecodeGraphs(work.context)
    for size in (1, 2, 4):
        for _ in range(3):
            step(graphs, work, Bucket(size, 1))
    assert len(graphs) == Ctx.live == 3
    close(graphs, work)


def test_the_least_recently_used_graph_goes(work: Work) -> None:
    graphs: DecodeGraphs[Ctx] = DecodeGraphs(work.context, max_graphs=2)
    buckets = [Bucket(size, 1) for size in (1, 2, 4)]
    for bucket in buckets[:2]:
        for _ in range(2):
            step(graphs, work, bucket)
    assert step(graphs, work, buckets[0])
    for _ in range(2):
        step(graphs, work, buckets[2])
    assert len(graphs) == Ctx.live == 2
    assert step(graphs, work, buckets[0]) and step(graphs, work, buckets[2])
    assert not step(graphs, work, buckets[1])
    close(graphs, work)


def test_where_nothing_can_be_captured_runs_go_on(work: Work, caplog: pytest.LogCaptureFixture) -> None:
    graphs: DecodeGraphs[Ctx] = DecodeGraphs(work.context)
    for value in (1, 2, 3):
        work.give(value)
        assert not step(graphs, work, Bucket(1, 1), can_capture=False)
        assert work.result() == value
    assert graphs.failure and len(graphs) == Ctx.live == 0
    assert caplog.text.count("are not captured as CUDA graphs from here on") == 1


def test_a_capture_that_fails_is_the_last_one(work: Work) -> None:
    graphs, bucket = DecodeGraphs[Ctx](work.context), Bucket(1, 1)
    for _ in range(2):
        assert not step(graphs, work, bucket, fails=CudaError("not in a capture"))
    assert graphs.failure == "not in a capture" and len(graphs) == 0
    work.give(6)
    assert not step(graphs, work, bucket)
    assert work.result() == 6  # the stream has left its capture


@pytest.mark.parametrize("error", [None, "CUDA_ERROR_OUT_OF_MEMORY"])
def test_a_context_whose_run_cannot_be_waited_for_goes_in_the_end(work: Work, error: str | None) -> None:
    graphs, bucket = DecodeGraphs[Ctx](work.context), Bucket(1, 1)
    step(graphs, work, bucket)
    work.fake.calls.fail("cuStreamSynchronize", error=error)
    assert not step(graphs, work, bucket, fails=CudaError("not in a capture"))
    assert graphs.failure == "not in a capture" and len(graphs) == 0 and Ctx.live == 1
    close(graphs, work)


def test_a_context_that_cannot_be_made_is_done_without(work: Work) -> None:
    graphs, bucket = DecodeGraphs[Ctx](work.context), Bucket(1, 1)

    def fails() -> Ctx:
        raise OutOfMemoryError("no memory for a context")

    assert graphs.context(bucket, fails) is None and graphs.failure is None
    graphs.after_run(bucket, work.stream)
    assert graphs.context(bucket, fails) is None and graphs.failure == "no memory for a context"


def test_a_run_that_failed_leaves_its_context_to_the_next(work: Work) -> None:
    graphs, bucket = DecodeGraphs[Ctx](work.context), Bucket(1, 1)
    graphs.after_run(bucket, work.stream)
    made = graphs.context(bucket, lambda: Ctx(work))
    assert made is not None and graphs.context(bucket, lambda: Ctx(work)) is made  # no after_run between
    close(graphs, work)


def test_a_lost_context_is_not_taken_for_a_capture_that_failed(work: Work) -> None:
    graphs, bucket = DecodeGraphs[Ctx](work.context), Bucket(1, 1)
    lost = StickyCudaError("CUDA_ERROR_ILLEGAL_ADDRESS")
    step(graphs, work, bucket, fails=lost)
    with pytest.raises(StickyCudaError):
        step(graphs, work, bucket, fails=lost)


def test_memory_of_graphs_is_bounded(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter(range(10_000, 0, -100))
    memory: Callable[[Any], tuple[int, int]] = lambda _self: (next(free), 10_000)  # noqa: E731
    monkeypatch.setattr(Context, "memory", memory)
    graphs: DecodeGraphs[Ctx] = DecodeGraphs(work.context, max_bytes=250)
    for size in (1, 2, 4):
        for _ in range(2):
            step(graphs, work, Bucket(size, 1))
    assert len(graphs) == 2 and graphs.num_bytes == 200
    work.context.wait(work.stream)
    graphs.close()
