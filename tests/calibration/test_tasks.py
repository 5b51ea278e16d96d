"""Tasks: log-likelihoods against transformers, and items that are what they claim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.limits import make_limits
from plansmith.builder.precision import precision
from plansmith.calibration.eval_text import tokenizer_of
from plansmith.calibration.scoring import PlanRunner, compile_cpu
from plansmith.calibration.tasks import TaskItem, choice_scores, load_tasks, run_tasks
from plansmith.runtime.errors import InvalidArgumentError

LIMITS = make_limits(256, max_batch_size=8, max_num_tokens=40, tokens_per_block=8)


def quiet(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def runners(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    tiny = open_checkpoint(tiny_checkpoint("llama"))
    folder = tmp_path_factory.mktemp("plans")
    made = {
        name: PlanRunner(
            compile_cpu(tiny.spec, tiny.weights, precision(name), LIMITS, folder / f"{name}.plan"),
            LIMITS,
            name,
            1,
        )
        for name in ("fp32", "int4")
    }
    return tiny, made


def test_the_items() -> None:
    items = load_tasks()
    assert len(items) >= 100
    counts = Counter(item.task for item in items)
    assert set(counts) == {"facts", "arithmetic", "grammar", "code", "sentiment", "cloze"}
    assert min(counts.values()) >= 15
    assert len({(item.context, item.choices) for item in items}) == len(items)
    for item in items:
        assert len(set(item.choices)) == len(item.choices) >= 2 and 0 <= item.answer < len(item.choices)
        indented = item.task == "code" and not item.context.splitlines()[-1].strip()
        # A blank at the end makes tokens that no text has, but for an indentation, which the choice completes.
        assert item.context == item.context.rstrip() or indented
    places = Counter(item.answer for item in items if len(item.choices) == 4)
    assert max(places.values()) < 0.4 * sum(places.values()), "the answer's place gives nothing away"


def test_arithmetic_is_right() -> None:
    sums = [item for item in load_tasks() if item.task == "arithmetic" and item.context.endswith("=")]
    assert len(sums) >= 10
    for item in sums:
        right = eval(item.context.rstrip(" ="))
        assert int(item.choices[item.answer]) == right


def test_scores_are_transformers(runners: Any) -> None:
    import torch
    import transformers

    tiny, made = runners
    tokenizer = tokenizer_of(tiny)
    items = [
        TaskItem("a", "the quick brown", (" fox", " lazy dog", " animals and other things"), 0),
        TaskItem("a", "x =", (" 5", " 67", "="), 0),
        TaskItem("a", "there", (" they", "they", "fore"), 0),
    ]
    scores = choice_scores(made["fp32"], tokenizer, items, quiet)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny.path, attn_implementation="eager").eval()
    for item, got in zip(items, scores, strict=True):
        rows = [tokenizer.encode(item.context + choice) for choice in item.choices]
        context = tokenizer.encode(item.context)
        same = 0
        while (
            all(len(row) - 1 > same and row[same] == context[same] for row in rows)
            and same < len(context) - 1
        ):
            same += 1
        if all(len(row) - 1 >= same + 1 and row[same] == context[same] for row in rows):
            same += 1
        for row, score in zip(rows, got, strict=True):
            with torch.inference_mode():
                log_probs = model(torch.tensor([row])).logits[0].double().log_softmax(-1)
            wanted = sum(float(log_probs[at - 1, row[at]]) for at in range(same, len(row)))
            assert score == pytest.approx(wanted, rel=1e-4)


def test_accuracy_and_agreement(runners: Any) -> None:
    tiny, made = runners
    tokenizer = tokenizer_of(tiny)
    items = load_tasks()[:40]
    scores = {name: choice_scores(runner, tokenizer, items, quiet) for name, runner in made.items()}
    best = {name: [int(np.argmax(one)) for one in rows] for name, rows in scores.items()}
    report = run_tasks(made["int4"], made["fp32"], tokenizer, quiet, items)
    answers = [item.answer for item in items]
    right = {
        name: sum(a == b for a, b in zip(rows, answers, strict=True)) / 40 for name, rows in best.items()
    }
    assert report.overall.accuracy == pytest.approx(right["int4"])
    assert report.overall.accuracy_reference == pytest.approx(right["fp32"])
    same = sum(a == b for a, b in zip(best["fp32"], best["int4"], strict=True)) / 40
    assert report.overall.agreement == pytest.approx(same)
    assert report.overall.items == 40 == sum(one.items for one in report.tasks)
    # answers that the original gives make it perfect
    perfect = [TaskItem(i.task, i.context, i.choices, b) for i, b in zip(items, best["fp32"], strict=True)]
    assert run_tasks(made["fp32"], made["fp32"], tokenizer, quiet, perfect).overall.accuracy == 1.0
    with pytest.raises(InvalidArgumentError, match="no tasks"):
        run_tasks(made["fp32"], made["fp32"], tokenizer, quiet, [])
