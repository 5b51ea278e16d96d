"""A fleet's units between the folder of one machine and the store that machines share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ..builder.build_key import inputs_key
from ..builder.progress import Progress, no_progress
from ..runtime.errors import EngineFileError, Error
from .assemble import assemble as assemble_engine
from .compare import compare
from .engines import FleetEngine, engines_of
from .facts_store import note_facts, outdated_facts, pull_facts
from .fleet_file import Fleet
from .gate_check import failure_of, gates_name, is_verdict_on
from .report import EngineResult
from .selection import select
from .store.collect import collect
from .store.collected import Collected
from .store.local import LocalStore
from .store.pull import pull
from .store.push import push
from .store.record import Record, Ref
from .store.store import Store
from .store.transfer import Transferred
from .units import Unit, member_names

NOT_JUDGED = "its gate was not measured of these plans yet; that is done by plansmith fleet build --push"


def push_fleet(
    fleet: Fleet, units: Sequence[Unit], local: LocalStore, remote: Store, progress: Progress = no_progress
) -> tuple[Transferred, list[str]]:
    """Bring units and the verdicts on their engines to the remote store; return what was sent, and who is not here."""
    refs: dict[tuple[str, str], Ref] = {}
    absent = []
    for state in compare(units, local, fleet.name):
        if state.key is None:
            absent.append(state.unit.name)
            continue
        refs |= {(fleet.name, member): Ref.now(state.key) for member in state.unit.members}
        if state.unit.gate_inputs and local.has_record(key := inputs_key(state.unit.gate_inputs)):
            refs[gates_name(fleet), state.unit.engine.name] = Ref.now(key)
    sent = push(local, remote, [ref.key for ref in refs.values()], refs, progress)
    noted = note_facts(fleet, units, local, remote)
    return dataclasses.replace(sent, records=sent.records + noted), absent


@dataclasses.dataclass(frozen=True)
class Pulled:
    """What a pull brought. absent : members that the remote store has no plan of."""

    transferred: Transferred
    engines: tuple[EngineResult, ...]
    absent: tuple[str, ...]


def pull_fleet(
    fleet: Fleet,
    only: Sequence[str],
    local: LocalStore,
    remote: Store,
    *,
    assemble: bool = True,
    progress: Progress = no_progress,
) -> Pulled:
    """Get what the remote store's refs name of a fleet, and assemble the engines of it; no checkpoint is opened.

    only : patterns over members, see selection.select; () = all. An engine is assembled with its other members' plans
        where they are here already, and the remote store still has them so
    raises what store.pull raises; nothing that is wrong gets into the folder here
    """
    wanted = select({name: (name,) for name in member_names(fleet)}, only)
    there, before = remote.refs(fleet.name), local.refs(fleet.name)
    refs = {name: ref for name, ref in there.items() if name in wanted}
    gates = {name: ref for name, ref in remote.refs(gates_name(fleet)).items() if remote.has_record(ref.key)}
    for name, ref in refs.items():
        remote.check_ref(fleet.name, name, ref)  # a record's signature does not say whose plan it is
    keys = [ref.key for ref in (*refs.values(), *gates.values())]
    transferred = pull(remote, local, keys, progress)
    pull_facts(fleet, local, remote)
    for name, ref in refs.items():
        local.set_ref(fleet.name, name, ref)
    for name, ref in gates.items():
        local.set_ref(gates_name(fleet), name, ref)
    absent = tuple(name for name in member_names(fleet) if name in wanted and name not in refs)
    verdicts = {name: _record(local, ref.key) for name, ref in gates.items()}
    others = {name: ref for name, ref in before.items() if name in there and there[name].key == ref.key}
    engines = [
        _assembled(one, fleet, {**others, **refs}, local, verdicts)
        for one in engines_of(fleet)
        if assemble and any(one.member(sku) in refs for sku in one.skus)
    ]
    return Pulled(transferred, tuple(one for one in engines if one is not None), absent)


def _assembled(
    engine: FleetEngine,
    fleet: Fleet,
    refs: Mapping[str, Ref],
    local: LocalStore,
    verdicts: Mapping[str, Record],
) -> EngineResult | None:
    """Make an engine's directory of the members that were pulled; None where none of its were.

    verdicts : engine -> the record of its gate
    """
    keys = list(dict.fromkeys(refs[name].key for sku in engine.skus if (name := engine.member(sku)) in refs))
    if not keys:
        return None
    path = fleet.output / engine.name
    try:
        records = [_record(local, key) for key in keys]
        if engine.recipe.gate is not None:
            verdict = verdicts.get(engine.name)
            if verdict is None or not is_verdict_on(verdict, engine.recipe.gate, records):
                return EngineResult(engine.name, str(path), "waiting", NOT_JUDGED)
            if why := failure_of(verdict):
                return EngineResult(engine.name, str(path), "failed", why)
        made = assemble_engine(records, local, path)
    except Error as error:
        return EngineResult(engine.name, str(path), "failed", str(error))
    return EngineResult(engine.name, str(path), "assembled" if made else "kept")


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

    def refs(self, fleet: str) -> dict[str, Ref]:
        """Return the refs that stay."""
        return {
            name: ref for name, ref in super().refs(fleet).items() if (fleet, name) not in self._forgotten
        }
