"""What control groups of both versions leave a process, from texts of their files.

The cases are those of cpu/control_groups_test.cc: the core decides by the same rules in C++.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from plansmith.builder import machine
from plansmith.runtime.control_groups import (
    NO_LIMIT,
    available_in,
    available_memory_bytes,
    group_folders,
    group_memory_left,
    quota_cores,
    small_file,
    usable_cores,
)

Files = dict[str, str]
ROOT = "/sys/fs/cgroup"


def reader(files: Files) -> Callable[[str], str]:
    return lambda path: files.get(path, "")


def folders(files: Files, controller: str) -> list[str]:
    return list(group_folders(reader(files), controller))


def cores(files: Files) -> int:
    return quota_cores(reader(files), 64)


def left(files: Files) -> int:
    return group_memory_left(reader(files))


def test_folders_of_a_group_and_those_around_it() -> None:
    files = {
        "/proc/self/cgroup": "12:cpuset:/other\n4:cpu,cpuacct:/docker/ab:cd\n3:memory:/m\n1:name=systemd:/s\nnonsense\n"
        "2:cpu\n0::/user.slice/a.service\n"
    }
    assert folders(files, "") == [f"{ROOT}/user.slice/a.service", f"{ROOT}/user.slice", ROOT]
    assert folders(files, "cpu") == [f"{ROOT}/cpu/docker/ab:cd", f"{ROOT}/cpu/docker", f"{ROOT}/cpu"]
    assert folders(files, "memory") == [f"{ROOT}/memory/m", f"{ROOT}/memory"]


@pytest.mark.parametrize(
    ("mounted", "group", "found"),
    [
        ("/docker/ab", "/docker/ab/sub", ["/cpu/sub", "/cpu"]),
        ("/docker/ab", "/docker/ab", ["/cpu"]),
        ("/docker/a", "/docker/ab/sub", ["/cpu/docker/ab/sub", "/cpu/docker/ab", "/cpu/docker", "/cpu"]),
    ],
)
def test_a_container_sees_its_own_group_as_the_outermost(mounted: str, group: str, found: list[str]) -> None:
    files = {
        "/proc/self/cgroup": f"4:cpu:{group}\n",
        "/proc/self/mountinfo": "30 25 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n41 30 0:35 "
        f"{mounted} /sys/fs/cgroup/cpu rw,nosuid - cgroup cgroup rw,cpu\n",
    }
    assert folders(files, "cpu") == [ROOT + one for one in found]


@pytest.mark.parametrize("text", ["", "0::/", "0::", "0::a/b"])
def test_without_a_group_the_outermost_folder_counts(text: str) -> None:
    assert folders({"/proc/self/cgroup": text}, "") == [ROOT]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("max 100000\n", 64),
        ("200000 100000\n", 2),
        ("200001 100000\n", 3),
        ("1000 100000\n", 1),
        ("99000000 100000\n", 64),
        *((odd, 64) for odd in ("", "max", "200000", "200000 ", "200000 0\n", "x y\n")),
    ],
)
def test_a_quota_is_rounded_up_to_cores(text: str, found: int) -> None:
    assert cores({f"{ROOT}/cpu.max": text}) == found


def test_the_least_quota_of_nested_groups_counts() -> None:
    files = {
        "/proc/self/cgroup": "0::/a/b\n",
        f"{ROOT}/a/b/cpu.max": "800000 100000\n",
        f"{ROOT}/a/cpu.max": "350000 100000\n",
    }
    assert cores(files) == 4
    assert cores(files | {"/proc/self/cgroup": "0::/gone/b\n"}) == 64


@pytest.mark.parametrize(
    ("quota", "period", "found"), [("-1\n", "100000\n", 64), ("150000\n", "100000\n", 2), ("50000\n", "", 64)]
)
def test_quotas_of_version_1(quota: str, period: str, found: int) -> None:
    files = {
        "/proc/self/cgroup": "3:cpuacct,cpu:/docker/x\n",
        f"{ROOT}/cpu/cpu.cfs_quota_us": quota,
        f"{ROOT}/cpu/cpu.cfs_period_us": period,
    }
    assert cores(files) == found


def test_memory_of_version_2() -> None:
    assert left({}) == NO_LIMIT and left({f"{ROOT}/memory.max": "max\n"}) == NO_LIMIT
    files = {f"{ROOT}/memory.max": "1000\n"}
    assert left(files) == 1000
    files[f"{ROOT}/memory.current"] = "700\n"
    assert left(files) == 300
    files[f"{ROOT}/memory.stat"] = "anon 100\nfile 600\ninactive_file 200\nactive_file 50\n"
    assert left(files) == 550  # pages of files can go
    files[f"{ROOT}/memory.current"] = "200\n"  # read at another time than the table
    assert left(files) == 1000
    files[f"{ROOT}/memory.current"] = "5000\n"
    assert left(files) == 0


def test_memory_of_nested_groups_and_what_is_high() -> None:
    files = {
        "/proc/self/cgroup": "0::/a\n",
        f"{ROOT}/memory.max": "1000\n",
        f"{ROOT}/memory.current": "100\n",
        f"{ROOT}/a/memory.max": "900\n",
        f"{ROOT}/a/memory.current": "450\n",
    }
    assert left(files) == 450
    assert left(files | {f"{ROOT}/a/memory.high": "500\n"}) == 50


def test_memory_of_version_1() -> None:
    files = {
        "/proc/self/cgroup": "3:memory:/docker/x\n",
        f"{ROOT}/memory/docker/x/memory.limit_in_bytes": "5000\n",
        f"{ROOT}/memory/docker/x/memory.usage_in_bytes": "4000\n",
        f"{ROOT}/memory/docker/x/memory.stat": "inactive_file 1\nactive_file 2\ntotal_inactive_file 1000\n"
        "total_active_file 500\n",
        f"{ROOT}/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert left(files) == 2500


def test_the_machines_own_memory_is_the_other_bound() -> None:
    files = {"/proc/meminfo": "MemTotal:  8 kB\nMemAvailable:       4 kB\n"}
    assert available_in(reader(files)) == 4096
    assert available_in(reader(files | {f"{ROOT}/memory.max": "1000\n"})) == 1000
    assert available_in(reader(files | {f"{ROOT}/memory.max": "9000\n"})) == 4096
    assert available_in(reader({})) >= 1 << 60  # nothing tells


def test_this_machine(tmp_path: Path) -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    assert available_memory_bytes() > 0
    assert machine.available_memory_bytes is available_memory_bytes
    assert small_file("/no/such/file") == "" and small_file(str(tmp_path)) == ""
    (tmp_path / "large").write_bytes(b"\xff" * (300 << 10))
    assert len(small_file(str(tmp_path / "large"))) == 256 << 10
