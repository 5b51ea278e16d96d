"""The device kernels of a build: which ones a GPU target gets beside its plan, and whether those it has still serve.

They choose tokens on the device (plugins/sampling). An engine runs without them, with its logits copied to the host and
tokens drawn there, so a build goes on where the Triton language is missing, and says so.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from ..plugins.aot import CompiledKernel, compile_tasks, triton_version
from ..plugins.bundle import write_bundle
from ..plugins.compile_cache import kernel_key
from ..plugins.kernel import Kernel
from ..plugins.sampling import spec as sampling
from ..runtime.errors import EngineFileError, Error, UnsupportedError
from ..runtime.executors.kernel_bundle import read_bundle
from ..runtime.manifest_entries import KERNELS_FOLDER, TargetEntry
from ..runtime.user_cache import user_cache
from .engine_dir import describe_file
from .progress import Progress
from .targets.registry import Target

Task = tuple[Kernel, int]
_ON_HOST = "tokens are drawn on the host, which costs a copy of the logits every step"


class DeviceKernels:
    """The kernels of the GPU targets of one build; a draft has none of its own, it runs on its target's."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = {target.name: target for target in targets if target.sm}
        self._version, self._lack = "", ""
        self._compiled: list[CompiledKernel] = []
        if self._targets:
            try:
                self._version = triton_version()
            except UnsupportedError as error:
                self._lack = str(error)

    def outdated(self, entries: Mapping[str, TargetEntry], root: pathlib.Path) -> set[str]:
        """Return the targets below root, among those of the build, whose kernels have to be made, or made again."""
        if not self._version:
            return set()
        return {
            name
            for name, target in self._targets.items()
            if name in entries and _held_key(entries[name], root) != self._key(target)
        }

    def compile(self, names: Iterable[str], progress: Progress) -> None:
        """Compile the kernels of those of the build's targets that are among the names; add() tells of a failure."""
        wanted = [self._targets[name] for name in names if name in self._targets]
        if not wanted or self._lack:
            return
        # Each kernel is compiled once an SM, whatever number of targets takes it.
        tasks = {(kernel.name, sm): (kernel, sm) for target in wanted for kernel, sm in tasks_of(target)}

        def step(name: str, sm: int, done: int, total: int) -> None:
            progress(KERNELS_FOLDER, f"{name} sm{sm}", done, total)

        try:
            self._compiled = compile_tasks(
                list(tasks.values()), cache_dir=user_cache("kernels"), progress=step
            )
        except Error as error:
            self._lack = str(error)

    def add(
        self, entries: Mapping[str, TargetEntry], work: pathlib.Path
    ) -> tuple[dict[str, TargetEntry], dict[str, tuple[str, ...]]]:
        """Write the kernels of the build's targets that have none; return all entries, and notes by target.

        entries : of targets whose files lie below work, and whose kernels compile() made
        """
        bare = [
            target
            for name, target in self._targets.items()
            if name in entries and not entries[name].kernel_files()
        ]
        if self._lack:
            return dict(entries), {target.name: (f"{_ON_HOST}: {self._lack}",) for target in bare}
        added = {target.name: self._write(target, entries[target.name], work) for target in bare}
        return {**entries, **added}, {}

    def _write(self, target: Target, entry: TargetEntry, work: pathlib.Path) -> TargetEntry:
        folder = work / pathlib.PurePosixPath(entry.files[0].path).parent / KERNELS_FOLDER
        own = [one for one in self._compiled if one.sm in sms_of(target)]
        files = write_bundle(folder, own, self._version, self._key(target))
        return dataclasses.replace(
            entry, files=(*entry.files, *(describe_file(work, path) for path in files))
        )

    def _key(self, target: Target) -> str:
        keys = [kernel_key(kernel, sm, self._version) for kernel, sm in tasks_of(target)]
        return hashlib.sha256("\n".join(keys).encode()).hexdigest()


def sms_of(target: Target) -> tuple[int, ...]:
    """Return a target's compute capabilities as numbers: 89 for 8.9."""
    return tuple(int(sm.removeprefix("sm")) for sm in target.sm)


def tasks_of(target: Target) -> list[Task]:
    """Return the kernels that a GPU target gets, each for every capability of the target."""
    return [(kernel, sm) for kernel in sampling.catalog() for sm in sms_of(target) if sm >= kernel.min_sm]


def without_kernels(entry: TargetEntry) -> TargetEntry:
    """Return a target without its kernels."""
    return dataclasses.replace(entry, files=entry.plan_files())


def _held_key(entry: TargetEntry, root: pathlib.Path) -> str | None:
    """Return the key of the kernels that a target below root has; None where it has none that can be read."""
    files = entry.kernel_files()
    try:
        return read_bundle((root / files[0].path).parent).key if files else None
    except EngineFileError:
        return None
