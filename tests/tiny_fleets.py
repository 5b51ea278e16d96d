"""Small fleets of tiny checkpoints, built in this process or by the command line in another."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from plansmith.builder import compile
from plansmith.builder.checkpoint.hash_cache import HashCache
from plansmith.builder.targets.registry import Target
from plansmith.fleet.budget import Budget
from plansmith.fleet.build import BuildOptions, build_fleet
from plansmith.fleet.fleet_file import Fleet, read_fleet
from plansmith.fleet.report import FleetReport
from plansmith.fleet.store import open_store
from plansmith.fleet.store.local import LocalStore
from plansmith.fleet.store.verify import verify
from plansmith.fleet.units import Unit, units_of
from plansmith.plugins.aot import CompiledKernel
from plansmith.plugins.kernel import Kernel
from plansmith.plugins.resources import Resources

TEXT = """\
version: 1
name: chat
limits: {max_batch_size: 4, max_num_tokens: 64, max_seq_len: 128, tokens_per_block: 8}
models: {MODELS}
recipes: RECIPES
skus: SKUS
"""


class TinyFleet:
    """A folder with plansmith.yaml and checkpoints of its own, which may be changed."""

    def __init__(
        self, folder: Path, models: dict[str, Path], recipes: str = "[fp16]", skus: str = "[cpu]"
    ) -> None:
        self.folder = folder
        self.file = folder / "plansmith.yaml"
        folder.mkdir(parents=True)
        for name, checkpoint in models.items():
            shutil.copytree(checkpoint, folder / name)
        listed = ", ".join(f"{name}: {name}" for name in models)
        text = TEXT.replace("MODELS", listed).replace("RECIPES", recipes).replace("SKUS", skus)
        self.file.write_text(text, encoding="utf-8")

    @property
    def fleet(self) -> Fleet:
        """The fleet as its file is now."""
        return read_fleet(self.file)

    @property
    def store(self) -> LocalStore:
        """Its folder's store, which is made."""
        return open_store(self.fleet.store)

    def edit(self, old: str, new: str) -> None:
        """Replace a piece of the file."""
        text = self.file.read_text(encoding="utf-8")
        assert text.count(old) == 1, (old, text)
        self.file.write_text(text.replace(old, new), encoding="utf-8")

    def units(self, *only: str) -> list[Unit]:
        """Return the units of it, or those that patterns choose."""
        return units_of(self.fleet, only=only, hashes=self.hashes())

    def hashes(self) -> HashCache:
        """Return what remembers fingerprints, also those of files that were written just now."""
        return HashCache(self.folder / "hashes", now_ns=lambda: time.time_ns() + 10 * 10**9)

    def build(self, *only: str, budget: Budget | None = None, **options: Any) -> FleetReport:
        """Build it in this process, with the options of BuildOptions."""
        units = self.units(*only)
        chosen = {unit.name for unit in units}
        engines = {unit.engine.name for unit in units}
        others = [one for one in self.units() if one.engine.name in engines and one.name not in chosen]
        made = BuildOptions(budget or Budget(64 << 30, 2), hashes=self.hashes(), **options)
        return build_fleet(self.fleet, units, self.store, made, others)

    def run(self, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run `plansmith fleet ...` to its end."""
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, env=self.environment(), **options
        )

    def start(self, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        """Start `plansmith fleet ...` as the leader of a process group."""
        return subprocess.Popen(
            self.command(*arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment(),
            start_new_session=True,
            **options,
        )

    def command(self, name: str, *arguments: object) -> list[str]:
        """Return the command line of one of the fleet's commands."""
        words = [name, "-f", self.file, *arguments]
        return [sys.executable, "-m", "plansmith.cli", "fleet", *map(str, words)]

    def environment(self) -> dict[str, str]:
        """Return the environment of its commands: what they remember of checkpoints is the fleet's own."""
        return {
            **os.environ,
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }

    def problems(self) -> list[str]:
        """Return what is wrong with its store."""
        return [f"{one.name} {one.what}" for one in verify(self.store)]

    def records(self) -> dict[str, int]:
        """Return when each unit's record was written, in ns: one that is compiled again has another time."""
        store = self.store
        return {key: (store.root / f"records/{key}.json").stat().st_mtime_ns for key in names(store)}


class QuickRtx:
    """Takes the place of compile._compile_rtx where a test is about what is compiled, not how.

    compiled : model/precision/target of every plan, "/draft" behind those that draft
    errors : of a plan that is named so: what it fails with; meanwhile : called before each, with its name
    """

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.meanwhile: Callable[[str], None] = lambda name: None

    def __call__(
        self,
        request: compile.CompileRequest,
        targets: Sequence[Target],
        work: Path,
        progress: compile.Progress,
        keep_going: bool,
    ) -> Iterator[tuple[Target, compile.Compiled]]:
        for target in targets:
            name = f"{request.checkpoint.path.name}/{request.recipe.name}/{request.label(target)}"
            self.compiled.append(name)
            self.meanwhile(name)
            if name in self.errors:
                raise self.errors[name]
            plan = request.folder(work, target) / "model.plan"
            plan.write_bytes(f"{name} {request.limits} {request.checkpoint.fingerprint()}".encode())
            yield target, compile.Compiled("fake", "1", (plan,), (), 0.0, 0, {})


def quick_kernels(tasks: Sequence[tuple[Kernel, int]], **options: Any) -> list[CompiledKernel]:
    """Take the place of aot.compile_tasks."""
    needed = Resources(32, 0, 0, 0, 0, 0)
    return [
        CompiledKernel(one, sm, "f", f"{one.name} {sm}".encode(), "", 256, one.num_warps, needed, 0.1)
        for one, sm in tasks
    ]


def names(store: LocalStore) -> list[str]:
    """Return the keys of a store's records of units."""
    return [key for key in store.records() if (one := store.record(key)) is not None and one.kind == "unit"]


def statuses(report: FleetReport) -> dict[str, str]:
    """Return what became of every unit."""
    return {unit.name: unit.status for unit in report.units}


def engines(report: FleetReport) -> dict[str, str]:
    """Return what became of every engine."""
    return {engine.name: engine.status for engine in report.engines}


def json_of(done: subprocess.CompletedProcess[str]) -> Any:
    """Return what a command printed with --json."""
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def left_behind(folder: Path) -> list[str]:
    """Return the names of work directories and parts of files below a folder."""
    return [path.name for path in folder.rglob("*") if _is_work(path.name)]


def _is_work(name: str) -> bool:
    return name.startswith(("plansmith-fleet-", ".rtx-")) or name.endswith(
        (".new", ".part", ".plansmith.lock")
    )


def generated(engine_dir: Path, **options: Any) -> tuple[int, ...]:
    """Return the tokens that an engine's cpu plan generates greedily; options as of Engine.open."""
    from plansmith.runtime.engine import Engine
    from plansmith.runtime.sampling import SamplingParams

    with Engine.open(engine_dir, num_threads=1, **options) as engine:
        (done,) = engine.generate(
            [[5, 9, 70, 31]], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        )
    return tuple(done.outputs[0].token_ids)


def without_host(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest's JSON without what tells when and where it was made."""
    return {
        name: without_host(one) if isinstance(one, dict) else one
        for name, one in manifest.items()
        if name not in _HOST_FIELDS
    }


_HOST_FIELDS = ("created", "seconds", "checksum", "host")


def manifest_json(engine_dir: Path) -> dict[str, Any]:
    """Return an engine's manifest, without times and hosts."""
    raw = json.loads((engine_dir / "manifest.json").read_text(encoding="utf-8"))
    assert isinstance(raw, dict)
    return without_host(raw)


def files(folder: Path) -> dict[str, bytes]:
    """Return all files of an engine but its manifest and reports, and logs, which tell times."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    told = ("manifest.json", "build_report.json", "build_report.html")
    return {
        name: path.read_bytes() for name, path in found.items() if name not in told and path.suffix != ".log"
    }


def engines_of_folder(folder: Path) -> list[Path]:
    """Return the engines in a folder, without what a build is at or has left."""
    return sorted(path for path in folder.glob("*") if path.is_dir() and not path.name.startswith("."))
