"""What a build tells people and CI: build_report.json, and build_report.html."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from .report_html import HTML_NAME, render

REPORT_NAME = "build_report.json"
LOG_TAIL_LINES = 20


@dataclasses.dataclass(frozen=True)
class TargetReport:
    """How one target went.

    status : "built", or "kept" (unchanged, not compiled again)
    seconds : of the compilation; of a kept target, when it was compiled
    peak_rss_bytes : most memory held while it compiled, 0 where that cannot be told
    weight_bytes : bytes of the graph's weights by type
    notes : what else is worth knowing, e.g. that tokens are drawn on the host
    group_size : what at most shares a scale of a quantized weight, see Precision.weight_groups
    kv_dtype : of the KV pools' values
    """

    status: str
    compiler: str
    compiler_version: str
    seconds: float
    peak_rss_bytes: int
    plan_bytes: int
    weight_bytes: dict[str, int]
    warnings: tuple[str, ...] = ()
    log_tail: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    group_size: str = ""
    kv_dtype: str = ""


@dataclasses.dataclass(frozen=True)
class BuildReport:
    """How the plans of an engine were built.

    seconds : of the whole build, opening the checkpoint included
    targets : by name; "cpu/draft" is what drafts for "cpu"
    draft : the drafts' precision; None = there are none
    evaluation : what the precision costs, where a gate asked for it (calibration/evaluate.py)
    """

    engine_dir: str
    checkpoint: str
    precision: str
    limits: dict[str, Any]
    seconds: float
    targets: dict[str, TargetReport]
    draft: str | None = None
    evaluation: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        values = dataclasses.asdict(self)
        if self.evaluation is None:
            del values["evaluation"]
        return values

    def write(self, directory: pathlib.Path) -> None:
        """Write build_report.json, and the same for people as build_report.html."""
        values = self.to_json()
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        (directory / REPORT_NAME).write_text(text, encoding="utf-8")
        (directory / HTML_NAME).write_text(render(values, self.evaluation), encoding="utf-8")


def read_targets(directory: pathlib.Path) -> dict[str, TargetReport]:
    """Return the targets of a directory's report; what cannot be read is left out, nothing depends on it."""
    path = directory / REPORT_NAME
    try:
        if not path.is_file():  # a pipe would never end
            return {}
        return parse_targets(json.loads(path.read_text(encoding="utf-8"))["targets"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return {}


def parse_targets(content: object) -> dict[str, TargetReport]:
    """Return the targets of a report's JSON; {} where it is not as this version writes it: nothing depends on it."""
    try:
        return {name: _read_target(one) for name, one in content.items()}  # type: ignore[attr-defined]
    except (ValueError, TypeError, AttributeError):
        return {}


def _read_target(one: dict[str, Any]) -> TargetReport:
    report = TargetReport(**one)
    numbers = (report.seconds, report.peak_rss_bytes, report.plan_bytes, *report.weight_bytes.values())
    if not all(isinstance(number, int | float) for number in numbers):
        raise TypeError("a size or a time is no number")
    if not all(isinstance(one, str) for one in (report.group_size, report.kv_dtype)):
        raise TypeError("a group or a type is no text")
    return dataclasses.replace(
        report,
        warnings=tuple(report.warnings),
        log_tail=tuple(report.log_tail),
        notes=tuple(report.notes),
    )
