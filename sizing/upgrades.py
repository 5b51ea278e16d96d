"""What an upgrade of software makes stale: from a manifest's entry alone. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from .. import __version__
from ..runtime.errors import InvalidArgumentError
from ..runtime.manifest import GRAPH_CONTRACT_VERSION, SCHEMA_VERSION
from . import releases
from .releases import COMPILERS, CPU_PLAN_FORMAT

if TYPE_CHECKING:
    from ..runtime.manifest_entries import TargetEntry

UPGRADABLE = (*COMPILERS, "driver", "plansmith", "cpu_plan", "graph_contract", "schema")
"""What can be upgraded. The last three are numbers of plansmith's own: see docs/portability.md."""


def stale_after(entry: TargetEntry, upgrades: Mapping[str, str]) -> list[str]:
    """Return why a plan has to be built again after upgrades; [] = it need not be.

    upgrades : names of UPGRADABLE -> the versions that will be there
    raises InvalidArgumentError for another name, or a version that is none
    """
    _check(upgrades)
    return [*_compiler_reasons(entry, upgrades), *_format_reasons(entry, upgrades)]


def upgrade_notes(entry: TargetEntry, upgrades: Mapping[str, str]) -> list[str]:
    """Return what else an upgrade changes for a plan; arguments as in stale_after."""
    stays = not stale_after(entry, upgrades)
    return [*_driver_notes(entry, upgrades, stays), *_plansmith_notes(upgrades)]


def _check(upgrades: Mapping[str, str]) -> None:
    for name, version in upgrades.items():
        if name not in UPGRADABLE:
            raise InvalidArgumentError(
                f"an upgrade of {name!r} is not known; give one or more of {', '.join(UPGRADABLE)}"
            )
        if name == "driver":
            releases.parse_driver(version)
        elif not releases.version_numbers(version):
            raise InvalidArgumentError(f"{name} has version {version!r}; give one such as 1.8.0")


def _compiler_reasons(entry: TargetEntry, upgrades: Mapping[str, str]) -> Iterator[str]:
    there = upgrades.get(entry.compiler)
    if there is None or entry.compiler not in COMPILERS:
        return
    if not releases.is_same_release(entry.compiler, entry.compiler_version, there):
        yield (
            f"{COMPILERS[entry.compiler].title} {there} does not run plans of {entry.compiler_version}: they are tied "
            f"to {releases.release(entry.compiler, entry.compiler_version)}"
        )


def _format_reasons(entry: TargetEntry, upgrades: Mapping[str, str]) -> Iterator[str]:
    read = dict(upgrades)
    if _is_this(upgrades.get("plansmith")):  # whose numbers are known
        read.setdefault("cpu_plan", str(CPU_PLAN_FORMAT))
    held = {
        "cpu_plan": entry.compiler_version if not entry.sm else None,
        "graph_contract": str(GRAPH_CONTRACT_VERSION),  # of every manifest that this version reads
        "schema": str(SCHEMA_VERSION),
    }
    titles = {"cpu_plan": "plan format", "graph_contract": "graph contract", "schema": "manifest schema"}
    for name, title in titles.items():
        has, wanted = held[name], read.get(name)
        if has is not None and wanted is not None and _first(has) != _first(wanted):
            yield f"it has {title} {_first(has)}, what reads it then takes {_first(wanted)}"


def _driver_notes(entry: TargetEntry, upgrades: Mapping[str, str], stays: bool) -> Iterator[str]:
    if "driver" not in upgrades or entry.compiler not in COMPILERS:
        return
    driver = releases.parse_driver(upgrades["driver"])
    cuda = releases.package_cuda(entry)
    for sm in entry.sm:
        least = releases.least_driver(entry.compiler, cuda, sm)
        if driver[0] < least:
            yield (
                f"a driver of {upgrades['driver']} is too old for it on {sm}, which asks for r{least} or later; no "
                "build changes that"
            )
    if stays and not COMPILERS[entry.compiler].picks_by_timing:
        yield "the kernels that were compiled at its first start are compiled again at the next one"


def _plansmith_notes(upgrades: Mapping[str, str]) -> Iterator[str]:
    version = upgrades.get("plansmith")
    if version is not None and not _is_this(version):
        yield (
            f"plans stay as long as plansmith {version} has plan format {CPU_PLAN_FORMAT}, graph contract "
            f"{GRAPH_CONTRACT_VERSION} and manifest schema {SCHEMA_VERSION}; ask that version: "
            f"plansmith inspect ENGINE_DIR --upgrade plansmith={version}"
        )


def _is_this(version: str | None) -> bool:
    return version is not None and version == __version__


def _first(text: str) -> str:
    """Return the number of a format: "format-3" -> "3"."""
    return ".".join(map(str, releases.version_numbers(text)[:1])) or "unknown"
