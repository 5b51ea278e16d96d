"""The accuracy gate: bounds on what a precision may cost, and the error of a build that does not keep them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from ..builder.checkpoint import Checkpoint
from ..builder.limits import Limits
from ..builder.precision import Precision
from ..builder.progress import Progress
from ..builder.scratch import scratch_directory
from ..runtime.errors import BuildError, InvalidArgumentError
from .eval_subject import original_of
from .evaluate import EvalOptions, EvalReport, evaluate_plan
from .mixture import quantized_layers
from .quality import Quality
from .scoring import compile_cpu
from .sensitivity import Sensitivity, measure_sensitivity
from .tasks import TaskResult

_QUALITY: dict[str, Callable[[Quality], float]] = {
    "kl": lambda q: q.kl,
    "kl_p99": lambda q: q.kl_p99,
    "top1": lambda q: q.top1,
    "ppl": lambda q: q.ppl,
    "ppl_ratio": lambda q: q.ppl / q.ppl_reference,
    "ppl_increase": lambda q: q.ppl - q.ppl_reference,
}
_TASKS: dict[str, Callable[[TaskResult], float]] = {
    "task_acc": lambda t: t.accuracy,
    "task_drop": lambda t: t.accuracy_reference - t.accuracy,
}
METRICS = {
    "kl": "mean KL(original || engine), nats",
    "kl_p99": "its 99th percentile over the tokens",
    "top1": "share of tokens whose best next token is the original's, 0..1",
    "ppl": "the engine's perplexity",
    "ppl_ratio": "the engine's perplexity by the original's",
    "ppl_increase": "the engine's perplexity less the original's",
    "task_acc": "the engine's accuracy on the tasks, 0..1",
    "task_drop": "the original's accuracy on the tasks less the engine's",
}
SCOPES = ("short", "long")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_BOUND = re.compile(r"\s*([a-z_0-9]+)\s*(?:@\s*([a-z_0-9]+))?\s*(<=|>=|<|>)\s*([^\s<>=]+)\s*")


@dataclasses.dataclass(frozen=True)
class Bound:
    """One bound.

    scope : "short" or "long", the shortest or the longest of the contexts; "" = all of them together
    """

    metric: str
    scope: str
    compare: str
    value: float

    @property
    def name(self) -> str:
        """The metric with its scope, e.g. "kl@long"."""
        return f"{self.metric}@{self.scope}" if self.scope else self.metric

    def __str__(self) -> str:
        return f"{self.name}{self.compare}{self.value:g}"

    def measured(self, report: EvalReport) -> float:
        """Return what the report has for the metric; NaN where it was not measured."""
        if self.metric in _TASKS:
            return math.nan if report.tasks is None else _TASKS[self.metric](report.tasks.overall)
        quality = report.overall
        if self.scope:
            quality = report.contexts[0 if self.scope == "short" else -1]
        return _QUALITY[self.metric](quality)


@dataclasses.dataclass(frozen=True)
class Failure:
    """A bound that was not kept, and what was measured."""

    bound: Bound
    got: float

    def __str__(self) -> str:
        bound = self.bound
        off = f", off by {abs(self.got - bound.value):.2g}" if math.isfinite(self.got) else ""
        return f"{bound.name} is {self.got:.4g}, wanted {bound.compare} {bound.value:g}{off}"


@dataclasses.dataclass(frozen=True)
class Gate:
    """Bounds that all have to be kept."""

    bounds: tuple[Bound, ...]

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Return the gate of "kl<=0.05,top1@long>=0.95": metrics of METRICS, with @short or @long for one context.

        raises InvalidArgumentError naming the part that cannot be read, and what is known
        """
        parts = [part for part in text.split(",") if part.strip()]
        if not parts:
            raise InvalidArgumentError(
                "--gate is empty; give bounds with commas between, e.g. kl<=0.05,top1>=0.95"
            )
        return cls(tuple(_parse(part) for part in parts))

    @property
    def needs_tasks(self) -> bool:
        """Whether a bound is on the tasks."""
        return any(bound.metric in _TASKS for bound in self.bounds)

    def options(self, options: EvalOptions | None = None) -> EvalOptions:
        """Return the options with the tasks where a bound is on them."""
        options = options or EvalOptions()
        return dataclasses.replace(options, tasks=options.tasks or self.needs_tasks)

    def check(self, report: EvalReport) -> list[Failure]:
        """Return the bounds that a report does not keep; what was not measured, or is NaN, does not keep any."""
        measured = [(bound, bound.measured(report)) for bound in self.bounds]
        return [
            Failure(bound, got) for bound, got in measured if not _COMPARE[bound.compare](got, bound.value)
        ]

    def verdict(self, report: EvalReport) -> dict[str, Any]:
        """Return the gate's part of a report as JSON values: passed, and each bound with what was measured."""
        failed = {failure.bound for failure in self.check(report)}
        return {
            "passed": not failed,
            "bounds": [
                {
                    "metric": bound.name,
                    "compare": bound.compare,
                    "wanted": bound.value,
                    "got": _finite(bound.measured(report)),
                    "passed": bound not in failed,
                }
                for bound in self.bounds
            ],
        }

    def __str__(self) -> str:
        return ",".join(map(str, self.bounds))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _parse(part: str) -> Bound:
    match = _BOUND.fullmatch(part)
    known = f"metrics are {', '.join(METRICS)}, all but the tasks' also with @short or @long"
    if match is None:
        raise InvalidArgumentError(
            f"--gate {part.strip()!r} is not METRIC<=NUMBER or METRIC>=NUMBER; write e.g. kl<=0.05 ({known})"
        )
    metric, scope, compare, number = match[1], match[2] or "", match[3], match[4]
    if metric not in METRICS:
        raise InvalidArgumentError(
            f"--gate {part.strip()!r} has the metric {metric!r}, which is not known; {known}"
        )
    if scope and (scope not in SCOPES or metric in _TASKS):
        raise InvalidArgumentError(
            f"--gate {part.strip()!r} asks for {metric}@{scope}, which there is not; {known}"
        )
    try:
        value = float(number.removesuffix("%")) / (100.0 if number.endswith("%") else 1.0)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidArgumentError(
            f"--gate {part.strip()!r} has {number!r} for a number; write a decimal number such as 0.05, or 95%"
        )
    return Bound(metric, scope, compare, value)


