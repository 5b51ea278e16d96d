"""plansmith bench on a tiny engine, and its arithmetic."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plansmith.cli import _measure, bench
from plansmith.cli._measure import Load, RequestTimes, summarize
from plansmith.cli._workload import Work, random_workload, read_workload
from plansmith.runtime.engine import Engine, SamplingParams
from plansmith.runtime.errors import InvalidArgumentError

Run = Callable[..., Any]
REQUESTS = [{"prompt_ids": [3 + i, 4, 5], "output_len": 4 + i} for i in range(5)]


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_a_random_workload(plansmith: Run, engine_dir: Path) -> None:
    flags = ("--requests", 6, "--input-len", 20, "--output-len", 5, "--threads", 1)
    result = plansmith("bench", engine_dir, *flags, "--json")
    fields = json.loads(result.out)
    assert result.status == 0 and fields["failures"] == []
    assert (fields["num_requests"], fields["prompt_tokens"], fields["generated_tokens"]) == (6, 120, 30)
    assert [len(ids) for ids in fields["token_ids"]] == [5] * 6 and len(fields["ttft_s"]) == 6
    assert fields["generated_tokens_per_s"] == pytest.approx(30 / fields["wall_s"])
    assert fields["steps"] >= 5 + 120 // 32 and fields["mean_tokens_a_step"] * fields[
        "steps"
    ] == pytest.approx(144)
    assert 0 < fields["kv"]["peak_used_blocks"] <= fields["kv"]["max_num_blocks"]
    assert 0 <= fields["kv"]["waste"] < 1 and fields["peak_rss_bytes"] > 10 << 20
    again = json.loads(plansmith("bench", engine_dir, *flags, "--json").out)
    assert again["token_ids"] == fields["token_ids"]
    other = json.loads(plansmith("bench", engine_dir, *flags, "--seed", 1, "--json").out)
    assert other["token_ids"] != fields["token_ids"]


def test_a_workload_file_is_run_as_it_says(plansmith: Run, engine_dir: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "w.json", {"seed": 1, "single": REQUESTS[0], "requests16": REQUESTS})
    fields = json.loads(plansmith("bench", engine_dir, "--workload", path, "--json").out)
    assert [len(ids) for ids in fields["token_ids"]] == [4, 5, 6, 7, 8]
    with Engine.open(engine_dir, num_threads=1) as engine:
        for request, ids in zip(REQUESTS, fields["token_ids"], strict=True):
            params = SamplingParams(
                max_tokens=request["output_len"],
                min_tokens=request["output_len"],
                temperature=0.0,
                ignore_eos=True,
            )
            assert list(engine.generate([request["prompt_ids"]], params)[0].token_ids) == ids
    single = json.loads(plansmith("bench", engine_dir, "--workload", path, "--set", "single", "--json").out)
    assert single["num_requests"] == 1 and single["generated_tokens"] == 4


@pytest.mark.parametrize(
    "flags", [("--concurrency", 2), ("--rate", 500, "--concurrency", 3), ("--rate", 500)]
)
def test_other_loads_generate_the_same(plansmith: Run, engine_dir: Path, flags: tuple[Any, ...]) -> None:
    base = ("--requests", 7, "--input-len", 9, "--output-len", 4, "--json")
    expected = json.loads(plansmith("bench", engine_dir, *base).out)["token_ids"]
    result = plansmith("bench", engine_dir, *base, *flags)
    assert result.status == 0 and json.loads(result.out)["token_ids"] == expected


def test_repeat_reports_the_median_run_and_all_speeds(plansmith: Run, engine_dir: Path) -> None:
    flags = ("--requests", 3, "--input-len", 5, "--output-len", 3, "--repeat", 3)
    fields = json.loads(plansmith("bench", engine_dir, *flags, "--json").out)
    speeds = fields["generated_tokens_per_s_of_runs"]
    assert len(speeds) == fields["num_runs"] == 3
    assert fields["generated_tokens_per_s"] == sorted(speeds)[1]
    text = plansmith("bench", engine_dir, *flags).out
    for words in ("generated tokens/s", "in 3 runs", "KV blocks", "first token", "p99", "steps"):
        assert words in text


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--input-len", 97), "max_input_len is 96"),
        (("--input-len", 10**9), "max_input_len is 96"),
        (("--input-len", 2, "--output-len", 300), "max_seq_len 128"),
        (("--set", "single"), "--workload"),
        (("--workload", "nowhere.json"), "is not a file"),
        (("--target", "sm89"), "no target 'sm89'"),
    ],
)
def test_what_cannot_be_is_refused_before_it_runs(
    plansmith: Run, engine_dir: Path, flags: tuple[Any, ...], text: str
) -> None:
    import re

    result = plansmith("bench", engine_dir, *flags)
    assert result.status == 1 and re.search(text, result.err)


def test_failed_requests_make_the_command_fail(
    plansmith: Run, engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_few(*args: Any, **kwargs: Any) -> Any:
        return SamplingParams(**{**kwargs, "max_tokens": 2, "min_tokens": 0})

    monkeypatch.setattr(_measure, "SamplingParams", too_few)
    result = plansmith("bench", engine_dir, "--requests", 3, "--input-len", 4, "--output-len", 4, "--json")
    assert (
        result.status == 1 and "3 requests failed; the first: request 0: 2 tokens instead of 4" in result.err
    )
    assert len(json.loads(result.out)["failures"]) == 3


def test_the_arithmetic_of_a_known_run() -> None:
    works = [Work([1] * 10, 3), Work([1] * 20, 2), Work([1], 1)]
    times = [
        RequestTimes(1.0, [1.5, 1.6, 1.8], [7, 8, 9]),
        RequestTimes(1.2, [2.0, 2.4], [7, 8]),
        RequestTimes(1.0, [], [], "it broke"),
    ]
    result = summarize(works, times, wall_s=2.0)
    assert (result["prompt_tokens"], result["generated_tokens"]) == (31, 5)
    assert (result["generated_tokens_per_s"], result["total_tokens_per_s"]) == (2.5, 18.0)
    assert result["ttft_s"] == pytest.approx([0.5, 0.8])
    assert result["ttft"]["mean_ms"] == pytest.approx(650) and result["ttft"]["p50_ms"] == pytest.approx(650)
    assert result["inter_token"]["mean_ms"] == pytest.approx((100 + 200 + 400) / 3)
    assert result["inter_token"]["p50_ms"] == pytest.approx(200)
    assert result["e2e"]["p99_ms"] == pytest.approx(np.percentile([800, 1200], 99))
    assert result["failures"] == ["request 2: it broke"]


def test_arrivals_are_a_poisson_process_of_the_seed() -> None:
    arrivals = Load(rate=10.0, seed=3).arrivals_s(4000)
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0 and (gaps > 0).all()
    # Exponential gaps: mean and deviation are both 1 / rate; 4000 of them are within 8% of it.
    assert gaps.mean() == pytest.approx(0.1, rel=0.08) and gaps.std() == pytest.approx(0.1, rel=0.08)
    assert arrivals == Load(rate=10.0, seed=3).arrivals_s(4000) != Load(rate=10.0, seed=4).arrivals_s(4000)
    assert Load().arrivals_s(3) == [0.0, 0.0, 0.0]


def test_random_workloads_depend_on_the_seed_alone() -> None:
    first = random_workload(4, 8, 2, 100, seed=1)
    assert first == random_workload(4, 8, 2, 100, seed=1) != random_workload(4, 8, 2, 100, seed=2)
    assert {len(work.prompt_ids) for work in first} == {8}
    assert all(0 <= token < 100 for work in first for token in work.prompt_ids)


def test_the_forms_of_a_workload_file(tmp_path: Path) -> None:
    expected = [Work(r["prompt_ids"], r["output_len"]) for r in REQUESTS]  # type: ignore[arg-type]
    plain = write(tmp_path / "plain.json", REQUESTS)
    assert read_workload(plain, None) == expected
    named = write(
        tmp_path / "named.json",
        {
            "vocab": 9,
            "x": REQUESTS[1],
            "shared": {"prefix_len": 2, "requests": REQUESTS},
            "requests16": REQUESTS[:2],
        },
    )
    assert read_workload(named, None) == expected[:2]
    assert read_workload(named, "shared") == expected
    assert read_workload(named, "x") == expected[1:2]


@pytest.mark.parametrize(
    ("content", "name", "text"),
    [
        ("{", None, "not JSON"),
        ("[" * 99_999, None, "not JSON"),
        ("3", None, "must be a list or named sets"),
        ("[]", None, "no requests"),
        ("{}", None, "no set"),
        ('{"a": []}', "b", "no set 'b', only a"),
        ("[1]", None, "request 0 has no prompt_ids"),
        ('[{"prompt_ids": [], "output_len": 1}]', None, "request 0 has no prompt_ids"),
        ('[{"prompt_ids": [1.5], "output_len": 1}]', None, "request 0 has no prompt_ids"),
        ('[{"prompt_ids": [1], "output_len": 0}]', None, "output_len 0"),
        ('[{"prompt_ids": [1]}]', None, "output_len None"),
        ('[{"prompt_ids": [1], "output_len": 1}]', "a", "leave --set out"),
    ],
)
def test_damaged_workload_files(tmp_path: Path, content: str, name: str | None, text: str) -> None:
    path = tmp_path / "w.json"
    path.write_text(content)
    with pytest.raises(InvalidArgumentError, match=text):
        read_workload(path, name)


def test_the_report_needs_no_latencies() -> None:
    """A run in which nothing was answered still prints."""
    result = summarize([Work([1], 1)], [RequestTimes(0.0, error="x")], 1.0)
    kv = {"peak_used_blocks": 0, "max_num_blocks": 1, "cache_bytes": 0, "waste": 0.0, "reused_tokens": 0}
    engine = {
        "speculation": {"draft_tokens": 0},
        "steps": 0,
        "mean_requests_a_step": 0,
        "mean_tokens_a_step": 0,
        "executor_s": 0,
        "scheduler_s": 0,
    }
    extra = {
        "cpu_s": 0,
        "peak_rss_bytes": 0,
        "num_pauses": 0,
        "kv": kv,
        "generated_tokens_per_s_of_runs": [0],
    }
    bench._print_report({**result, **engine, **extra})


@pytest.mark.parametrize("flag", ["--requests", "--warmup", "--repeat"])
def test_absurd_counts_are_usage_errors(plansmith: Run, engine_dir: Path, flag: str) -> None:
    assert plansmith("bench", engine_dir, flag, 10**12).status == 2
