"""Values of a report as HTML: escaped text, numbers for people, tables."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any


def text(value: object) -> str:
    """Return a value as text that is safe in HTML and in attributes."""
    return html.escape("" if value is None else str(value), quote=True)


def number(value: Any, digits: int = 3) -> str:
    """Return a number for people, a dash where there is none."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if value != 0 and abs(value) < 1e-3:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}&times;10<sup>{int(exponent)}</sup>"
    return f"{value:,.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"


def percent(value: Any) -> str:
    """Return a share for people."""
    return f"{100 * value:.1f} %" if isinstance(value, int | float) and math.isfinite(value) else "–"


def size(num_bytes: Any) -> str:
    """Return a size for people, a dash for 0 and what is unknown."""
    if not isinstance(num_bytes, int | float) or num_bytes <= 0:
        return "–"
    amount, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000 or unit == "GB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a table; cells are HTML already. The first `left` columns are text, the others numbers."""
    kinds = ["" if at < left else ' class="n"' for at in range(len(header))]
    head = "".join(f'<th scope="col"{kind}>{text(one)}</th>' for one, kind in zip(header, kinds, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{one}</td>" for one, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
    )