def gate_build(
    gate: Gate | str,
    checkpoint: Checkpoint,
    recipe: Precision,
    limits: Limits,
    *,
    plan_path: str | pathlib.Path | None = None,
    against: Checkpoint | None = None,
    options: EvalOptions | None = None,
    sensitivity_tokens: int = 256,
    progress: Progress | None = None,
) -> EvalReport:
    """Return the evaluation of what is being built, with the gate's verdict; raise if it does not pass.

    Everything is as in `try_gate`.
    raises BuildError that says which bound failed, by how much, and which layers cost most; else as evaluate_plan
    """
    report, error = try_gate(
        gate,
        checkpoint,
        recipe,
        limits,
        plan_path=plan_path,
        against=against,
        options=options,
        sensitivity_tokens=sensitivity_tokens,
        progress=progress,
    )
    if error is not None:
        raise error
    return report


def try_gate(
    gate: Gate | str,
    checkpoint: Checkpoint,
    recipe: Precision,
    limits: Limits,
    *,
    plan_path: str | pathlib.Path | None = None,
    against: Checkpoint | None = None,
    options: EvalOptions | None = None,
    sensitivity_tokens: int = 256,
    progress: Progress | None = None,
) -> tuple[EvalReport, BuildError | None]:
    """Return the evaluation of a plan, with the gate's verdict, and the error of a gate that is not passed.

    plan_path : its cpu plan; None = there is none, one of the same recipe is compiled for the time being
    against : the unquantized checkpoint; None = as eval_subject.original_of finds it
    sensitivity_tokens : of the text, to find the layers that cost most when the gate fails; 0 = they are not looked for
    raises as evaluate_plan
    """
    gate = Gate.parse(gate) if isinstance(gate, str) else gate
    options = gate.options(options)
    against = original_of(checkpoint, recipe, limits.max_seq_len) if against is None else against
    with _plan(plan_path, checkpoint, recipe, limits) as plan:
        report = evaluate_plan(plan, checkpoint, recipe, limits, against, options, progress)
    report = dataclasses.replace(report, gate=gate.verdict(report))
    failures = gate.check(report)
    if not failures:
        return report, None
    found = None
    if sensitivity_tokens and quantized_layers(checkpoint.spec, recipe):
        found = measure_sensitivity(
            checkpoint,
            recipe,
            against,
            text=options.text,
            num_tokens=sensitivity_tokens,
            num_threads=options.num_threads,
            weights=options.weights,
            progress=progress,
        )
    return report, gate_error(gate, failures, report, found)


@contextlib.contextmanager
def _plan(
    given: str | pathlib.Path | None, checkpoint: Checkpoint, recipe: Precision, limits: Limits
) -> Iterator[pathlib.Path]:
    if given is not None:
        yield pathlib.Path(given)
        return
    with scratch_directory("gate") as folder:
        plan = folder / "model.plan"
        yield compile_cpu(checkpoint.spec, checkpoint.weights, recipe, limits, plan)


def gate_error(
    gate: Gate, failures: list[Failure], report: EvalReport, sensitivity: Sensitivity | None
) -> BuildError:
    """Return the error of a gate that was not passed; its log lines have every bound and the costly layers."""
    text = f"the accuracy gate failed for {report.precision} against {report.against}: " + "; ".join(
        map(str, failures)
    )
    costly = [] if sensitivity is None else sensitivity.costliest(5)
    if costly:
        text += "; most of it comes from " + ", ".join(
            f"{row.layer} (KL {row.kl_alone:.3g})" for row in costly
        )
    text += (
        "; nothing was written: take a recipe with more bits, keep those layers in float, or widen the gate"
    )
    bounds = [
        f"{bound}: {bound.measured(report):.4g}, {'FAILED' if any(f.bound == bound for f in failures) else 'passed'}"
        for bound in gate.bounds
    ]
    return BuildError(
        text, [*bounds, *(f"{row.layer}: KL {row.kl_alone:.4g} when it alone is quantized" for row in costly)]
    )
