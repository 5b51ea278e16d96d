"""A fleet's units between the folder of one machine and the store that machines share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..builder.build_key import inputs_key
from ..builder.engine_dir import destination
from ..builder.progress import Progress, no_progress
from ..runtime.errors import EngineFileError, Error
from ..runtime.manifest import hash_file, load_manifest
from ..runtime.manifest_entries import FileEntry
from .assemble import assemble as assemble_engine
from .compare import compare
from .engines import FleetEngine, engines_of
from .facts_store import note_facts, outdated_facts, pull_facts
from .fleet_file import Fleet
from .gate_check import failure_of, gates_name, is_verdict_on
from .member_refs import member_ref
from .report import EngineResult
from .selection import select
from .store.collect import collect
from .store.collected import Collected
from .store.errors import DamagedError, SignatureError
from .store.local import LocalStore
from .store.pull import pull
from .store.push import push
from .store.record import FileRef, Record, Ref
from .store.store import Store
from .store.transfer import Transferred
from .store.verify import Problem
from .units import Unit, member_names

NOT_JUDGED = "its gate was not measured of these plans yet; that is done by plansmith fleet build --push"


def push_fleet(
    fleet: Fleet, units: Sequence[Unit], local: LocalStore, remote: Store, progress: Progress = no_progress
) -> tuple[Transferred, list[str]]:
    """Bring units and the verdicts on their engines to the remote store; return what was sent, and who is not here.

    raises what store.push raises, and SignatureError for a unit that is here and that the store here does not trust
    """
    refs: dict[tuple[str, str], Ref] = {}
    absent = []
    here = local.refs(fleet.name, {})
    for state in compare(units, local, fleet.name):
        if state.key is None:
            _check_trust(state.unit, local)
            absent.append(state.unit.name)
            continue
        for member in state.unit.members:
            refs[fleet.name, member] = member_ref(local, state.key, here.get(member))
        if state.unit.gate_inputs and local.has_record(key := inputs_key(state.unit.gate_inputs)):
            refs[gates_name(fleet), state.unit.engine.name] = Ref.now(key)
    sent = push(local, remote, [ref.key for ref in refs.values()], refs, progress)
    noted = note_facts(fleet, units, local, remote)
    return dataclasses.replace(sent, records=sent.records + noted), absent


def _check_trust(unit: Unit, local: LocalStore) -> None:
    """Raise SignatureError where a unit's record is here, and not to be trusted."""
    try:
        local.record(unit.key)
    except DamagedError:
        return
    except SignatureError as error:
        told = f"{unit.name}: {error}"
        if not local.trusts_own:
            told += f". {local.url} is the fleet's store, where others may write; if nobody does, say so with --store "
            told += local.url
        raise SignatureError(told) from None


@dataclasses.dataclass(frozen=True)
class Pulled:
    """What a pull brought.

    absent : members that the remote store has no plan of
    damaged : members whose plan is not as it was made in the remote store, or not to be trusted, and what is wrong
    """

    transferred: Transferred
    engines: tuple[EngineResult, ...]
    absent: tuple[str, ...]
    damaged: Mapping[str, str] = dataclasses.field(default_factory=dict)


def pull_fleet(
    fleet: Fleet,
    only: Sequence[str],
    local: LocalStore,
    remote: Store,
    *,
    assemble: bool = True,
    check_hashes: bool = False,
    progress: Progress = no_progress,
) -> Pulled:
    """Get what the remote store's refs name of a fleet, and assemble the engines of it; no checkpoint is opened.

    What is wrong with one member's plan keeps back its engine, and no other.

    only : patterns over members, see selection.select; () = all. An engine is assembled with its other members' plans
        where they are here already, and the remote store still has them so
    check_hashes : read the files of engines that are there already, and write anew what differs from the store
    raises RemoteError and OutOfMemoryError as store.pull does; nothing that is wrong gets into the folder here
    """
    wanted = select({name: (name,) for name in member_names(fleet)}, only)
    wrong: dict[str, Error] = {}
    there, before = remote.refs(fleet.name, wrong), local.refs(fleet.name, {})
    refs = {name: ref for name, ref in there.items() if name in wanted}
    for name, ref in refs.items():
        try:
            remote.check_ref(fleet.name, name, ref)  # a record's signature does not say whose plan it is
        except SignatureError as error:
            wrong[name] = error
    gates_wrong: dict[str, Error] = {}
    gates = {
        name: ref
        for name, ref in remote.refs(gates_name(fleet), gates_wrong).items()
        if remote.has_record(ref.key)
    }
    faults: dict[str, Error] = {}
    keys = [
        *(ref.key for name, ref in refs.items() if name not in wrong),
        *(ref.key for ref in gates.values()),
    ]
    transferred = pull(remote, local, keys, progress, faults)
    wrong |= {name: faults[ref.key] for name, ref in refs.items() if ref.key in faults}
    gates_wrong |= {name: faults[ref.key] for name, ref in gates.items() if ref.key in faults}
    with contextlib.suppress(DamagedError):
        pull_facts(fleet, local, remote)
    damaged = {name: str(wrong[name]) for name in member_names(fleet) if name in wanted and name in wrong}
    refs = {name: ref for name, ref in refs.items() if name not in wrong}
    gates = {name: ref for name, ref in gates.items() if name not in gates_wrong}
    for name, ref in refs.items():
        local.set_ref(fleet.name, name, ref)
    for name, ref in gates.items():
        local.set_ref(gates_name(fleet), name, ref)
    absent = tuple(name for name in member_names(fleet) if name in wanted and name not in {**refs, **damaged})
    verdicts: dict[str, Record | Error] = {name: _record(local, ref.key) for name, ref in gates.items()}
    others = {name: ref for name, ref in before.items() if name in there and there[name].key == ref.key}
    engines = []
    for one in engines_of(fleet) if assemble else ():
        members = [one.member(sku) for sku in one.skus]
        if spoiled := [name for name in members if name in damaged]:
            why = f"{', '.join(spoiled)} did not come whole"
            engines.append(EngineResult(one.name, str(fleet.output / one.name), "failed", why))
        elif any(name in refs for name in members):
            engines.append(
                _assembled(one, fleet, {**others, **refs}, local, {**verdicts, **gates_wrong}, check_hashes)
            )
    return Pulled(transferred, tuple(engines), absent, damaged)


