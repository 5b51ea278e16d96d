"""build_report.html: whole and well-formed, nothing from outside, nothing unescaped, numbers where they belong."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from plansmith.builder.build_report import BuildReport, TargetReport
from plansmith.builder.report_html import render
from plansmith.builder.report_plots import layer_bars
from plansmith.builder.report_text import number, percent, size
from plansmith.calibration.evaluate import EvalReport
from plansmith.calibration.gate import Gate
from plansmith.calibration.greedy import GreedyAgreement
from plansmith.calibration.quality import Quality
from plansmith.calibration.sensitivity import LayerCost, Sensitivity
from plansmith.calibration.tasks import TaskReport, TaskResult

EVIL = "<script>alert('x')</script>\"&amp;"
_VOID = {"meta", "line", "rect", "br", "i"}


class Page(HTMLParser):
    """A page's elements, its text by section, and whether its tags are balanced."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(content)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += f" {data}" if self.open and self.open[-1] != "style" else ""

    def count(self, tag: str) -> int:
        return sum(1 for one, _ in self.tags if one == tag)


def target(status: str = "built", **sizes: int) -> TargetReport:
    return TargetReport(
        status,
        "plansmith-cpu",
        "format-2",
        1.25,
        3_000_000,
        2_500_000,
        sizes,
        ("careful <b>",),
        ("a log",),
        group_size="64 columns",
        kv_dtype="float16",
    )


def build(name: str = "/engines/llama") -> dict[str, Any]:
    return BuildReport(
        engine_dir=name,
        checkpoint="/models/llama",
        precision="int4",
        limits={"max_batch_size": 64, "max_seq_len": 4096},
        seconds=83.5,
        targets={"cpu": target(int8=1_000_000, int4=500_000), "sm89": target("kept", float16=4_000_000)},
        draft="int4",
    ).to_json()


def evaluation() -> dict[str, Any]:
    def quality(context: int, kl: float) -> Quality:
        return Quality(context, 4, 256, 20.75, 19.5, kl, 0.004, 0.9, 2.0, 0.8125)

    layers = (
        *(LayerCost(f"layers.{n}", 0.01 * (n + 1), 0.2 - 0.01 * n, 1000, 4000) for n in range(4)),
        LayerCost("lm_head", 0.0005, 0.31, 2000, 4000),
    )
    all_tasks = TaskResult("all", 137, 0.7, 0.75, 0.9)
    report = EvalReport(
        plan="p",
        checkpoint="/models/llama",
        precision="int4",
        against="/models/original",
        text="a text",
        text_tokens=4096,
        contexts=(quality(128, 0.0123), quality(1024, 0.0456)),
        overall=quality(0, 0.0289),
        seconds=12.0,
        greedy=GreedyAgreement(32, (4, 9), 6.5),
        tasks=TaskReport((TaskResult("facts", 137, 0.7, 0.75, 0.9),), all_tasks),
        sensitivity=Sensitivity("int4", 256, 0.3, layers).to_json(),
        notes=("a note",),
    )
    return {**report.to_json(), "gate": Gate.parse("kl<=0.02,top1>=0.8").verdict(report)}


def test_everything_is_on_it() -> None:
    page = Page(render(build(), evaluation()))
    text = " ".join(page.text.split())
    for wanted in (
        "llama gate failed",
        "precision int4",
        "targets cpu, sm89",
        "kl failed 0.0289 <= 0.02",
        "top1 passed 0.812 >= 0.8",
        "128 tokens 256 20.75 19.5 0.0123",
        "1,024 tokens 256 20.75 19.5 0.0456",
        "all 256 20.75 19.5 0.0289",
        "Greedy outputs are the same for 6.5 of 32 tokens",
        "facts 137 70.0 % 75.0 % 90.0 %",
        "cpu built plansmith-cpu format-2 64 columns float16 1.25 s 2.5 MB 3.0 MB",
        "sm89 kept",
        "max batch size 64",
        "original /models/original",
        "a note",
        "a log",
        "careful <b>",
    ):
        assert wanted in text, wanted
    # two columns a layer, one part a type of each target
    assert sum(1 for tag, attrs in page.tags if tag == "rect") == 2 * 5 + 3
    assert text.index("layers.3 0.04") < text.index("layers.0 0.01"), "the costliest first"


