"""What CI jobs of deploy/ci get when they run on this machine: a repository, machines with labels, caches, artifacts.

The files are executed as they are. `plansmith` is the real one; what lies beyond the machine is stood in for by two
programs: `hf` copies a checkpoint that lies in a folder, `pip` keeps a file in its cache, and both note what they are
asked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Status = Literal["success", "failure", "skipped", "queued"]

_HF = """#!/bin/sh -e
# hf download REPOSITORY --revision COMMIT --local-dir FOLDER ...
[ "$1 $3 $5" = "download --revision --local-dir" ]
echo "$*" >>"{site}/hf.log"
mkdir -p "$6"
cp -r "{site}/hub/$2/$4/." "$6"
mkdir -p "$6/.cache/huggingface"
"""
_PIP = """#!/bin/sh -e
[ "$1 $2" = "install --requirement" ] && [ -f "$3" ]
cache=${{XDG_CACHE_HOME:-$HOME/.cache}}/pip
if [ -f "$cache/wheels" ]; then from=cache; else from=index; fi
mkdir -p "$cache" && touch "$cache/wheels"
echo "$3 from $from" | tee -a "{site}/pip.log"
"""


@dataclasses.dataclass
class Machine:
    """A runner.

    labels : those that jobs ask for
    is_hosted : it is the CI system's, made anew for every job
    environ : its own settings
    """

    labels: frozenset[str]
    is_hosted: bool = True
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def takes(self, wanted: Iterable[str]) -> bool:
        """Return whether it runs a job that asks for these labels."""
        return set(wanted) <= self.labels


@dataclasses.dataclass
class JobRun:
    """What became of a job. wanted : the labels of the runner that it asked for"""

    name: str
    status: Status
    wanted: tuple[str, ...] = ()
    log: str = ""
    outputs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Site:
    """Everything that outlives a job, in a folder.

    root/repository : what is committed
    root/store : the fleet's shared store
    root/hub : REPOSITORY/COMMIT/ with a checkpoint each, which `hf` downloads
    root/caches, root/artifacts : by their names
    """

    def __init__(self, root: Path, environ: Mapping[str, str], machines: Sequence[Machine]) -> None:
        self.root = root
        self.machines = list(machines)
        self.repository, self.store, self.hub = root / "repository", root / "store", root / "hub"
        self.environ = dict(environ)
        if "PYTHONPATH" in environ:  # jobs have other working directories
            paths = environ["PYTHONPATH"].split(os.pathsep)
            self.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths)  # noqa: PTH100
        self._jobs = 0
        for name in ("bin", "caches", "artifacts", "jobs"):
            (root / name).mkdir(parents=True, exist_ok=True)
        for name, text in (("hf", _HF), ("pip", _PIP)):
            program = root / "bin" / name
            program.write_text(text.format(site=root))
            program.chmod(0o755)

    def edit(self, name: str, *pairs: tuple[str, str]) -> None:
        """Replace texts of a committed file, each of which has to be there."""
        path = self.repository / name
        text = path.read_text()
        for old, new in pairs:
            assert old in text, f"{name} has no {old!r}"
            text = text.replace(old, new)
        path.write_text(text)

    def machine(self, wanted: Iterable[str]) -> Machine | None:
        """Return the first machine that takes a job; None where there is none, so that the job waits."""
        labels = tuple(wanted)
        return next((one for one in self.machines if one.takes(labels)), None)

    def start(self, machine: Machine) -> Workspace:
        """Return the place of a new job on a machine, with a home directory of its own."""
        self._jobs += 1
        folder = self.root / "jobs" / str(self._jobs)
        (folder / "home").mkdir(parents=True)
        (folder / "work").mkdir()
        of_tests = ("XDG_CACHE_HOME", "TRITON_INTERPRET")
        environ = {name: value for name, value in self.environ.items() if name not in of_tests}
        environ["HOME"] = str(folder / "home")
        environ["PATH"] = f"{self.root / 'bin'}:{environ['PATH']}"
        return Workspace(self, folder, environ | dict(machine.environ))

    def log_of(self, program: str) -> list[str]:
        """Return what `hf` or `pip` were asked, a line a call."""
        path = self.root / f"{program}.log"
        return path.read_text().splitlines() if path.exists() else []


@dataclasses.dataclass
class Workspace:
    """Where a job runs. environ : of all its programs"""

    site: Site
    folder: Path
    environ: dict[str, str]
    log: str = ""

    @property
    def work(self) -> Path:
        """The working copy."""
        return self.folder / "work"

    def check_out(self) -> None:
        """Bring the repository into the working copy."""
        shutil.copytree(self.site.repository, self.work, dirs_exist_ok=True)

    def bash(self, script: str, environ: Mapping[str, str]) -> bool:
        """Run a script as both systems do, stopping at the first command that fails; return whether none did."""
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
            cwd=self.work,
            env={**self.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        self.log += done.stdout
        return done.returncode == 0

    def save(self, kind: Literal["caches", "artifacts"], name: str, paths: Sequence[str]) -> int:
        """Keep files and folders of the working copy or the home directory under a name; return how many."""
        target = self.site.root / kind / name
        shutil.rmtree(target, ignore_errors=True)
        found = [one for path in paths for one in self._glob(path)]
        for one in found:
            copy = target / self._relative(one)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if one.is_dir():
                shutil.copytree(one, copy, symlinks=True)
            else:
                shutil.copy2(one, copy)
        return len(found)

    def restore(self, kind: Literal["caches", "artifacts"], name: str) -> bool:
        """Bring back what is kept under a name; return whether there is such a thing."""
        source = self.site.root / kind / name
        if not source.is_dir():
            return False
        shutil.copytree(source, self.folder, symlinks=True, dirs_exist_ok=True)
        return True

    def hash_files(self, patterns: Sequence[str]) -> str:
        """Return a hash over the contents of the working copy's files of these patterns; "" where there are none."""
        found = sorted({path for pattern in patterns for path in self.work.glob(pattern)})
        return hashlib.sha256(b"".join(path.read_bytes() for path in found)).hexdigest() if found else ""

    def _glob(self, path: str) -> list[Path]:
        home = Path(self.environ["HOME"])
        base, pattern = (home, path[2:]) if path.startswith("~/") else (self.work, path)
        return sorted(base.glob(pattern))

    def _relative(self, path: Path) -> Path:
        return path.relative_to(self.folder)
