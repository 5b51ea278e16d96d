"""build_report.html: how an engine was built and what its precision costs, as one page that needs nothing else.

Everything that comes from a report is escaped, and the page's own policy forbids scripts and outside resources.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from .report_plots import bytes_bar, layer_bars, legend, type_colours, type_order
from .report_style import STYLE
from .report_text import number, percent, size, table, text

HTML_NAME = "build_report.html"

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

Json = Mapping[str, Any]


def render(report_json: Json | None, eval_json: Json | None = None) -> str:
    """Return the page.

    report_json : of BuildReport.to_json(), or build_report.json read again; None = an evaluation without a build
    eval_json : of EvalReport.to_json(); None = there was no evaluation
    """
    report, evaluation = report_json or {}, eval_json or {}
    name = pathlib.PurePath(str(report.get("engine_dir") or evaluation.get("checkpoint") or "engine")).name
    precision = str(report.get("precision") or evaluation.get("precision") or "")
    sections = [
        _head(name, precision, report, evaluation),
        _gate(evaluation.get("gate")),
        _quality(evaluation),
        _tasks(evaluation.get("tasks")),
        _sensitivity(evaluation.get("sensitivity")),
        _targets(report.get("targets") or {}),
        _weights(report.get("targets") or {}),
        _facts(report, evaluation),
        _logs(report.get("targets") or {}),
    ]
    title = f"{name} ({precision})" if precision else name
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{text(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in sections if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(title: str, *parts: str) -> str:
    return f"<section>\n<h2>{text(title)}</h2>\n" + "\n".join(part for part in parts if part) + "\n</section>"


def _head(name: str, precision: str, report: Json, evaluation: Json) -> str:
    facts = [("precision", text(precision))]
    if report.get("draft"):
        facts.append(("draft", text(report["draft"])))
    targets = report.get("targets") or {}
    if targets:
        facts.append(("targets", text(", ".join(targets))))
        facts.append(("built in", f"{number(report.get('seconds'))} s"))
    overall = evaluation.get("overall")
    if overall:
        facts.append(("KL", number(overall.get("kl"))))
        facts.append(("same best token", percent(overall.get("top1"))))
    gate = evaluation.get("gate")
    badge = ""
    if gate:
        badge = (
            ' <span class="badge '
            + ('good">gate passed' if gate.get("passed") else 'bad">gate failed')
            + "</span>"
        )
    cards = "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in facts)
    return f'<header>\n<h1>{text(name)}{badge}</h1>\n<dl class="cards">{cards}</dl>\n</header>'


def _gate(gate: Json | None) -> str:
    if not gate:
        return ""
    rows = [
        [
            text(one.get("metric")),
            '<span class="badge ' + ('good">passed' if one.get("passed") else 'bad">failed') + "</span>",
            number(one.get("got")),
            f"{text(one.get('compare'))} {number(one.get('wanted'))}",
        ]
        for one in gate.get("bounds", ())
    ]
    return _section("Accuracy gate", table(("metric", "", "measured", "wanted"), rows, left=2))


def _quality(evaluation: Json) -> str:
    contexts = list(evaluation.get("contexts") or ())
    if not contexts:
        return ""
    if len(contexts) > 1 and evaluation.get("overall"):
        contexts.append(evaluation["overall"])
    rows = [
        [
            f"{one['context']:,} tokens" if one.get("context") else "all",
            number(one.get("tokens")),
            number(one.get("ppl"), 4),
            number(one.get("ppl_reference"), 4),
            f"{number(one.get('kl'))} <small>&plusmn; {number(one.get('kl_error'), 1)}</small>",
            number(one.get("kl_p99")),
            percent(one.get("top1")),
        ]
        for one in contexts
    ]
    header = ("context", "scored", "perplexity", "original's", "KL (nats)", "99 % of KL", "same best token")
    lead = (
        f"<p>{text(evaluation.get('precision'))} against {text(evaluation.get('against'))} in float32, on "
        f"{text(evaluation.get('text'))} ({number(evaluation.get('text_tokens'))} tokens). Of each window the second "
        "half is scored, so that what quantized KV caches cost shows in the long ones.</p>"
    )
    greedy = evaluation.get("greedy")
    tail = ""
    if greedy and greedy.get("lengths"):
        tail = (
            f"<p>Greedy outputs are the same for {number(greedy.get('mean'))} of {number(greedy.get('most'))} tokens "
            f"on average over {len(greedy['lengths'])} prompts.</p>"
        )
    notes = "".join(f'<p class="note">{text(note)}</p>' for note in evaluation.get("notes") or ())
    return _section("Quality", lead, table(header, rows), tail, notes)


def _tasks(tasks: Json | None) -> str:
    if not tasks:
        return ""
    rows = [
        [
            text(one.get("task")),
            number(one.get("items")),
            percent(one.get("accuracy")),
            percent(one.get("accuracy_reference")),
            percent(one.get("agreement")),
        ]
        for one in (*tasks.get("tasks", ()), tasks.get("overall", {}))
    ]
    return _section("Tasks", table(("task", "items", "right", "original", "same choice"), rows))


def _sensitivity(found: Json | None) -> str:
    layers = list((found or {}).get("layers") or ())
    if not found or not layers:
        return ""
    kl = found.get("kl") or 0.0
    series: list[tuple[str, list[float]]] = []
    if all(one.get("kl_alone") is not None for one in layers):
        series.append(("KL when it alone is quantized", [one["kl_alone"] for one in layers]))
    if all(one.get("kl_kept") is not None for one in layers):
        series.append(("KL saved when it alone stays in float", [kl - one["kl_kept"] for one in layers]))
    rows = [
        [
            text(one.get("layer")),
            number(one.get("kl_alone")),
            number(one.get("kl_kept")),
            size(one.get("weight_bytes")),
            size(one.get("float_bytes")),
        ]
        for one in sorted(layers, key=lambda one: -float(one.get("cost") or 0.0))
    ]
    header = ("layer", "KL alone", "KL of the rest", "weights", "in 16 bits")
    lead = (
        f"<p>Layer by layer, on {number(found.get('tokens'))} tokens. With every layer quantized the KL is "
        f"{number(kl)} nats.</p>"
    )
    plot = layer_bars([str(one.get("layer")) for one in layers], series) if series else ""
    more = f"<details><summary>All layers, the costliest first</summary>{table(header, rows)}</details>"
    names = (
        legend([name for name, _ in series])
        if len(series) > 1
        else f"<p class='axis'>{text(series[0][0])}, nats</p>"
        if series
        else ""
    )
    return _section("Where it comes from", lead, names, plot, more)


def _targets(targets: Json) -> str:
    if not targets:
        return ""
    rows = [
        [
            text(name),
            text(one.get("status")),
            text(f"{one.get('compiler', '')} {one.get('compiler_version', '')}"),
            text(one.get("group_size") or "–"),
            text(one.get("kv_dtype") or "–"),
            f"{number(one.get('seconds'))} s",
            size(one.get("plan_bytes")),
            size(one.get("peak_rss_bytes")),
        ]
        for name, one in targets.items()
    ]
    warnings = "".join(
        f'<p class="note">{text(name)}: {text(line)}</p>'
        for name, one in targets.items()
        for line in (*(one.get("warnings") or ()), *(one.get("notes") or ()))
    )
    header = ("target", "status", "compiler", "group size", "KV pools", "compiled in", "plan", "peak memory")
    return _section("Targets", table(header, rows, left=5), warnings)


def _weights(targets: Json) -> str:
    found = {name: dict(one.get("weight_bytes") or {}) for name, one in targets.items()}
    found = {name: one for name, one in found.items() if one}
    if not found:
        return ""
    kinds = sorted({kind for one in found.values() for kind in one}, key=type_order)
    most = max(sum(one.values()) for one in found.values())
    bars = "".join(
        f'<div class="bar"><span>{text(name)}</span>{bytes_bar(kinds, one, most)}<span class="n">'
        f"{size(sum(one.values()))}</span></div>"
        for name, one in found.items()
    )
    rows = [[text(name), *(size(one.get(kind)) for kind in kinds)] for name, one in found.items()]
    return _section(
        "Weights by type", legend(kinds, type_colours(kinds)), bars, table(("target", *kinds), rows)
    )


def _facts(report: Json, evaluation: Json) -> str:
    facts = [
        ("engine", report.get("engine_dir")),
        ("checkpoint", report.get("checkpoint") or evaluation.get("checkpoint")),
        ("original", evaluation.get("against")),
        *((name.replace("_", " "), value) for name, value in (report.get("limits") or {}).items()),
    ]
    rows = "".join(
        f"<div><dt>{text(label)}</dt><dd>{text(value)}</dd></div>"
        for label, value in facts
        if value is not None
    )
    return _section("Build", f'<dl class="facts">{rows}</dl>')


def _logs(targets: Json) -> str:
    parts = [
        f"<details><summary>{text(name)}</summary><pre>{text(chr(10).join(map(str, one['log_tail'])))}</pre></details>"
        for name, one in targets.items()
        if one.get("log_tail")
    ]
    return _section("Compiler logs", *parts) if parts else ""
