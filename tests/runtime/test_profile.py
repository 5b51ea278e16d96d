"""Profiles of the cpu target through Python: what they count, how two of them are subtracted, and what has none."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_executor import FakeModel
from plansmith.runtime.engine import Engine, SamplingParams
from plansmith.runtime.errors import InvalidArgumentError, UnsupportedError
from plansmith.runtime.executor import PythonExecutor, cpu_executor
from plansmith.runtime.profile import CpuPeaks, OpProfile, best_peaks, measure_peaks, since

TinyEngine = Callable[[str, str], Path]
PEAKS = CpuPeaks(2, 10e9, 5e9, 100e9, 400e9, 200e9)


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)


def record(**fields: object) -> OpProfile:
    zero = OpProfile("layers.0.o", "linear", "int8", "decode", "int8", 4, 4, *[0] * 7)
    return dataclasses.replace(zero, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_an_engine_says_what_its_ops_took(tiny_engine: TinyEngine, precision: str) -> None:
    with Engine.open(tiny_engine("llama", precision), num_threads=2, profile=True) as engine:
        assert engine.profile() == []
        engine.generate([[5, 6, 7, 8, 9]], greedy(4))
        records = engine.profile()
        stats = engine.stats()
    steps = {one.step_kind: one for one in records if one.is_step}
    assert {kind: (one.calls, one.rows) for kind, one in steps.items()} == {
        "context": (1, 5),
        "decode": (3, 3),
    }
    assert sum(one.time_ns for one in steps.values()) <= stats.step_time_ns * 1.01
    for kind, whole in steps.items():
        ops = [one for one in records if one.step_kind == kind and not one.is_step]
        assert sum(one.time_ns + one.wait_ns for one in ops) <= 1.01 * whole.time_ns
        assert sum(one.bytes for one in ops) == whole.bytes > 0
        assert sum(one.operations for one in ops) == whole.operations > 0
        products = [one for one in ops if one.out_features]
        weights = {"fp32": "f32"}.get(precision, precision)
        in_layers = [one for one in products if one.name.startswith("layers.")]
        assert {one.weights for one in in_layers} == {weights}
        for one in in_layers:
            assert one.operations >= 2 * one.out_features * one.in_features * one.rows
            assert one.arithmetic == ("f32" if precision == "fp32" else "int8")


def test_the_tokens_are_those_without_a_profile(tiny_engine: TinyEngine) -> None:
    tokens = []
    for profile in (False, True):
        with Engine.open(tiny_engine("llama", "int8"), num_threads=2, profile=profile) as engine:
            tokens.append(engine.generate([[5, 6, 7], [9, 8]], greedy(8)))
    assert [c.token_ids for c in tokens[0]] == [c.token_ids for c in tokens[1]]


def test_it_is_read_while_the_engine_runs(tiny_engine: TinyEngine) -> None:
    with Engine.open(tiny_engine("llama", "fp32"), num_threads=1, profile=True) as engine:
        calls: list[int] = []
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                calls.append(sum(one.calls for one in engine.profile() if one.is_step))

        reader = threading.Thread(target=read)
        reader.start()
        engine.generate([[5, 6, 7]] * 4, greedy(30))
        stop.set()
        reader.join()
        assert calls == sorted(calls)
        assert sum(one.calls for one in engine.profile() if one.is_step) == engine.stats().iter


def test_without_one_there_is_a_clear_error(tiny_engine: TinyEngine) -> None:
    engines = [
        Engine.open(tiny_engine("llama", "fp32"), num_threads=1),
        Engine.from_executor(PythonExecutor(FakeModel())),
    ]
    for engine in engines:
        words = r"keeps no profile; .*Engine\.open\(\.\.\., profile=True\)"
        with engine, pytest.raises(UnsupportedError, match=words) as error:
            engine.profile()
        assert "psm_" not in str(error.value) and "--" not in str(
            error.value
        )  # C's and the command line's words
    with pytest.raises(InvalidArgumentError, match="profile is 'yes', it must be True or False"):
        Engine.open(tiny_engine("llama", "fp32"), profile="yes")  # type: ignore[arg-type]
    executor = cpu_executor(tiny_engine("llama", "fp32") / "targets" / "cpu" / "model.plan")
    with pytest.raises(UnsupportedError, match="profile=True"):
        executor.profile()
    executor.close()


def test_weights_lie_where_they_are_asked_to(tiny_engine: TinyEngine) -> None:
    plan = tiny_engine("llama", "fp32") / "targets" / "cpu" / "model.plan"
    cpu_executor(plan, weights="mapped").close()
    with pytest.raises(InvalidArgumentError, match="auto, mapped, huge_pages"):
        cpu_executor(plan, weights="elsewhere")


def test_two_profiles_are_subtracted() -> None:
    before = [
        record(kind="step", name="", calls=2, bytes=50),
        record(calls=2, time_ns=10, bytes=50),
        record(name="layers.0.o", kind="lora"),
    ]
    after = [
        record(kind="step", name="", calls=5, bytes=80),
        record(calls=5, time_ns=17, bytes=80),
        record(name="layers.0.o", kind="lora"),
        record(kind="step", name="", step_kind="context", calls=1),
        record(step_kind="context", calls=1, time_ns=4),
    ]
    found = since(after, before)
    assert [(one.step_kind, one.kind, one.calls, one.time_ns, one.bytes) for one in found] == [
        ("decode", "step", 3, 0, 30),
        ("decode", "linear", 3, 7, 30),
        ("context", "step", 1, 0, 0),
        ("context", "linear", 1, 4, 0),
    ]
    assert since(before, []) == before[:2]


@pytest.mark.parametrize(
    ("num_bytes", "operations", "arithmetic", "least_s"),
    [
        (10e9, 1e9, "int8", 1.0),  # memory
        (1e9, 800e9, "int8", 2.0),  # arithmetic
        (1e9, 800e9, "f32", 8.0),
        (1e9, 800e9, "bf16", 4.0),
        (0, 0, "f32", 0.0),
    ],
)
def test_the_roofline_is_the_longer_of_two_times(
    num_bytes: float, operations: float, arithmetic: str, least_s: float
) -> None:
    one = record(bytes=int(num_bytes), operations=int(operations), arithmetic=arithmetic)
    assert PEAKS.least_s(one) == pytest.approx(least_s)


def test_a_rate_that_is_not_known_bounds_nothing() -> None:
    peaks = dataclasses.replace(PEAKS, int8_ops_per_s=0.0)
    assert peaks.least_s(record(bytes=10**9, operations=10**15)) == pytest.approx(0.1)


def test_peaks_are_measured_and_the_best_are_kept() -> None:
    peaks = measure_peaks(1)
    assert peaks.num_threads == 1 and peaks.read_bytes_per_s > 0
    better = dataclasses.replace(peaks, read_bytes_per_s=2 * peaks.read_bytes_per_s, f32_ops_per_s=0.0)
    best = best_peaks([peaks, better])
    assert best.read_bytes_per_s == better.read_bytes_per_s and best.f32_ops_per_s == peaks.f32_ops_per_s
    with pytest.raises(InvalidArgumentError, match="sse9"):
        measure_peaks(1, "sse9")


def test_no_more_threads_measure_than_there_are_cores() -> None:
    usable = len(os.sched_getaffinity(0))
    assert measure_peaks(1024).num_threads == usable  # 1024 threads would take minutes
    with pytest.raises(InvalidArgumentError, match="num_threads is 1025"):
        measure_peaks(1025)
