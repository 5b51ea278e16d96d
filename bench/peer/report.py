"""A run as markdown: a table a test, what each engine takes, the goals, what was left out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from .goals import best_ours, best_peer
from .results import Results
from .statistic import Spread, number, round_ratios

# Test: its title, its numbers (name in the samples, name in the table), and its shares of the machine's peaks.
TABLES: dict[str, tuple[str, tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]] = {
    "single": (
        "One request: 32 prompt tokens, 128 generated",
        (("decode_tokens_per_s", "tokens/s after the first"), ("ttft_s", "TTFT, s")),
        (("bandwidth_share", "of the bandwidth"), ("sustained_bandwidth_share", "of the sustained one")),
    ),
    "prefill": (
        "One prompt of 512 tokens",
        (("prefill_tokens_per_s", "tokens/s"),),
        (("arithmetic_share", "of the arithmetic"),),
    ),
    "conc16": (
        "16 requests at once",
        (
            ("generated_tokens_per_s", "generated tokens/s"),
            ("ttft_mean_s", "mean TTFT, s"),
            ("ttft_p95_s", "p95 TTFT, s"),
        ),
        (("arithmetic_share", "of the arithmetic"),),
    ),
    "shared16": (
        "16 requests at once that share their first 256 tokens",
        (("wall_s", "all done after, s"), ("generated_tokens_per_s", "generated tokens/s")),
        (),
    ),
}
_GOALS_NOTE = (
    "Both sides of a goal that names no precision are the best of theirs: whichever of plansmith's variants and of the "
    "peers' has the best median. Values are medians; what is got is the median of the rounds' ratios, or the value."
)
_TOKENS_NOTE = (
    "At float32 the likeliest two of that prompt's first token lie 0.04 nats apart, of its second 0.01. What rounds "
    "may leave there, so a small number says that an engine rounds, not that it computes another model."
)
OURS = ("plansmith int4", "plansmith int8", "plansmith fp32")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def test_table(results: Results, test: str) -> str:
    """Return the table of one test: medians, spreads, shares, and how many times as fast each of our variants is."""
    title, numbers, shares = TABLES[test]
    metric = "generated_tokens_per_s" if test == "shared16" else numbers[0][0]
    engines = [name for name in results.engines() if results.values(name, test, metric)]
    ours = [name for name in OURS if name in engines]
    rows = []
    for engine in engines:
        row = [engine, *(_spread(results, engine, test, name) for name, _ in numbers)]
        row += [_share(results, engine, test, name) for name, _ in shares]
        row += [_ratio(results, our, engine, test, metric) for our in ours]
        rows.append(row)
    header = ["engine", *(name for _, name in numbers), *(name for _, name in shares)]
    return f"### {title}\n\n" + table([*header, *(f"{our} is" for our in ours)], rows)


def _spread(results: Results, engine: str, test: str, metric: str) -> str:
    values = list(results.values(engine, test, metric).values())
    return Spread.of(values).text() if values else "-"


def _share(results: Results, engine: str, test: str, metric: str) -> str:
    values = list(results.values(engine, test, metric).values())
    return f"{statistics.median(values):.0%}" if values else "-"


def _ratio(results: Results, our: str, engine: str, test: str, metric: str) -> str:
    if our == engine:
        return ""
    ratios = round_ratios(results.values(our, test, metric), results.values(engine, test, metric))
    return f"{statistics.median(ratios):.2f} x" if ratios else "-"


def head(run: dict[str, Any], failures: dict[str, str]) -> str:
    """Return the first lines of a report: what was run on what, and what was not.

    run : {"commit": (name, changed), "machine", "threads", "model", "rounds", "tests", "not_run", "short_of"}
    """
    name, changed = run["commit"]
    machine = run["machine"]
    lines = [
        f"plansmith at commit {name or '?'}{' with changes' if changed else ''}, {machine['date']}, "
        f"model {run['model']}; {run['threads']} threads on {machine['cores']} cores of {machine['processor']}, "
        f"{machine['memory_gib']} GiB, {machine['system']}; rounds: {run['rounds']}; tests: {', '.join(run['tests'])}.",
        *run["short_of"],
        f"Not run: {', '.join(run['not_run']) or 'none of the variants there are'}.",
    ]
    if failures:
        lines.append(f"Run, but left out because they failed: {', '.join(failures)}; why is below.")
    return "\n\n".join(lines)


def footprint_table(results: Results, equal_tokens: dict[str, int]) -> str:
    """Return what each engine takes: weights, memory, time to load and to start; and its greedy tokens."""
    rows = []
    for engine in results.engines():
        facts = results.facts[engine]
        rows.append(
            [
                engine,
                facts.get("version", "-"),
                f"{facts['weight_bytes'] / 1e6:.0f}",
                number(once) if (once := results.memory_of_all_tests_once(engine)) is not None else "-",
                _peak_memory(results, engine),
                f"{facts['load_s']:.2f}" if "load_s" in facts else "-",
                _spread(results, engine, "start", "start_to_first_token_s"),
                equal_tokens.get(engine, "-"),
            ]
        )
    header = ["engine", "version", "weights, MB", "peak memory, all tests once, MB", "after all rounds, MB"]
    header += ["first load, s"]
    header += ["fresh process to first token, s", "leading tokens as transformers fp32, of 128"]
    note = f"\n\n{_TOKENS_NOTE}" if equal_tokens else ""
    return "### What each engine takes\n\n" + table(header, rows) + note


def _peak_memory(results: Results, engine: str) -> str:
    values = results.values(engine, "memory", "peak_rss_mb").values()
    return number(max(values)) if values else "-"


def goals_table(verdicts: Sequence[dict[str, Any]], not_judged: Sequence[str] = ()) -> str:
    """Return the goals with what was reached, and which the run could not judge."""
    rows = []
    for v in verdicts:
        sign = ">=" if v["at_least"] else "<="
        spread = f" ({number(v['low'])}-{number(v['high'])})" if "low" in v else ""
        rows.append(
            [
                v["goal"],
                v["ours"],
                number(v["value"]),
                v.get("peer", "-"),
                number(v["peer_value"]) if "peer_value" in v else "-",
                f"{sign} {number(v['wanted'])}{v['unit']}",
                f"{number(v['got'])}{v['unit']}{spread}",
                "met" if v["met"] else f"not met: {distance(v):.0%} off",
            ]
        )
    header = ["goal", "ours", "our value", "best peer", "its value", "wanted", "got", ""]
    missing = f" Not judged, for want of a variant or a test: {'; '.join(not_judged)}." if not_judged else ""
    return "### Goals\n\n" + table(header, rows) + "\n\n" + _GOALS_NOTE + missing


def distance(verdict: dict[str, Any]) -> float:
    """Return by which share of what is wanted a number is on the wrong side of it; negative on the right one."""
    gap = (verdict["wanted"] - verdict["got"]) / verdict["wanted"]
    return float(gap if verdict["at_least"] else -gap)


def best_table(results: Results) -> str:
    """Return the best peer of each test beside ours: the best of both at any bits, and at 4, 8, 16 and 32."""
    rows = []
    for test, (title, numbers, _) in TABLES.items():
        metric = "generated_tokens_per_s" if test == "shared16" else numbers[0][0]
        named = ((4, "int4"), (8, "int8"), (16, "bf16"), (32, "fp32"))
        every = [
            (0, best_ours(results, test, metric)),
            *((bits, f"plansmith {name}") for bits, name in named),
        ]
        for bits, ours in every:
            peer = best_peer(results, test, metric, bits)
            if peer is None or ours is None or not results.values(ours, test, metric):
                continue
            rows.append(
                [
                    title,
                    f"{bits} bits" if bits else "any",
                    peer,
                    _spread(results, peer, test, metric),
                    ours,
                    _spread(results, ours, test, metric),
                    _ratio(results, ours, peer, test, metric),
                ]
            )
    return "### The best peer\n\n" + table(
        ["test", "peers of", "best peer", "its tokens/s", "ours", "our tokens/s", "ratio"], rows
    )


def conditions(results: Results) -> str:
    """Return a line on the peaks of the rounds and on how busy the machine was with other things."""
    peaks = [sample["peaks"] for sample in results.samples]
    rates = (
        ("read_gb_s", "GB/s read"),
        ("read_sustained_gb_s", "GB/s sustained"),
        ("fma_gflop_s", "GFLOP/s float32"),
        ("bf16_gflop_s", "GFLOP/s bfloat16"),
        ("int8_gop_s", "GOP/s int8"),
    )
    measured = [f"{Spread.of([p[name] for p in peaks]).text()} {unit}" for name, unit in rates]
    timed = [sample for sample in results.samples if "wall_s" in sample]
    others = statistics.median(s["others_cpu_s"] / s["wall_s"] for s in timed) if timed else 0.0
    load = Spread.of([sample["load_average"] for sample in results.samples])
    return (
        f"Peaks of the machine in the rounds: {'; '.join(measured)}. Load average {load.text()}; "
        f"other processes took {others:.2f} cores in the median run."
    )


def markdown(
    results: Results,
    verdicts: Sequence[dict[str, Any]],
    failures: dict[str, str],
    equal_tokens: dict[str, int],
    not_judged: Sequence[str] = (),
) -> str:
    """Return the tables of a report; each ratio is the median of the rounds' ratios."""
    tests = [test for test in TABLES if any(sample["test"] == test for sample in results.samples)]
    parts = [test_table(results, test) for test in tests]
    parts += [footprint_table(results, equal_tokens), best_table(results), goals_table(verdicts, not_judged)]
    if failures:
        rows = [[name, reason] for name, reason in failures.items()]
        parts.append("### Left out\n\n" + table(["engine", "why"], rows))
    return "\n\n".join([*parts, conditions(results)]) + "\n"
