"""Real builds, killed and interrupted at any moment, and side by side on one store: it is always whole."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from plansmith.fleet.store import RemoteStore, verify
from plansmith.runtime.manifest import MANIFEST_NAME, load_manifest
from tiny_fleets import TinyFleet, engines_of_folder, generated, json_of, left_behind, names

MakeFleet = Callable[..., TinyFleet]
TWO = {"a": "llama", "b": "qwen3"}
DEADLINE_S = 300.0  # of what has to happen, on however slow a machine
FEW, MANY = 12, 50


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Wait until something is so; fail where it never is, or its process ended before."""
    end = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < end
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.01)


def end_of_group(process: subprocess.Popen[str]) -> None:
    """Wait until no process of its group is left: compilers go with who started them."""

    def is_gone() -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 0)
            return _only_zombies(process.pid)
        return True

    wait_for(is_gone)


def _only_zombies(group: int) -> bool:
    """Return whether a group has but processes that ended and whom nobody has asked for."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = path.read_text().rpartition(") ")[2].split()[:3]
            if int(pgrp) == group and state != "Z":
                return False
    return True


def is_compiling(fleet: TinyFleet) -> bool:
    """Return whether a GPU compiler has its job."""
    return any("job.json" in files for _, _, files in os.walk(fleet.folder / ".plansmith/store/work"))


@pytest.fixture
def remote(tmp_path: Path) -> RemoteStore:
    return RemoteStore(f"file://{tmp_path}/remote")


class Victim:
    """A fleet whose commands are killed, each time a little later or earlier, and what has to be true then."""

    def __init__(self, fleet: TinyFleet, remote: RemoteStore, seed: int) -> None:
        self.fleet = fleet
        self.remote = remote
        self.random = random.Random(seed)
        self.folders = [fleet.folder / ".plansmith/store", fleet.folder / "engines"]
        self.folders.append(Path(remote.url.removeprefix("file://")))

    def kill(self, within_s: float, num_files: int, *arguments: object) -> bool:
        """Run a command and kill it; return whether it was done before that. Check everything.

        within_s, num_files : how long it takes, and how many files it makes: half of the kills are at a random time,
            half when it has made a random number of them, since most of the time nothing is written
        """
        process = self.fleet.start(*arguments)
        if self.random.random() < 0.5:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self.random.uniform(0, within_s))
        else:
            wanted = self.num_files() + self.random.randrange(num_files)
            wait_for(lambda: self.num_files() > wanted or process.poll() is not None)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), (out, err)
        end_of_group(process)
        self.check()
        return process.returncode == 0

    def num_files(self) -> int:
        """Return how many files there are in both stores and the engines."""
        return sum(len(files) for folder in self.folders for _, _, files in os.walk(folder))

    def check(self) -> None:
        """Both stores are whole, and every engine that is there as well."""
        for store in (self.fleet.store, self.remote):
            assert [f"{one.name} {one.what}" for one in verify(store)] == []
        for path in engines_of_folder(self.fleet.folder / "engines"):
            load_manifest(path).check_files(hashes=True)

    def complete(self, *arguments: object) -> None:
        """Run a build to its end: it compiles what lacks and nothing else, and the engines open."""
        there = set(names(self.fleet.store))
        done = self.fleet.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        units = json_of(done)["units"]
        assert {one["key"] for one in units if one["status"] == "built"} == {
            one["key"] for one in units
        } - there
        assert {one["status"] for one in units} <= {"built", "kept"}
        self.check()
        for path in engines_of_folder(self.fleet.folder / "engines"):
            assert len(generated(path)) == 6

    def forget(self) -> None:
        """Begin anew, with checkpoints and kernels that are known."""
        for path in (self.fleet.folder / ".plansmith", self.fleet.folder / "engines"):
            shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(self.remote.url.removeprefix("file://"), ignore_errors=True)
        self.remote = RemoteStore(self.remote.url)


def seconds_of(work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start


def kill_builds(fleet: TinyFleet, remote: RemoteStore, count: int, seed: int) -> None:
    victim = Victim(fleet, remote, seed)
    command = ("build", "--memory", "64GiB", "--push", "--remote", remote.url)
    victim.complete(*command)  # kernels are cached then
    victim.forget()
    within_s = seconds_of(lambda: victim.complete(*command))
    num_files = victim.num_files()
    victim.forget()
    outcomes: collections.Counter[str] = collections.Counter()
    for _ in range(count):
        is_done = victim.kill(within_s, num_files, *command)
        outcomes["done" if is_done else "killed"] += 1
        if is_done or len(names(fleet.store)) == len(fleet.units()):
            victim.complete(*command)
            victim.forget()
    victim.complete(*command)
    assert outcomes["killed"] >= count // 2
    _check_work_goes(fleet)


def _check_work_goes(fleet: TinyFleet) -> None:
    """What killed builds left goes with the next one, as soon as it cannot be anybody's who begins just now."""
    work = fleet.folder / ".plansmith/store/work"
    for path in work.iterdir():
        os.utime(path, (0, 0))
    assert fleet.run("build").returncode == 0
    assert left_behind(work) == []


