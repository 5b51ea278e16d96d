"""The plots of build_report.html, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .report_text import text

_WIDTH, _HEIGHT = 860, 220
_LEFT, _BOTTOM, _TOP = 64, 34, 10
_MAX_LABELS = 16


# Floats first, then what has fewer bits; a type has its colour on every page.
_TYPES = {
    "float32": 5,
    "bfloat16": 0,
    "float16": 0,
    "int8": 2,
    "float8_e4m3fn": 1,
    "int4": 3,
    "float4_e2m1": 4,
}


def type_order(kind: str) -> tuple[int, str]:
    """Return the key by which types of weights are sorted."""
    return (list(_TYPES).index(kind) if kind in _TYPES else len(_TYPES), kind)


def type_colours(kinds: Sequence[str]) -> list[int]:
    """Return the number of each type's colour; types that are not known share one."""
    return [_TYPES.get(kind, 5) for kind in kinds]


def legend(names: Sequence[str], colours: Sequence[int] | None = None) -> str:
    """Return names with their colours; without numbers of colours they are those of series 0, 1, ..."""
    colours = range(len(names)) if colours is None else colours
    parts = (
        f'<span><i class="s{colour}"></i>{text(name)}</span>'
        for name, colour in zip(names, colours, strict=True)
    )
    return f'<p class="legend">{"".join(parts)}</p>'


def bytes_bar(kinds: Sequence[str], sizes: Mapping[str, int], most: int) -> str:
    """Return a stacked bar of bytes by type, `most` bytes wide at 100 %."""
    at, parts = 0.0, []
    for kind, colour in zip(kinds, type_colours(kinds), strict=True):
        width = 1000.0 * sizes.get(kind, 0) / max(most, 1)
        if width > 0:
            tip = f"<title>{text(kind)}: {sizes[kind]:,} bytes</title>"
            frame = f'x="{at:.1f}" y="0" width="{width:.1f}" height="20"'
            parts.append(f'<rect class="s{colour}" {frame}>{tip}</rect>')
        at += width
    return f'<svg viewBox="0 0 1000 20" preserveAspectRatio="none" role="img">{"".join(parts)}</svg>'


def layer_bars(layers: Sequence[str], series: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Return columns for each layer in the model's order, one a series; negative values have no column.

    series : (name, a value a layer)
    """
    values = [value for _, one in series for value in one if math.isfinite(value)]
    top, step = _scale(max(values, default=0.0))
    inner, tall = _WIDTH - _LEFT, _HEIGHT - _BOTTOM - _TOP
    slot = inner / max(len(layers), 1)
    width = max(slot * 0.74 / len(series), 1.0)
    parts = []
    for tick in range(round(top / step) + 1):
        y = _TOP + tall * (1 - tick * step / top)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick * step:.3g}</text>')
    every = max(1, math.ceil(len(layers) / _MAX_LABELS))
    for at, layer in enumerate(layers):
        left = _LEFT + slot * at + slot * 0.13
        for idx, (name, one) in enumerate(series):
            value = one[at]
            high = tall * min(max(value, 0.0), top) / top if math.isfinite(value) else tall
            shown = f"{value:.4g}" if math.isfinite(value) else "not a number"
            tip = f"<title>{text(f'{layer}: {shown} ({name})')}</title>"
            parts.append(
                f'<rect class="s{idx}" x="{left + width * idx:.1f}" y="{_TOP + tall - high:.1f}" '
                f'width="{width:.1f}" height="{high:.1f}">{tip}</rect>'
            )
        short = layer.removeprefix("layers.")
        if at % every == 0 or not short.isdigit():
            x = _LEFT + slot * (at + 0.5)
            anchor = "middle" if short.isdigit() else "end"
            y = _HEIGHT - _BOTTOM + 14 if short.isdigit() else _HEIGHT - 4
            x = x if short.isdigit() else min(x + slot / 2, _WIDTH)
            parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{text(short)}</text>')
    frame = f'class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="KL by layer"'
    return f"<svg {frame}>{''.join(parts)}</svg>"


def _scale(largest: float) -> tuple[float, float]:
    """Return the top of an axis and the distance of its ticks, round numbers."""
    if not largest > 0:
        return 1.0, 0.5
    rough = largest / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return step * math.ceil(largest / step - 1e-9), step
