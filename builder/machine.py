"""What this machine is, and how much memory it has, holds and has held."""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform

from ..runtime.control_groups import available_memory_bytes as available_memory_bytes
from ..runtime.manifest_entries import HostEntry


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


def peak_rss_bytes() -> int:
    """Return the most memory this process has held (ru_maxrss would count the parent's before exec); 0 = unknown."""
    try:
        status = pathlib.Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


class PeakMemory:
    """Measures the most memory this process holds inside a `with` block; `bytes` is 0 where that cannot be told."""

    def __init__(self) -> None:
        self.bytes = 0

    def __enter__(self) -> PeakMemory:
        with contextlib.suppress(OSError):
            pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to what is held now
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = peak_rss_bytes()