def kill_pushes(fleet: TinyFleet, remote: RemoteStore, count: int, seed: int) -> None:
    victim = Victim(fleet, remote, seed)
    command = ("push", "--remote", remote.url)
    assert fleet.run("build", "--memory", "64GiB").returncode == 0
    before = victim.num_files()
    within_s = seconds_of(lambda: fleet.run(*command))
    num_files = victim.num_files() - before
    num_records = len(list(remote.records()))
    assert num_records == len(fleet.units())
    forget = lambda: shutil.rmtree(remote.url.removeprefix("file://"), ignore_errors=True)  # noqa: E731
    forget()
    num_killed = 0
    for _ in range(count):
        victim.remote = RemoteStore(remote.url)
        is_done = victim.kill(within_s, num_files, *command)
        num_killed += not is_done
        if is_done:
            forget()
    done = fleet.run(*command)
    assert done.returncode == 0, done.stderr
    victim.remote = RemoteStore(remote.url)
    victim.check()
    assert len(list(victim.remote.records())) == num_records
    assert num_killed >= count // 2


@pytest.fixture
def victims(tiny_fleet: MakeFleet) -> TinyFleet:
    """Return a fleet of four cpu plans and one of a GPU."""
    pytest.importorskip("tensorrt_rtx")
    fleet = tiny_fleet(TWO, recipes="[fp16, int8]", skus="[cpu, sm89]")
    choice = "engines:\n- {model: [a, b], recipe: [fp16, int8], skus: cpu}\n- {model: a, recipe: fp16, skus: sm89}\n"
    fleet.file.write_text(fleet.file.read_text() + choice)
    assert len(fleet.units()) == 5
    return fleet


def test_builds_that_are_killed(victims: TinyFleet, remote: RemoteStore) -> None:
    kill_builds(victims, remote, FEW, seed=1)


def test_pushes_that_are_killed(tiny_fleet: MakeFleet, remote: RemoteStore) -> None:
    kill_pushes(tiny_fleet(TWO, recipes="[fp16, int8]"), remote, FEW, seed=2)


@pytest.mark.slow
def test_many_builds_that_are_killed(victims: TinyFleet, remote: RemoteStore) -> None:
    kill_builds(victims, remote, MANY, seed=3)


@pytest.mark.slow
def test_many_pushes_that_are_killed(tiny_fleet: MakeFleet, remote: RemoteStore) -> None:
    kill_pushes(tiny_fleet(TWO, recipes="[fp16, int8]"), remote, MANY, seed=4)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_compilers_and_leaves_nothing(
    tiny_fleet: MakeFleet, number: int, code: int
) -> None:
    pytest.importorskip("tensorrt_rtx")
    fleet = tiny_fleet(TWO, skus="[sm89, sm80]")
    process = fleet.start("build", "--memory", "64GiB", "--workers", 2)
    wait_for(lambda: is_compiling(fleet), process)
    process.send_signal(number)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code, (out, err)
    assert "Traceback" not in err
    end_of_group(process)
    assert left_behind(fleet.folder) == [] and fleet.problems() == []
    assert not (fleet.folder / "engines").exists() or not any((fleet.folder / "engines").iterdir())
    assert fleet.run("build", "--only", "a/fp16/sm89").returncode == 0


@pytest.mark.parametrize("count", [2, 3])
def test_builders_side_by_side_on_one_store(tiny_fleet: MakeFleet, count: int) -> None:
    """All end well, each unit is compiled by one of them, and the engines are there."""
    fleet = tiny_fleet({**TWO, "c": "phi3"}, recipes="[fp16, int8]")
    processes = [fleet.start("build", "--json", "--memory", "64GiB") for _ in range(count)]
    outputs = [process.communicate(timeout=DEADLINE_S) for process in processes]
    assert [process.returncode for process in processes] == [0] * count, outputs
    import json

    reports = [json.loads(out) for out, _ in outputs]
    built = collections.Counter(
        unit["name"] for report in reports for unit in report["units"] if unit["status"] == "built"
    )
    assert built == dict.fromkeys((unit.name for unit in fleet.units()), 1)
    made = collections.Counter(
        one["name"] for report in reports for one in report["engines"] if one["status"] == "assembled"
    )
    assert made == dict.fromkeys((unit.engine.name for unit in fleet.units()), 1)
    assert fleet.problems() == [] and left_behind(fleet.folder) == []
    for path in engines_of_folder(fleet.folder / "engines"):
        assert len(generated(path)) == 6


def test_who_waits_for_a_builder_that_is_killed_takes_over(tiny_fleet: MakeFleet) -> None:
    pytest.importorskip("tensorrt_rtx")
    fleet = tiny_fleet(skus="[cpu, sm89]")
    first = fleet.start("build", "--memory", "64GiB")
    wait_for(lambda: is_compiling(fleet), first)
    second = fleet.start("build", "--json", "--memory", "64GiB")
    key = next(unit.key for unit in fleet.units() if unit.target.name == "sm89")
    # The second one has its directory, and so is at its units.
    wait_for(lambda: len(list((fleet.folder / ".plansmith/store/work").iterdir())) == 2, second)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    end_of_group(first)
    out, err = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 0, err
    import json

    status = {unit["key"]: unit["status"] for unit in json.loads(out)["units"]}
    assert status[key] == "built"
    assert fleet.problems() == []
    assert (fleet.folder / "engines/tiny-fp16" / MANIFEST_NAME).is_file()
