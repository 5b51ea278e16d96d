"""Which CI runner a unit is built on."""

from __future__ import annotations

from collections.abc import Iterator

from .fleet_file import DEFAULT_RUNNER, Fleet
from .units import Unit


def runner_labels(fleet: Fleet, unit: Unit) -> tuple[str, ...]:
    """Return the labels of a unit's runner; () where the file names none that would do.

    Those of its SKU come first, then of its target (sm89-tensorrt), then of its GPU (sm89), then `default`, which does
    not do for a unit that is compiled on its GPU alone.
    """
    for sku in unit.skus:
        if sku.runner:
            return sku.runner
    for name in _names(unit):
        if name in fleet.runners:
            return fleet.runners[name]
    return () if needs_gpu(unit) else fleet.runners.get(DEFAULT_RUNNER, ())


def needs_gpu(unit: Unit) -> bool:
    """Return whether a unit is compiled on its GPU alone."""
    return unit.target.compiler == "tensorrt"


def _names(unit: Unit) -> Iterator[str]:
    yield unit.target.name
    if len(unit.target.sm) == 1:  # a portable plan's capabilities name no runner
        yield unit.target.sm[0]
