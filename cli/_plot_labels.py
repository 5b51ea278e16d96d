"""Names beside the points of a plot, so placed that none covers another."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

_FONT_SIZE = 8
_GAPS = (3, 10, 20, 32, 46, 64, 90)  # from the point's rim, in points
_ANGLES = (0, 40, -40, 180, 140, -140, 90, -90)
_LEADER_GAP = 10  # a name so far away has a line to its point


@dataclasses.dataclass(frozen=True)
class Point:
    """A point of a plot.

    x, y : in the axes' own units
    area : as scatter takes it, in square points
    name : what stands beside it; "" = nothing
    """

    x: float
    y: float
    area: float
    name: str = ""


@dataclasses.dataclass(frozen=True)
class _Box:
    """A rectangle in pixels."""

    left: float
    bottom: float
    right: float
    top: float

    def meets(self, other: _Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.bottom < other.top
            and other.bottom < self.top
        )

    def is_within(self, other: _Box) -> bool:
        return (
            self.left >= other.left
            and self.right <= other.right
            and self.bottom >= other.bottom
            and self.top <= other.top
        )


def place_labels(axis: Any, points: Sequence[Point]) -> list[Any]:
    """Write the points' names into a plot whose limits, size and legend are final, and return the annotations.

    A name stands as near to its point as others, points and the legend leave room; without any it covers something.
    """
    renderer = axis.figure.canvas.get_renderer()
    scale = axis.figure.dpi / 72
    frame = _box(axis.get_window_extent(renderer))
    centers = [_pixel(axis, one) for one in points]
    radii = [scale * math.sqrt(one.area / math.pi) for one in points]
    circles = [_around(center, radius) for center, radius in zip(centers, radii, strict=True)]
    legend = axis.get_legend()
    taken = [] if legend is None else [_box(legend.get_window_extent(renderer))]
    annotations = []
    for i in sorted(range(len(points)), key=lambda i: -centers[i][1]):
        if not points[i].name:
            continue
        size = _size(axis, points[i].name, renderer)
        others = [*taken, *(circle for k, circle in enumerate(circles) if k != i)]
        box, gap = _place(centers[i], radii[i], size, scale, frame, others)
        taken.append(box)
        annotations.append(
            axis.annotate(
                points[i].name,
                (points[i].x, points[i].y),
                xytext=((box.left - centers[i][0]) / scale, (box.bottom - centers[i][1]) / scale),
                textcoords="offset points",
                fontsize=_FONT_SIZE,
                ha="left",
                va="bottom",
                bbox={"facecolor": "white", "alpha": 0.7, "lw": 0, "pad": 0.5},  # on a line it is read, too
                arrowprops={"arrowstyle": "-", "lw": 0.5, "shrinkA": 0} if gap >= _LEADER_GAP else None,
            )
        )
    return annotations


def _place(
    center: tuple[float, float],
    radius: float,
    size: tuple[float, float],
    scale: float,
    frame: _Box,
    others: Sequence[_Box],
) -> tuple[_Box, float]:
    """Return where a name goes, and its gap to the point in points."""
    for gap in _GAPS:
        for angle in _ANGLES:
            box = _beside(center, radius + scale * gap, angle, size)
            if box.is_within(frame) and not any(box.meets(other) for other in others):
                return box, gap
    return _beside(center, radius + scale * _GAPS[0], _ANGLES[0], size), _GAPS[0]


def _beside(center: tuple[float, float], distance: float, angle: float, size: tuple[float, float]) -> _Box:
    """Return the box whose nearest edge or corner lies so far from the center, in this direction."""
    across, up = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    width, height = size
    left = center[0] + across * distance - (width if across < -0.1 else 0 if across > 0.1 else width / 2)
    bottom = center[1] + up * distance - (height if up < -0.1 else 0 if up > 0.1 else height / 2)
    return _Box(left, bottom, left + width, bottom + height)


def _size(axis: Any, text: str, renderer: Any) -> tuple[float, float]:
    shown = axis.text(0.5, 0.5, text, fontsize=_FONT_SIZE, transform=axis.transAxes)
    extent = shown.get_window_extent(renderer)
    shown.remove()
    return float(extent.width), float(extent.height)


def _pixel(axis: Any, point: Point) -> tuple[float, float]:
    x, y = axis.transData.transform((point.x, point.y))
    return float(x), float(y)


def _around(center: tuple[float, float], radius: float) -> _Box:
    x, y = center
    return _Box(x - radius, y - radius, x + radius, y + radius)


def _box(extent: Any) -> _Box:
    return _Box(extent.x0, extent.y0, extent.x1, extent.y1)
