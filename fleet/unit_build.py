"""One unit from its checkpoint into a store: compiled in a directory for the time being, then added with its record."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..builder.build_report import BuildReport
from ..builder.checkpoint.hash_cache import HashCache
from ..builder.progress import Progress
from ..runtime.errors import BuildError, Error
from ..runtime.manifest import Manifest, load_manifest
from ..runtime.manifest_fields import to_json
from .engine_graphs import EngineGraphs
from .store.local import LocalStore
from .store.record import Record
from .stored import forget, has_its_files, is_whole
from .unit_files import KeptFiles, UnitFiles
from .units import Unit

UNIT = "unit"
# Of a store's folder: where the logs of failed compiles are left, one a plan.
LOGS = "logs"


@dataclasses.dataclass(frozen=True)
class Workshop:
    """What the units of one run share.

    scratch : a directory on the store's disk; hashes : what says whether a checkpoint changed meanwhile
    is_kept : says whether what was built stays in scratch once it is stored, for whoever assembles engines
    """

    store: LocalStore
    scratch: Path
    hashes: HashCache
    graphs: EngineGraphs
    progress: Progress
    is_kept: Callable[[], bool] = lambda: False


@dataclasses.dataclass(frozen=True)
class BuiltUnit:
    """What came of a unit.

    report : how its plans were compiled; None = another builder had put it into the store meanwhile
    kept : its files, where the workshop keeps them; None = they are in the store alone
    """

    record: Record
    report: BuildReport | None
    kept: KeptFiles | None = None


def build_unit(unit: Unit, shop: Workshop, let_go: Callable[[], None] = lambda: None) -> BuiltUnit | None:
    """Return a unit once it is in the store; None while another process is building it.

    let_go : called once its compilers have ended, see SideBySide.compilers_ended
    raises what build_engine raises, CheckpointError when the checkpoint changes meanwhile, what the store raises, and
        BuildError for whatever else the file system says
    """
    held = shop.store.lock_unit(unit.key)
    if held is None:
        return None
    # Units of one key, made of one checkpoint under two names, have a folder each.
    out = shop.scratch / hashlib.sha256(unit.name.encode()).hexdigest()
    built: BuiltUnit | None = None
    with held, disk_errors(unit.name):
        try:
            with shop.graphs.used(unit.engine.name):
                there = shop.store.readable(unit.key)
                if there is not None and is_whole(shop.store, there):
                    return BuiltUnit(there, None)
                if there is not None:
                    # What is missing is stored again; the plan may have other bytes.
                    forget(shop.store, unit.key)
                files = UnitFiles(shop.store)
                report = _compile(unit, out, shop, files, let_go)
            built = _stored(unit, out, report, shop, files)
            return built
        finally:
            if built is None or built.kept is None:
                shutil.rmtree(out, ignore_errors=True)


@contextlib.contextmanager
def disk_errors(name: str) -> Iterator[None]:
    """Raise BuildError, which names a unit or an engine, for what the file system says meanwhile."""
    try:
        yield
    except OSError as error:
        place = "" if error.filename is None else f" ({error.filename})"
        raise BuildError(
            f"{name}: {error.strerror or error}{place}; run it again once that is mended"
        ) from error


def _stored(unit: Unit, out: Path, report: BuildReport, shop: Workshop, files: UnitFiles) -> BuiltUnit:
    made = _record(unit, out, files)
    record = shop.store.put_record(made)
    is_kept = record.files == made.files and shop.is_kept()
    return BuiltUnit(record, report, KeptFiles(out, files.stamps) if is_kept else None)


def _compile(
    unit: Unit, out: Path, shop: Workshop, files: UnitFiles, let_go: Callable[[], None]
) -> BuildReport:
    # They take half a second to import, which a fleet that is there already spares.
    from ..builder.build import build_engine
    from ..builder.targets.compiler_process import Stopped

    shared = shop.graphs.of(unit.engine.name)
    beside = dataclasses.replace(shared, compilers_ended=let_go, describe=files.describe)

    def progress(_: str, phase: str, done: int, total: int) -> None:
        if shared.stop.is_set():  # a cpu plan is made in this thread, which nobody can kill
            raise Stopped
        shop.progress(unit.name, phase, done, total)

    try:
        report = build_engine(unit.plan, out, workers=1, progress=progress, side_by_side=beside)
    except Error as error:
        _keep_logs(unit, out, shop.store.root / LOGS, error)
        raise
    for log in _logs(unit, shop.store.root / LOGS):
        log.unlink(missing_ok=True)
    unit.checkpoint.check_unchanged(shop.hashes)
    return report


def _keep_logs(unit: Unit, out: Path, folder: Path, error: Error) -> None:
    """Move the logs of a failed compile to where they outlive its directory, and have the error tell that place."""
    text = str(error)
    for log in out.parent.glob(f"{out.name}.*.log"):
        kept = folder / log.name.replace(out.name, _log_stem(unit))
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
            text = text.replace(str(log), str(shutil.move(log, kept)))
    error.args = (text, *error.args[1:])


def _logs(unit: Unit, folder: Path) -> list[Path]:
    """Return the logs that earlier failures of a unit left."""
    return list(folder.glob(f"{_log_stem(unit)}.*.log"))


def _log_stem(unit: Unit) -> str:
    return unit.name.replace("/", ".").replace("@", ".")


def _record(unit: Unit, out: Path, files: UnitFiles) -> Record:
    manifest = load_manifest(out)
    if manifest.tokenizer.sha256 != unit.inputs["tokenizer"]:
        raise BuildError(
            f"{unit.name}: the tokenizer of {unit.checkpoint.path} changed while it was compiled, so what came of it "
            "is thrown away; run it again once nobody writes there"
        )
    _check_kernels(unit, manifest, out)
    record = Record(
        key=unit.key,
        kind=UNIT,
        inputs=dict(unit.inputs),
        files=files.complete(out, [path.relative_to(out).as_posix() for path in _files(out)]),
        content={"manifest": to_json(manifest), "report": _targets(out)},
        provenance=_provenance(manifest),
    )
    if not has_its_files(record):
        raise BuildError(
            f"{unit.name}: a file below {out} changed before it was stored, so what came of it is thrown away; run it "
            "again once nobody writes there"
        )
    return record


def _check_kernels(unit: Unit, manifest: Manifest, out: Path) -> None:
    """Refuse a plan whose kernels could not be made: its key says that it has them, so nobody would make them again."""
    (entry,) = manifest.targets.values()
    if unit.inputs.get("kernels.key") and not entry.kernel_files():
        notes = "; ".join(note for one in _targets(out).values() for note in one["notes"])
        raise BuildError(
            f"{unit.name}: its kernels could not be compiled, run it again once that is mended ({notes})"
        )


def _files(out: Path) -> list[Path]:
    """Return all files of an engine but its manifest and reports, which are made anew when it is assembled."""
    folders = (out / "targets", out / "tokenizer")
    return sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())


def _targets(out: Path) -> dict[str, Any]:
    from ..builder.build_report import read_targets

    return {name: dataclasses.asdict(one) for name, one in read_targets(out).items()}


def _provenance(manifest: Manifest) -> dict[str, Any]:
    """Return where the plan comes from, as its manifest entry says."""
    (entry,) = manifest.targets.values()
    return {} if entry.provenance is None else dict(to_json(entry.provenance))
