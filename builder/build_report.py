"""What a build tells: a report for people and CI, and the facts of the machine it ran on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import platform
from typing import Any

from ..runtime.manifest_entries import HostEntry

REPORT_NAME = "build_report.json"
LOG_TAIL_LINES = 20


@dataclasses.dataclass(frozen=True)
class TargetReport:
    """How one target went.

    status : "built", or "kept" (unchanged, not compiled again)
    seconds : of the compilation; of a kept target, when it was compiled
    peak_rss_bytes : most memory held while it compiled, 0 where that cannot be told
    weight_bytes : bytes of the graph's weights by type
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


@dataclasses.dataclass(frozen=True)
class BuildReport:
    """How the targets of an engine were built. `seconds` is the whole build, opening the checkpoint included."""

    engine_dir: str
    checkpoint: str
    precision: str
    limits: dict[str, Any]
    seconds: float
    targets: dict[str, TargetReport]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return dataclasses.asdict(self)

    def write(self, directory: pathlib.Path) -> None:
        """Write build_report.json."""
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"
        (directory / REPORT_NAME).write_text(text, encoding="utf-8")


def read_targets(directory: pathlib.Path) -> dict[str, TargetReport]:
    """Return the targets of a directory's report; what cannot be read is left out, nothing depends on it."""
    try:
        content = json.loads((directory / REPORT_NAME).read_text(encoding="utf-8"))
        return {name: _read_target(one) for name, one in content["targets"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _read_target(one: dict[str, Any]) -> TargetReport:
    report = TargetReport(**one)
    return dataclasses.replace(report, warnings=tuple(report.warnings), log_tail=tuple(report.log_tail))


def host() -> HostEntry:
    """Return the facts of this machine."""
    return HostEntry(
        os=f"{platform.system()} {platform.release()}"[:200] or "unknown",
        machine=platform.machine() or "unknown",
        cpu=_cpu_name(),
        cpus=os.cpu_count() or 1,
        memory_bytes=_memory_bytes(),
        python=platform.python_version(),
    )


def _cpu_name() -> str:
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split()) or "unknown"
    except (OSError, ValueError):
        pass
    return platform.processor() or "unknown"


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


class PeakMemory:
    """Measures the most memory this process holds inside a `with` block; `bytes` is 0 where that cannot be told."""

    def __init__(self) -> None:
        self.bytes = 0

    def __enter__(self) -> PeakMemory:
        with contextlib.suppress(OSError):
            pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to what is held now
        return self

    def __exit__(self, *_: object) -> None:
        try:
            status = pathlib.Path("/proc/self/status").read_text(encoding="utf-8")
        except OSError:
            return
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                self.bytes = int(line.split()[1]) << 10
