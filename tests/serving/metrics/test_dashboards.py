"""The dashboard and the alert rules: every expression parses, and asks for nothing that is not exposed."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from expositions import read_series
from triton_servers import RunningTriton

FOLDER = Path(__file__).parents[3] / "docs" / "dashboards"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "plansmith.json").read_text())
RULES: dict[str, Any] = yaml.safe_load((FOLDER / "alerts.yml").read_text())
DOCS = (FOLDER.parent / "metrics.md").read_text()
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
ALL_RULES: list[dict[str, Any]] = [rule for group in RULES["groups"] for rule in group["rules"]]
RECORDED = {rule["record"] for rule in ALL_RULES if "record" in rule}
# Labels that Prometheus adds, and those that the rules' own sums leave.
SCRAPED = {"job", "instance"}
EXPRESSIONS = {
    **{f"{p['title']} {t['refId']}": str(t["expr"]) for p in PANELS for t in p.get("targets", ())},
    **{str(rule.get("record") or rule["alert"]): str(rule["expr"]) for rule in ALL_RULES},
}


def parsed(expression: str) -> Any:
    """Return the tree of an expression, Grafana's variables filled in as Grafana does."""
    for name, text in {"$__rate_interval": "1m", "$model": ".*", "$instance": ".*"}.items():
        expression = expression.replace(name, text)
    assert "$" not in expression
    return promql_parser.parse(expression)


def selectors(tree: Any) -> Iterator[Any]:
    """Yield the vector selectors of a tree."""
    if isinstance(tree, promql_parser.MatrixSelector):
        tree = tree.vector_selector
    if isinstance(tree, promql_parser.VectorSelector):
        yield tree
        return
    for name in ("lhs", "rhs", "expr", "param"):
        if (below := getattr(tree, name, None)) is not None:
            yield from selectors(below)
    for below in getattr(tree, "args", None) or ():
        yield from selectors(below)


def matches(matcher: Any, text: str) -> bool:
    """Whether a label's value passes one matcher."""
    by_regex = re.fullmatch(matcher.value, text) is not None
    results = {
        "MatchOp.Equal": text == matcher.value,
        "MatchOp.NotEqual": text != matcher.value,
        "MatchOp.Re": by_regex,
        "MatchOp.NotRe": not by_regex,
    }
    return results[str(matcher.op)]


@pytest.fixture(scope="module")
def exposed(triton: RunningTriton) -> dict[str, list[dict[str, str]]]:
    """Return name -> labels of each series, of a real tritonserver's port."""
    found: dict[str, list[dict[str, str]]] = {}
    for name, labels in read_series(triton.api.metrics(5), ("nv_", "plansmith_")):
        found.setdefault(name, []).append(dict(labels))
    return found


@pytest.mark.parametrize("title", EXPRESSIONS)
def test_an_expression_asks_for_what_is_there(title: str, exposed: dict[str, list[dict[str, str]]]) -> None:
    found = list(selectors(parsed(EXPRESSIONS[title])))
    assert found
    for selector in found:
        if selector.name == "up" or selector.name in RECORDED:
            continue
        assert selector.name in exposed, selector.name
        own = [m for m in selector.matchers.matchers if m.name not in SCRAPED]
        series = exposed[selector.name]
        assert any(all(m.name in labels and matches(m, labels[m.name]) for m in own) for labels in series), (
            selector.name,
            [(m.name, m.value) for m in own],
        )


def test_the_check_sees_through_every_kind_of_expression() -> None:
    text = """histogram_quantile(0.5, sum by (le) (rate(a_bucket[5m]))) > 2 * b{x="1"} and -c unless
              max_over_time((d / e)[1h:5m]) or topk(scalar(f), g) + absent(h)"""
    names = sorted(str(one.name) for one in selectors(parsed(text)))
    assert names == ["a_bucket", "b", "c", "d", "e", "f", "g", "h"]
    with pytest.raises(ValueError):
        parsed("rate(a)")  # of an instant vector


Labels = frozenset[str]
_LABELS_OF_RECORDED: dict[str, Labels] = {}


