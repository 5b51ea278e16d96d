"""Jobs side by side: within the budget, in order, each once, whatever fails meanwhile."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plansmith.fleet import job_queue
from plansmith.fleet.budget import Budget
from plansmith.fleet.job_queue import Job, JobQueue, LetGo
from plansmith.runtime.errors import BuildError, OutOfMemoryError

BASE = 10


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a job of a test goes. num_busy : how often another builder has it first; lets_go : before its end."""

    memory: int
    lane: str
    num_busy: int
    fails: bool
    lets_go: bool


plans = st.lists(
    st.builds(
        Plan,
        memory=st.integers(0, 130),
        lane=st.sampled_from(["", "", "gpu", "gate"]),
        num_busy=st.sampled_from([0, 0, 0, 1, 2]),
        fails=st.sampled_from([False, False, False, True]),
        lets_go=st.booleans(),
    ),
    max_size=12,
)


class Yard:
    """Notes what runs beside what."""

    def __init__(self, plans: list[Plan]) -> None:
        self.plans = plans
        self.running: set[int] = set()
        self.most_memory = self.most_jobs = 0
        self.tries: collections.Counter[int] = collections.Counter()
        self.done: collections.Counter[int] = collections.Counter()
        self.shared_lanes: list[str] = []
        self._lock = threading.Lock()

    def jobs(self) -> list[Job]:
        return [Job(str(idx), plan.memory, self._work(idx), plan.lane) for idx, plan in enumerate(self.plans)]

    def _work(self, idx: int) -> Callable[[LetGo], bool]:
        def run(let_go: LetGo) -> bool:
            self._begin(idx)
            threading.Event().wait(0.0005 * (idx % 3))  # lets others in
            is_done = self._end(idx)
            if self.plans[idx].lets_go:
                let_go()
                threading.Event().wait(0.0005 * (idx % 2))
            if is_done and self.plans[idx].fails:
                raise BuildError(f"job {idx} failed")
            return is_done

        return run

    def _begin(self, idx: int) -> None:
        with self._lock:
            lanes = [self.plans[other].lane for other in self.running]
            if self.plans[idx].lane in lanes and self.plans[idx].lane:
                self.shared_lanes.append(self.plans[idx].lane)
            self.running.add(idx)
            self.tries[idx] += 1
            self.most_jobs = max(self.most_jobs, len(self.running))
            self.most_memory = max(self.most_memory, sum(self.plans[one].memory for one in self.running))

    def _end(self, idx: int) -> bool:
        with self._lock:
            self.running.remove(idx)
            if self.tries[idx] <= self.plans[idx].num_busy:
                return False
            self.done[idx] += 1
        return True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_queue, "BUSY_PAUSE_S", 0.002)


@settings(max_examples=150)
@given(plans=plans, workers=st.integers(1, 5), memory=st.integers(20, 120))
def test_any_jobs(plans: list[Plan], workers: int, memory: int) -> None:
    """All that fit run once to their end, never more at a time than there is memory, lanes and workers for."""
    yard = Yard(plans)
    errors = JobQueue(Budget(memory, workers), BASE, threading.Event()).run(yard.jobs())
    too_large = {str(idx) for idx, plan in enumerate(plans) if BASE + plan.memory > memory}
    failed = {str(idx) for idx, plan in enumerate(plans) if plan.fails}
    assert set(errors) == too_large | failed
    assert {name for name, error in errors.items() if isinstance(error, OutOfMemoryError)} == too_large
    assert yard.done == collections.Counter(idx for idx in range(len(plans)) if str(idx) not in too_large)
    assert all(yard.tries[idx] == plans[idx].num_busy + 1 for idx in yard.done)
    assert BASE + yard.most_memory <= memory or not yard.done
    assert yard.most_jobs <= workers
    assert yard.shared_lanes == []


