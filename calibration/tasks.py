"""A small set of tasks, scored by the log-likelihood of each choice: does the engine still know what the original knew?

Each item is a context and its choices; the choice with the largest total log-probability is the answer.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..runtime.errors import InvalidArgumentError
from ..runtime.tokenizer import Tokenizer
from .eval_text import DATA
from .scoring import PlanRunner, TokenRun, log_softmax

TASKS_FILE = DATA / "tasks.jsonl"

Step = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class TaskItem:
    """A question. The context ends where a choice begins (choices start with their own blank)."""

    task: str
    context: str
    choices: tuple[str, ...]
    answer: int


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """Of one task, or of all: shares of the items from 0 to 1.

    agreement : how often both choose the same, right or wrong
    """

    task: str
    items: int
    accuracy: float
    accuracy_reference: float
    agreement: float


@dataclasses.dataclass(frozen=True)
class TaskReport:
    """Results by task, and over all items."""

    tasks: tuple[TaskResult, ...]
    overall: TaskResult

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return dataclasses.asdict(self)


def load_tasks() -> tuple[TaskItem, ...]:
    """Return the items that come with plansmith."""
    lines = TASKS_FILE.read_text(encoding="utf-8").splitlines()
    return tuple(
        TaskItem(one["task"], one["context"], tuple(one["choices"]), one["answer"])
        for one in map(json.loads, lines)
    )


def run_tasks(
    engine: PlanRunner,
    original: PlanRunner,
    tokenizer: Tokenizer,
    tell: Step,
    items: Sequence[TaskItem] | None = None,
) -> TaskReport:
    """Return both models' accuracy, and how often they choose the same.

    tell : (phase, done, in all)
    items : those of load_tasks() when None
    raises ShapeError where an item is longer than the engine takes, ExecutorError for logits that are not finite
    """
    items = load_tasks() if items is None else items
    if not items:
        raise InvalidArgumentError("there are no tasks to run; give at least one item")
    answers = np.array([item.answer for item in items])
    chosen = []
    for runner in (engine, original):
        scores = choice_scores(runner, tokenizer, items, functools.partial(tell, f"tasks, {runner.label}"))
        chosen.append(np.array([int(np.argmax(one)) for one in scores]))
    right, right_reference = chosen[0] == answers, chosen[1] == answers
    same = chosen[0] == chosen[1]
    groups: dict[str, list[int]] = collections.defaultdict(list)
    for idx, item in enumerate(items):
        groups[item.task].append(idx)

    def result(task: str, at: Any) -> TaskResult:
        return TaskResult(
            task,
            len(right[at]),
            float(right[at].mean()),
            float(right_reference[at].mean()),
            float(same[at].mean()),
        )

    by_task = tuple(result(task, at) for task, at in groups.items())
    return TaskReport(by_task, result("all", slice(None)))


def choice_scores(
    runner: PlanRunner, tokenizer: Tokenizer, items: Sequence[TaskItem], tell: Callable[[int, int], None]
) -> list[list[float]]:
    """Return the log-probability, in nats, of each item's choices behind its context.

    What is scored are the tokens of context + choice behind those that the context and all its choices begin with.
    """
    # Choices of one token share their run: its last token need not be run.
    runs: dict[tuple[int, ...], int] = {}
    wanted: dict[int, list[tuple[int, int, int, int]]] = collections.defaultdict(list)
    scores = [[0.0] * len(item.choices) for item in items]
    for idx, item in enumerate(items):
        encoded = [tokenizer.encode(item.context + text) for text in item.choices]
        # All choices of an item from the same place on, also where a choice's letters join the context's last token.
        first = _common_start([tokenizer.encode(item.context), *encoded])
        for choice, ids in enumerate(encoded):
            run = runs.setdefault(tuple(ids[:-1]), len(runs))
            wanted[run] += [(at, ids[at], idx, choice) for at in range(first, len(ids))]
    firsts = {run: min(at for at, *_ in cells) - 1 for run, cells in wanted.items()}
    token_runs = [TokenRun(tokens, firsts[run]) for tokens, run in runs.items()]
    for piece in runner.run(token_runs):
        log_probs = log_softmax(piece.logits)
        for at, token, idx, choice in wanted[piece.sequence]:
            row = at - 1 - piece.start
            if 0 <= row < len(log_probs):
                scores[idx][choice] += float(log_probs[row, token])
        tell(piece.sequence + 1, len(token_runs))
    return scores


def _common_start(rows: Sequence[Sequence[int]]) -> int:
    """Return how many tokens all rows begin with, at least 1 and so many that each has one more."""
    same = 0
    for column in zip(*rows, strict=False):
        if len(set(column)) > 1:
            break
        same += 1
    return max(1, min(same, min(map(len, rows[1:])) - 1))
