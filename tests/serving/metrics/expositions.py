"""Reads Prometheus text, as it is written on the wire: names are compared letter by letter."""

from __future__ import annotations

import re

Series = tuple[str, frozenset[tuple[str, str]]]
_LINE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_series(
    text: str, prefix: tuple[str, ...] = ("nv_trt_llm", "nv_llm", "plansmith_")
) -> dict[Series, float]:
    """Return (name, labels) -> number of the series whose names begin with one of `prefix`."""
    found: dict[Series, float] = {}
    for line in text.splitlines():
        if line.startswith(prefix):
            match = _LINE.fullmatch(line)
            assert match, line
            key = (match["name"], frozenset(_LABEL.findall(match["labels"] or "")))
            assert key not in found, f"twice: {line}"
            found[key] = float(match["value"])
    return found


def read_headers(
    text: str, prefix: tuple[str, ...] = ("nv_trt_llm", "nv_llm", "plansmith_")
) -> dict[str, tuple[str, str]]:
    """Return name -> (kind, help) as the comments of the text say."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.M))
    return {name: (kind, helps[name]) for name, kind in kinds.items() if name.startswith(prefix)}


def value(text: str, name: str, **labels: str) -> float:
    """Return the number of the one series of `name` that has all of `labels`."""
    wanted = set(labels.items())
    found = [number for (own, has), number in read_series(text).items() if own == name and wanted <= has]
    assert len(found) == 1, (name, labels, found)
    return found[0]
