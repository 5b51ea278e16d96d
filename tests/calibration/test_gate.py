"""The gate: what can be written, what is checked, and the error of a build that does not pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from plansmith.builder.checkpoint import Checkpoint, open_checkpoint
from plansmith.builder.limits import make_limits
from plansmith.builder.precision import precision
from plansmith.calibration.evaluate import EvalOptions, EvalReport
from plansmith.calibration.gate import METRICS, Gate, gate_build
from plansmith.calibration.quality import Quality
from plansmith.calibration.tasks import TaskReport, TaskResult
from plansmith.runtime.errors import BuildError, InvalidArgumentError

LIMITS = make_limits(256, max_batch_size=4, max_num_tokens=40, max_seq_len=96, tokens_per_block=8)
OPTIONS = EvalOptions(length=200, contexts=(16, 64), greedy_tokens=0, num_threads=1)


def quality(context: int, kl: float, top1: float, ppl: float) -> Quality:
    return Quality(context, 2, 100, ppl, 10.0, kl, 0.001, 5 * kl, 9 * kl, top1)


REPORT = EvalReport(
    plan="p",
    checkpoint="c",
    precision="int4",
    against="a",
    text="t",
    text_tokens=400,
    contexts=(quality(16, 0.01, 0.98, 10.1), quality(64, 0.05, 0.9, 11.0)),
    overall=quality(0, 0.03, 0.94, 10.5),
    seconds=1.0,
    tasks=TaskReport((), TaskResult("all", 100, 0.72, 0.75, 0.9)),
)


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("kl<=0.03", True),
        ("kl<0.03", False),
        ("kl@short<=0.01, kl@long<=0.05", True),
        ("kl@long<=0.04", False),
        ("kl_p99@short<=0.05,kl_p99@long<=0.25", True),
        ("top1>=94%", True),
        ("top1>0.94", False),
        ("top1@long >= 0.9", True),
        ("ppl<=10.5,ppl_ratio<=1.05,ppl_increase<=0.5", True),
        ("ppl_ratio@long<=1.09", False),
        ("ppl_increase@short<=0.09", False),
        ("task_acc>=0.72,task_drop<=3.1%", True),
        ("task_drop<=0.02", False),
    ],
)
def test_bounds(text: str, passes: bool) -> None:
    gate = Gate.parse(text)
    assert (gate.check(REPORT) == []) is passes
    assert gate.verdict(REPORT)["passed"] is passes
    assert Gate.parse(str(gate)) == gate


def test_a_failure_says_by_how_much() -> None:
    (failure,) = Gate.parse("top1>=0.9,kl@long<=0.02").check(REPORT)
    assert str(failure) == "kl@long is 0.05, wanted <= 0.02, off by 0.03"
    assert (failure.got, failure.bound.value) == (0.05, 0.02)


def test_what_is_not_a_number_or_not_measured_fails() -> None:
    broken = dataclasses.replace(REPORT, overall=quality(0, math.nan, math.nan, 1.0), tasks=None)
    for text in ("kl<=1", "kl>=0", "top1>=0", "task_acc>=0", "task_drop<=1"):
        gate = Gate.parse(text)
        assert len(gate.check(broken)) == 1, text
        assert gate.verdict(broken)["bounds"][0]["got"] is None
    assert Gate.parse("task_acc>=0").options(OPTIONS).tasks and not Gate.parse("kl<=1").options(OPTIONS).tasks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (" , ", "is empty"),
        ("kl", "'kl' is not METRIC<=NUMBER"),
        ("kl=0.1", "is not METRIC<=NUMBER"),
        ("kl<=", "is not METRIC<=NUMBER"),
        ("kl<=0.1<=2", "is not METRIC<=NUMBER"),
        ("kl<=0.1;top1>=0.9", "is not METRIC<=NUMBER"),
        ("bleu>=30", "'bleu', which is not known"),
        ("kl@middle<=0.1", "kl@middle, which there is not"),
        ("task_acc@long>=0.5", "task_acc@long, which there is not"),
        ("kl<=small", "'small' for a number"),
        ("kl<=nan", "'nan' for a number"),
        ("kl<=inf", "'inf' for a number"),
    ],
)
def test_expressions_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        Gate.parse(text)
    if "number" not in message and "empty" not in message:
        assert all(metric in str(caught.value) for metric in METRICS)


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Callable[[str], Path]) -> Checkpoint:
    return open_checkpoint(tiny_checkpoint("llama"))


def test_a_build_that_passes(tiny: Checkpoint) -> None:
    report = gate_build("kl<=0.05,top1>=0.8,task_drop<=0.1", tiny, precision("int8"), LIMITS, options=OPTIONS)
    assert report.gate is not None and report.gate["passed"]
    assert report.tasks is not None  # the bound asked for them
    assert 0 < report.overall.kl <= 0.05


def test_a_build_that_fails(tiny: Checkpoint) -> None:
    with pytest.raises(BuildError) as caught:
        gate_build(
            "kl<=0.01,top1>=0.1", tiny, precision("int4"), LIMITS, options=OPTIONS, sensitivity_tokens=64
        )
    text, lines = str(caught.value), caught.value.log_lines
    assert "the accuracy gate failed for int4" in text and "wanted <= 0.01, off by 0." in text
    assert "top1" not in text  # that one was kept
    assert "most of it comes from layers.0 (KL " in text and text.endswith("or widen the gate")
    assert [line.split(":")[0] for line in lines] == [
        "kl<=0.01",
        "top1>=0.1",
        "layers.0",
        "layers.1",
        "lm_head",
    ]
    assert lines[0].endswith("FAILED") and lines[1].endswith("passed")


def test_a_float_build_fails_without_layers(tiny: Checkpoint) -> None:
    with pytest.raises(BuildError) as caught:
        gate_build("ppl<=1", tiny, precision("bf16"), LIMITS, options=OPTIONS)
    assert "most of it comes" not in str(caught.value)