def test_order() -> None:
    """One worker does them one after another; two busy ones come again behind the rest."""
    begun: list[str] = []

    def job(name: str, *, busy: bool = False) -> Job:
        def run(_: LetGo) -> bool:
            begun.append(name)
            return not busy or begun.count(name) > 1

        return Job(name, 1, run)

    jobs = [job("a", busy=True), job("b"), job("c")]
    assert JobQueue(Budget(100, 1), BASE, threading.Event()).run(jobs) == {}
    assert [name for name in begun if name != "a"] == ["b", "c"]
    assert begun[0] == "a" and begun.count("a") == 2


def test_what_does_not_fit_waits_and_smaller_ones_go_before_it() -> None:
    """A large job runs alone, once those that were in its way are done."""
    gate, begun = threading.Event(), list[str]()

    def first(_: LetGo) -> bool:
        begun.append("first")
        return gate.wait(30)

    def large(_: LetGo) -> bool:
        begun.append("large")
        return True

    def small(_: LetGo) -> bool:
        begun.append("small")
        gate.set()
        return True

    jobs = [Job("first", 50, first), Job("large", 80, large), Job("small", 30, small)]
    assert JobQueue(Budget(100, 3), BASE, threading.Event()).run(jobs) == {}
    assert begun == ["first", "small", "large"]


def test_the_next_begins_once_a_job_lets_go() -> None:
    """It has the worker, the memory and the lane of one that only stores what it made; both are waited for."""
    begun, ended = threading.Event(), list[str]()

    def stores(let_go: LetGo) -> bool:
        let_go()
        assert begun.wait(30)
        ended.append("stores")
        return True

    def second(_: LetGo) -> bool:
        begun.set()
        return True

    jobs = [Job("stores", 90, stores, "gpu"), Job("second", 90, second, "gpu")]
    assert JobQueue(Budget(100, 1), BASE, threading.Event()).run(jobs) == {}
    assert ended == ["stores"]


def test_what_fails_after_it_let_go_has_failed() -> None:
    def stores(let_go: LetGo) -> bool:
        let_go()
        raise BuildError("the disk is full")

    errors = JobQueue(Budget(100, 1), BASE, threading.Event()).run([Job("stores", 1, stores)])
    assert str(errors["stores"]) == "the disk is full"


def test_what_fits_no_budget_says_what_would() -> None:
    ran = []
    jobs = [
        Job("big/fp16/sm89", 7_900_000_000, lambda _: True),
        Job("small", 10, lambda _: not ran.append(1)),
    ]
    errors = JobQueue(Budget(2_000_000_000, 2), 300_000_000, threading.Event()).run(jobs)
    assert ran == [1]
    assert str(errors["big/fp16/sm89"]) == (
        "big/fp16/sm89 needs about 7900 MB beside the 300 MB that this process holds, the budget is 2000 MB; give "
        "--memory 8200MB if this machine has it, or build it on a larger one"
    )


@pytest.mark.parametrize("error", [KeyError("a bug"), KeyboardInterrupt(), SystemExit(143)])
def test_what_is_no_error_of_ours_stops_the_rest(error: BaseException) -> None:
    """Jobs that run see the event; those that have not begun never do."""
    stop, ran = threading.Event(), list[str]()

    def breaks(_: LetGo) -> bool:
        raise error

    def runs(_: LetGo) -> bool:
        ran.append("beside")
        return stop.wait(30)

    def never(_: LetGo) -> bool:
        ran.append("never")
        return True

    jobs = [Job("beside", 1, runs), Job("breaks", 1, breaks), Job("never", 90, never)]
    with pytest.raises(type(error)):
        JobQueue(Budget(100, 2), BASE, stop).run(jobs)
    assert stop.is_set() and ran == ["beside"]


def test_no_job_begins_once_it_is_stopped() -> None:
    """And the queue ends, rather than wait for what will not come."""
    stop, ran = threading.Event(), list[int]()

    def first(_: LetGo) -> bool:
        ran.append(1)
        stop.set()
        return True

    def second(_: LetGo) -> bool:
        ran.append(2)
        return True

    assert JobQueue(Budget(100, 1), BASE, stop).run([Job("1", 1, first), Job("2", 1, second)]) == {}
    assert ran == [1]