def labels_of(tree: Any, exposed: dict[str, list[dict[str, str]]]) -> Labels | None:
    """Return the labels of an expression's series, None for a number; asserts that the sides of operators match."""
    if isinstance(tree, promql_parser.MatrixSelector):
        tree = tree.vector_selector
    if isinstance(tree, promql_parser.VectorSelector):
        if tree.name == "up":
            return frozenset(SCRAPED)
        if tree.name in _LABELS_OF_RECORDED:
            return _LABELS_OF_RECORDED[str(tree.name)]
        return frozenset(exposed[str(tree.name)][0]) | SCRAPED
    if isinstance(tree, promql_parser.AggregateExpr):
        own = labels_of(tree.expr, exposed) or frozenset()
        if tree.modifier is None:
            return frozenset()
        named = frozenset(tree.modifier.labels)
        assert named <= own, f"{tree} groups by {named - own}, which the series do not have"
        return named if str(tree.modifier.type).endswith("By") else own - named
    if isinstance(tree, promql_parser.BinaryExpr):
        sides = [labels_of(side, exposed) for side in (tree.lhs, tree.rhs)]
        assert None in sides or sides[0] == sides[1], f"{tree} never matches: {sides}"
        return sides[1] if sides[0] is None else sides[0]
    if isinstance(tree, promql_parser.Call):
        if tree.func.name in ("scalar", "time"):
            return None
        own = labels_of(tree.args[-1], exposed)
        return own - {"le"} if own and tree.func.name == "histogram_quantile" else own
    return labels_of(tree.expr, exposed) if hasattr(tree, "expr") else None


def test_the_sides_of_every_operator_have_the_same_labels(exposed: dict[str, list[dict[str, str]]]) -> None:
    for title, expression in EXPRESSIONS.items():
        assert not re.search(r"\b(on|ignoring|group_left|group_right)\s*\(", expression), (
            "labels_of knows none"
        )
        if title in RECORDED:
            found = labels_of(parsed(expression), exposed)
            assert found == {"job", "instance", "model", "version"}, title
            _LABELS_OF_RECORDED[title] = found
    for title, expression in EXPRESSIONS.items():
        found = labels_of(parsed(expression), exposed)
        legends = [
            str(t["legendFormat"]) for p in PANELS for t in p.get("targets", ()) if t["expr"] == expression
        ]
        for name in re.findall(r"{{(\w+)}}", " ".join(legends)):
            assert name in (found or ()), f"{title} shows {name}, which its series do not have"
    for rule in ALL_RULES:
        shown = " ".join(rule.get("annotations", {}).values())
        own = labels_of(parsed(rule["expr"]), exposed) or frozenset()
        assert set(re.findall(r"\$labels\.(\w+)", shown)) <= own, rule["alert"]


def test_the_check_of_labels_finds_what_never_matches(exposed: dict[str, list[dict[str, str]]]) -> None:
    for text in (
        'plansmith_requests{state="queued"} > nv_trt_llm_request_metrics{request_type="max"}',
        "sum by (model) (plansmith_steps_total) / plansmith_steps_total",
        "sum by (reason) (plansmith_steps_total)",
    ):
        with pytest.raises(AssertionError):
            labels_of(parsed(text), exposed)


def test_the_rules_have_the_form_that_prometheus_reads() -> None:
    assert set(RULES) == {"groups"}
    names = [group["name"] for group in RULES["groups"]]
    assert len(set(names)) == len(names)
    for group in RULES["groups"]:
        assert set(group) <= {"name", "interval", "rules"}
    for rule in ALL_RULES:
        if "record" in rule:
            assert set(rule) == {"record", "expr"}
            assert re.fullmatch(r"[a-z_]+:[a-z_]+:[a-z0-9_]+", rule["record"])
            continue
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule["for"])
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert f"| `{rule['alert']}` |" in DOCS, f"docs/metrics.md says nothing of {rule['alert']}"
        for text in rule["annotations"].values():
            assert text.count("{{") == text.count("}}") and "\n" not in text.strip()
    alerts = [rule["alert"] for rule in ALL_RULES if "alert" in rule]
    assert len(set(alerts)) == len(alerts)


def test_the_slo_alert_uses_what_is_recorded() -> None:
    used = {
        one.name
        for rule in ALL_RULES
        if "alert" in rule
        for one in selectors(parsed(rule["expr"]))
        if ":" in str(one.name)
    }
    assert used == RECORDED


def test_grafana_can_import_the_dashboard() -> None:
    assert DASHBOARD["id"] is None and DASHBOARD["uid"] == "plansmith-engine"
    assert DASHBOARD["schemaVersion"] >= 38
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "model", "instance"]
    assert variables["datasource"]["query"] == "prometheus"
    assert variables["model"]["definition"] == "label_values(nv_trt_llm_request_metrics, model)"
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("timeseries", "stat")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"]
            assert "$instance" in target["expr"]


def test_no_panel_lies_on_another() -> None:
    for one, other in itertools.combinations((panel["gridPos"] for panel in PANELS), 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)
