"""What the control groups that this process is in leave it of the machine: a container's limits, or a service's.

The same rules as src/cpu/control_groups.h, so that what is decided before a plan is opened agrees with what the core
decides when it does. Of version 1 and 2, where the system has its groups at /sys/fs/cgroup.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Callable, Iterator

ReadText = Callable[[str], str]
"""Takes a path and returns the file's text, "" where there is no such file."""

NO_LIMIT = (1 << 64) - 1
_ROOT = "/sys/fs/cgroup"
_MOST_BYTES = 256 << 10  # more than the kernel's tables have


def available_memory_bytes() -> int:
    """Return the memory that can be had without swapping: MemAvailable, or what the groups leave where that is less.

    Pages of files count as free: they can go. Where nothing tells, it is 2^62.
    """
    return available_in(small_file)


def available_in(read: ReadText) -> int:
    """Return the same of a machine whose files `read` returns."""
    kib = _number_behind(read("/proc/meminfo"), "MemAvailable:", 1 << 52)
    return min(kib << 10, group_memory_left(read), 1 << 62)


def usable_cores() -> int:
    """Return how many cores' time this process may use: its affinity, or the groups' quota where that is less."""
    try:
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # no Linux
        cores = os.cpu_count() or 1
    return quota_cores(small_file, max(1, cores))


def small_file(path: str) -> str:
    """Return the first 256 KiB of a file as text, "" where it cannot be read."""
    try:
        with pathlib.Path(path).open("rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def quota_cores(read: ReadText, otherwise: int) -> int:
    """Return how many cores' time the quotas leave, rounded up, at least 1; `otherwise` without any that is less."""
    cores = otherwise
    for folder in group_folders(read, ""):  # "quota period" or "max period"
        quota, _, period = read(f"{folder}/cpu.max").partition(" ")
        cores = min(cores, _cores(_number(quota), _number(period)))
    for folder in group_folders(read, "cpu"):
        quota, period = read(f"{folder}/cpu.cfs_quota_us"), read(f"{folder}/cpu.cfs_period_us")
        cores = min(cores, _cores(_number(quota), _number(period)))
    return cores


def group_memory_left(read: ReadText) -> int:
    """Return the bytes that the groups' limits leave; NO_LIMIT without a limit.

    A limit less what is in use, but for pages of files, which can go.
    """
    left = NO_LIMIT
    for folder in group_folders(read, ""):
        for most in ("memory.max", "memory.high"):  # beyond the second everything slows down
            left = min(left, _left(read, folder, most, "memory.current", ""))
    for folder in group_folders(read, "memory"):
        left = min(left, _left(read, folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
    return left


def group_folders(read: ReadText, controller: str) -> Iterator[str]:
    """Yield the folders of this process's group and those around it, innermost first.

    controller : version 1 has one tree a controller, version 2 one for all, whose name is ""
    """
    root = f"{_ROOT}/{controller}" if controller else _ROOT
    mounted = mounted_group(read, root)
    for line in read("/proc/self/cgroup").splitlines():  # number:controllers:path
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon or controller not in controllers.split(",") or not path.startswith("/"):
            continue
        if mounted != "/" and f"{path}/".startswith(f"{mounted}/"):
            path = path[len(mounted) :]
        while len(path) > 1:
            yield root + path
            path = path.rpartition("/")[0]
    yield root


def mounted_group(read: ReadText, point: str) -> str:
    """Return which group is the outermost that can be seen at `point`, "/" where no mount is told.

    Within a container that may be its own, which the host, and so /proc/self/cgroup, calls /docker/<id>.
    """
    for line in read("/proc/self/mountinfo").splitlines():  # id parent device root point ..
        words = line.split()
        if len(words) > 4 and words[4] == point:
            return words[3]
    return "/"


def _left(read: ReadText, folder: str, most: str, in_use: str, prefix: str) -> int:
    limit = _number(read(f"{folder}/{most}"))
    if limit is None:
        return NO_LIMIT
    stat = read(f"{folder}/memory.stat")
    files = sum(_number_behind(stat, f"{prefix}{kind}_file ", 0) for kind in ("active", "inactive"))
    return max(0, limit - max(0, (_number(read(f"{folder}/{in_use}")) or 0) - files))


def _cores(quota: int | None, period: int | None) -> int:
    return NO_LIMIT if quota is None or not period else max(1, -(-quota // period))


def _number(text: str) -> int | None:
    """Return the number that a text begins with; None where it begins with none ("max"), or with one below 0."""
    found = re.match(r" *(\d+)", text)
    return None if found is None else int(found[1])


def _number_behind(text: str, name: str, otherwise: int) -> int:
    """Return the number behind `name` at the beginning of a line."""
    found = re.search(rf"^{re.escape(name)} *(\d+)", text, re.MULTILINE)
    return otherwise if found is None else int(found[1])
