"""CUDA graphs of decode runs: when they are made, what they compute, what happens where they cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from plansmith.runtime.errors import CudaError
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

    def run(self) -> None:
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


def step(graphs: DecodeGraphs, work: Work, bucket: Bucket, can_capture: bool = True) -> bool:
    """Run a bucket as the executor does; return whether a graph did it."""
    if graphs.replay(bucket, work.stream):
        return True
    work.run()
    graphs.after_run(bucket, work.run, can_capture, work.stream)
    return False


def test_the_third_run_of_a_bucket_is_a_graph(work: Work) -> None:
    graphs, bucket, other = DecodeGraphs(work.context), Bucket(4, 2), Bucket(8, 2)
    seen = []
    for value in (3, 5, 7, 9):
        work.give(value)
        seen.append(step(graphs, work, bucket))
        assert work.result() == value
    assert seen == [False, False, True, True] and len(graphs) == 1
    assert work.num_runs == 3  # two as usual, one recorded
    assert not graphs.replay(other, work.stream)
    graphs.close()
    graphs.close()


def test_the_least_recently_used_graph_goes(work: Work) -> None:
    graphs = DecodeGraphs(work.context, max_graphs=2)
    buckets = [Bucket(size, 1) for size in (1, 2, 4)]
    for bucket in buckets[:2]:
        for _ in range(2):
            step(graphs, work, bucket)
    assert step(graphs, work, buckets[0])
    for _ in range(2):
        step(graphs, work, buckets[2])
    assert len(graphs) == 2
    assert step(graphs, work, buckets[0]) and step(graphs, work, buckets[2])
    assert not step(graphs, work, buckets[1])
    work.context.wait(work.stream)
    graphs.close()


def test_where_nothing_can_be_captured_runs_go_on(work: Work) -> None:
    graphs = DecodeGraphs(work.context)
    for value in (1, 2, 3):
        work.give(value)
        assert not step(graphs, work, Bucket(1, 1), can_capture=False)
        assert work.result() == value
    assert graphs.failure and len(graphs) == 0


def test_a_capture_that_fails_is_the_last_one(work: Work) -> None:
    graphs, bucket = DecodeGraphs(work.context), Bucket(1, 1)

    def refuses() -> None:
        raise CudaError("not in a capture")

    work.run()
    graphs.after_run(bucket, refuses, True, work.stream)
    work.run()
    graphs.after_run(bucket, refuses, True, work.stream)
    assert graphs.failure == "not in a capture" and len(graphs) == 0
    work.give(6)
    assert not step(graphs, work, bucket)
    assert work.result() == 6  # the stream has left its capture


def test_a_lost_context_is_not_taken_for_a_capture_that_failed(work: Work) -> None:
    graphs, bucket = DecodeGraphs(work.context), Bucket(1, 1)

    def breaks() -> None:
        raise StickyCudaError("CUDA_ERROR_ILLEGAL_ADDRESS")

    graphs.after_run(bucket, breaks, True, work.stream)
    with pytest.raises(StickyCudaError):
        graphs.after_run(bucket, breaks, True, work.stream)


def test_memory_of_graphs_is_bounded(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter(range(10_000, 0, -100))
    memory: Callable[[Any], tuple[int, int]] = lambda _self: (next(free), 10_000)  # noqa: E731
    monkeypatch.setattr(Context, "memory", memory)
    graphs = DecodeGraphs(work.context, max_bytes=250)
    for size in (1, 2, 4):
        for _ in range(2):
            step(graphs, work, Bucket(size, 1))
    assert len(graphs) == 2 and graphs.num_bytes == 200
    work.context.wait(work.stream)
    graphs.close()