def test_a_plain_build_and_an_evaluation_alone() -> None:
    plain = " ".join(Page(render(build(), None)).text.split())
    assert "Targets" in plain and "Weights by type" in plain
    assert not any(word in plain for word in ("Quality", "gate", "Tasks", "Where it comes from"))
    alone = " ".join(Page(render(None, evaluation())).text.split())
    assert "Quality" in alone and "Targets" not in alone and "Weights by type" not in alone
    Page(render(None, None))
    Page(render({"targets": {"cpu": {}}}, {"contexts": [{}], "sensitivity": {"layers": [{}]}}))


def test_nothing_from_outside() -> None:
    content = render(build(), evaluation())
    page = Page(content)
    assert not {"script", "link", "img", "iframe", "object", "base"} & {tag for tag, _ in page.tags}
    assert not re.search(r"https?:|//[a-z]|url\(|@import", content)
    assert not any(
        name.startswith("on") or name in ("src", "href") for _, attrs in page.tags for name in attrs
    )
    assert "default-src &#x27;none&#x27;" in content
    assert "prefers-color-scheme: dark" in content


def poisoned(value: Any) -> Any:
    """Return JSON in which every string and key is EVIL but for names that the page looks for."""
    if isinstance(value, dict):
        named = {"targets", "weight_bytes", "limits"}
        return {
            key: {f"{EVIL}{at}": poisoned(one) for at, one in enumerate(inner.values())}
            if key in named and isinstance(inner, dict)
            else poisoned(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [poisoned(one) for one in value]
    return EVIL if isinstance(value, str) else value


def test_everything_is_escaped() -> None:
    page = Page(render(poisoned(build()), poisoned(evaluation())))
    assert page.count("script") == 0 and page.count("b") == 0
    assert page.text.count("<script>alert") > 20
    assert all(
        "script" not in str(value) or value is not None for _, attrs in page.tags for value in attrs.values()
    )
    assert {name for _, attrs in page.tags for name in attrs} <= {
        *("lang", "charset", "http-equiv", "content", "name", "class", "scope", "role", "aria-label"),
        *(
            "viewbox",
            "preserveaspectratio",
            "x",
            "y",
            "x1",
            "y1",
            "x2",
            "y2",
            "width",
            "height",
            "text-anchor",
        ),
    }


def test_values_that_are_no_numbers() -> None:
    broken = evaluation()
    broken["overall"]["kl"] = math.nan
    broken["contexts"][0]["kl"] = math.inf
    broken["contexts"][1]["ppl"] = "7"
    broken["gate"]["bounds"][0]["got"] = None
    for row in broken["sensitivity"]["layers"]:
        row["kl_alone"] = math.nan
    page = render(build(), broken)
    Page(page)
    assert "nan" not in page.lower()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (4096, "4,096"),
        (0.03, "0.03"),
        (19.5, "19.5"),
        (123456.7, "123,457"),
        (4.5e-5, "4.50&times;10<sup>-5</sup>"),
        (-2e-6, "-2.00&times;10<sup>-6</sup>"),
        (math.nan, "–"),
        (None, "–"),
        ("5", "–"),
        (True, "–"),
    ],
)
def test_numbers(value: Any, shown: str) -> None:
    assert number(value) == shown


def test_sizes_and_shares() -> None:
    assert [size(n) for n in (0, None, 999, 1000, 2_500_000, 7e12)] == [
        "–",
        "–",
        "999 B",
        "1.0 kB",
        "2.5 MB",
        "7000.0 GB",
    ]
    assert percent(0.125) == "12.5 %" and percent(None) == "–"


def test_columns_are_as_tall_as_their_values() -> None:
    svg = layer_bars(["layers.0", "layers.1", "layers.2"], [("KL", [0.1, 0.4, -0.2])])
    heights = [float(found) for found in re.findall(r'<rect class="s0"[^>]* height="([0-9.]+)"', svg)]
    assert heights[1] == pytest.approx(4 * heights[0], rel=0.01) and heights[2] == 0.0
    ticks = [float(found) for found in re.findall(r'text-anchor="end">([0-9.e-]+)</text>', svg)]
    assert ticks == pytest.approx([0.1 * n for n in range(5)])
    many = layer_bars([f"layers.{n}" for n in range(80)], [("KL", [0.0] * 80)])
    assert many.count("<text") <= 3 + 17