def _assembled(
    engine: FleetEngine,
    fleet: Fleet,
    refs: Mapping[str, Ref],
    local: LocalStore,
    verdicts: Mapping[str, Record | Error],
    check_hashes: bool,
) -> EngineResult:
    """Make an engine's directory of the members that were pulled, of which there is one at least.

    verdicts : engine -> the record of its gate, or what is wrong with that
    """
    keys = list(dict.fromkeys(refs[name].key for sku in engine.skus if (name := engine.member(sku)) in refs))
    path = fleet.output / engine.name
    why = ""
    try:
        records = [_record(local, key) for key in keys]
        if engine.recipe.gate is not None:
            verdict = verdicts.get(engine.name)
            if isinstance(verdict, Error):
                raise verdict
            if verdict is None or not is_verdict_on(verdict, engine.recipe.gate, records):
                return EngineResult(engine.name, str(path), "waiting", NOT_JUDGED)
            if failed := failure_of(verdict):
                return EngineResult(engine.name, str(path), "failed", failed)
        made = assemble_engine(records, local, path)
        if check_hashes and not made and (altered := _mended(records, local, path)):
            made, why = True, f"written anew, for they were altered: {', '.join(altered)}"
    except Error as error:
        return EngineResult(engine.name, str(path), "failed", str(error))
    return EngineResult(engine.name, str(path), "assembled" if made else "kept", why)


def _mended(records: Sequence[Record], local: LocalStore, path: Path) -> list[str]:
    """Write anew the files of an engine that differ from its records', each in one step, and return their paths."""
    out = destination(path)
    files = {file.path: file for record in records for file in record.files}
    # The lock of who assembles it.
    with local.lock_unit(inputs_key({"engine": str(out)}), blocking=True) or contextlib.nullcontext():
        altered = [file for file in files.values() if _what_is_wrong(out, file)]
        local.extract(altered, out)
    return [file.path for file in altered]


def verify_engines(fleet: Fleet, fix: str, progress: Progress = no_progress) -> list[Problem]:
    """Return what is wrong with the engine directories of a fleet, every file hashed; those not there are left out.

    fix : what to do about it
    """
    problems = []
    for engine in engines_of(fleet):
        path = fleet.output / engine.name
        if not path.exists():
            continue
        try:
            entries = load_manifest(path).all_files()
        except EngineFileError as error:
            problems.append(Problem(str(path), f"cannot be read ({error})", fix))
            continue
        for done, entry in enumerate(entries, 1):
            if what := _what_is_wrong(path, entry):
                problems.append(Problem(str(path / entry.path), what, fix))
            progress(engine.name, "verify", done, len(entries))
    return problems


def _what_is_wrong(folder: Path, file: FileRef | FileEntry) -> str:
    """Say what is wrong with a file of an engine; "" = nothing."""
    path = folder / file.path
    try:
        if not path.is_file():
            return "is missing"
        if (size := path.stat().st_size) != file.size:
            return f"has {size} bytes, wanted {file.size}"
        if hash_file(path) != file.sha256:
            return "was altered: it has another sha256 than it was made with"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""


def _record(local: LocalStore, key: str) -> Record:
    record = local.record(key)
    if record is None:
        raise EngineFileError(f"{local.url} has lost the record {key}; pull it again")
    return record


def collect_fleet(
    fleet: Fleet, store: Store, *, keep_days: float, dry_run: bool = False
) -> tuple[list[str], Collected]:
    """Forget members that a fleet has no more, and collect; return their names, and what was removed, or would be."""
    named = {fleet.name: set(member_names(fleet)), gates_name(fleet): {one.name for one in engines_of(fleet)}}
    forgotten = [
        (name, one) for name, known in named.items() for one in sorted(set(store.refs(name)) - known)
    ]
    dropped = [*forgotten, *outdated_facts(fleet, store, keep_days)]
    if dry_run:
        gone = collect(_Forgetful(store, dropped), keep_days=keep_days, dry_run=True)
    else:
        for one in dropped:
            store.remove_ref(*one)
        gone = collect(store, keep_days=keep_days)
    return [member for _, member in forgotten], gone


class _Forgetful(Store):
    """A store as it is once some members are forgotten."""

    def __init__(self, store: Store, forgotten: Sequence[tuple[str, str]]) -> None:
        super().__init__(store.objects, store.trust)
        self._forgotten = frozenset(forgotten)

    def refs(self, fleet: str, damaged: dict[str, Error] | None = None) -> dict[str, Ref]:
        """Return the refs that stay."""
        refs = super().refs(fleet, damaged)
        return {name: ref for name, ref in refs.items() if (fleet, name) not in self._forgotten}
