"""Facts of pinned checkpoints in a fleet's stores: noted by whoever has the files, found by whoever has not.

A ref of a fleet's own leads to each record: model/fingerprint/reader/length. So branches with other revisions, and
machines with other versions of plansmith, do not take each other's away.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..builder.build_key import inputs_key
from ..runtime.errors import EngineFileError
from .checkpoint_facts import KIND, CheckpointFacts, facts_of_checkpoint, read_facts, reader_digest
from .fleet_file import Fleet
from .opener import length_of

if TYPE_CHECKING:
    from .store.local import LocalStore
    from .store.record import Record, Ref
    from .store.store import Store
    from .units import Unit

_ANY = "any"  # length of what is the same for all


class FactsFinder:
    """Finds facts in a fleet's stores. open_stores : opens these, and is called once something is asked for."""

    def __init__(self, fleet: str, open_stores: Callable[[], Sequence[Store]]) -> None:
        self._fleet = facts_name(fleet)
        self._open = functools.cache(open_stores)

    def find(self, model: str, fingerprint: str, max_seq_len: int | None) -> CheckpointFacts | str:
        """Return what is known of a model's checkpoint for sequences of that length, or in words why nothing is.

        raises EngineFileError for what is damaged or not to be trusted, where no store has it as it should be
        """
        for length in (_ANY, str(max_seq_len or 0)):
            record = self._record(_name(model, fingerprint, reader_digest(), length))
            if record is not None:
                return read_facts(record, fingerprint)
        return _why_not([name for _, refs in self._stores for name in refs], model, fingerprint)

    def _record(self, name: str) -> Record | None:
        """Return the record that the last ref of this name leads to, of the first store that has it."""
        refs: list[tuple[Store, Ref]] = []
        errors: list[EngineFileError] = []
        for store, there in self._stores:
            with _noting(errors):
                if name in there:
                    store.check_ref(self._fleet, name, there[name])
                    refs.append((store, there[name]))
        last = max((ref for _, ref in refs), key=lambda ref: ref.time, default=None)
        for store, ref in refs:
            with _noting(errors):
                if last is not None and ref.key == last.key and (record := store.record(ref.key)) is not None:
                    return record
        if errors:
            raise errors[0]
        return None

    @functools.cached_property
    def _stores(self) -> list[tuple[Store, Mapping[str, Ref]]]:
        return [(store, store.refs(self._fleet)) for store in self._open()]


@contextlib.contextmanager
def _noting(errors: list[EngineFileError]) -> Iterator[None]:
    """Keep the error of what cannot be read or trusted: another store may have it."""
    try:
        yield
    except EngineFileError as error:
        errors.append(error)


def facts_name(fleet: str) -> str:
    """Return the name under which a store has the refs of a fleet's checkpoints."""
    return f"{fleet}@checkpoints"  # which no fleet can be called


def note_facts(fleet: Fleet, units: Sequence[Unit], local: LocalStore, remote: Store | None = None) -> int:
    """Put what was read of the units' pinned checkpoints into a store, and with `remote` into that as well.

    returns : how many records the remote store got
    Whoever has no key that a store trusts leaves it to those who have. What cannot be read any more is left out.
    """
    from .store.errors import SignatureError

    with contextlib.suppress(SignatureError):
        noted = _noted(fleet, units, local)
        if remote is not None:
            return _push(fleet, noted, _known(fleet, units, local), local, remote)
    return 0


def pull_facts(fleet: Fleet, local: LocalStore, remote: Store) -> None:
    """Bring what is known of the fleet's pinned checkpoints; what is damaged or not to be trusted stays away."""
    from .store.pull import pull

    for name, ref in remote.refs(facts_name(fleet.name)).items():
        if _is_pinned(name, fleet) and _has(remote, fleet, name, ref):
            with contextlib.suppress(EngineFileError):
                pull(remote, local, [ref.key])
                local.set_ref(facts_name(fleet.name), name, ref)


def outdated_facts(fleet: Fleet, store: Store, keep_days: float) -> list[tuple[str, str]]:
    """Return the refs, with the name they are under, of what the file pins no more, or only other versions read so.

    keep_days : younger ones stay: another branch may have them
    """
    refs = store.refs(facts_name(fleet.name))
    return [
        (facts_name(fleet.name), name)
        for name, ref in sorted(refs.items())
        if not _is_current(name, fleet) and not _is_young(ref, keep_days)
    ]


def _name(model: str, fingerprint: str, reader: str, length: str) -> str:
    return f"{model}/{fingerprint}/{reader}/{length}"


def _why_not(names: Sequence[str], model: str, fingerprint: str) -> str:
    known = [name.split("/")[2:] for name in names if name.startswith(f"{model}/{fingerprint}/")]
    lengths = {length for reader, length in known if reader == reader_digest()}
    if lengths and _ANY not in lengths:
        told = ", ".join(sorted(lengths, key=int))
        return f"a store knows {model} at it for max_seq_len {told} only, on which its LongRoPE depends"
    if lengths:
        return f"the store has lost the record of {model} at it"
    if known:
        return f"a store knows {model} at it only as another version of plansmith reads checkpoints"
    return f"no store of the fleet knows {model} at it"


def _noted(fleet: Fleet, units: Sequence[Unit], local: LocalStore) -> dict[str, Ref]:
    """Put the facts of checkpoints that are here, where they are not yet, and return their refs."""
    from .store.record import Record, Ref

    there = local.refs(facts_name(fleet.name))
    noted: dict[str, Ref] = {}
    for unit in _pinned(units):
        facts = _facts(unit)
        if facts is None:
            continue
        length = str(length_of(unit.engine) or 0) if facts.depends_on_length else _ANY
        name = _name(unit.engine.model.name, unit.fingerprint, reader_digest(), length)
        inputs = facts.inputs(unit.fingerprint)
        record = Record(inputs_key(inputs), KIND, inputs, (), facts.content(), {})
        if name in there and there[name].key == record.key and _has(local, fleet, name, there[name]):
            noted[name] = there[name]
            continue
        local.put_record(record)
        noted[name] = Ref.now(record.key)
        local.set_ref(facts_name(fleet.name), name, noted[name])
    return noted


def _facts(unit: Unit) -> CheckpointFacts | None:
    """Return what was read of a unit's checkpoint; None where that is not here, or changed meanwhile."""
    if unit.missing_weights:
        return None
    try:
        facts = facts_of_checkpoint(unit.checkpoint, unit.engine.source)
    except OSError:
        return None
    return facts if facts.tokenizer_digest == unit.inputs["tokenizer"] else None


def _known(fleet: Fleet, units: Sequence[Unit], local: LocalStore) -> dict[str, Ref]:
    """Return the refs of what an earlier build noted of checkpoints that are not here now."""
    absent = tuple(
        f"{unit.engine.model.name}/{unit.fingerprint}/" for unit in _pinned(units) if unit.missing_weights
    )
    refs = local.refs(facts_name(fleet.name))
    return {
        name: ref for name, ref in refs.items() if name.startswith(absent) and _has(local, fleet, name, ref)
    }


def _push(
    fleet: Fleet, noted: Mapping[str, Ref], known: Mapping[str, Ref], local: LocalStore, remote: Store
) -> int:
    """Bring to the remote store what was read just now, and of the rest what it has nothing of; count what it got."""
    from .store.push import push

    there = remote.refs(facts_name(fleet.name))
    new = {name: ref for name, ref in known.items() if name not in there}
    for name, ref in noted.items():
        if name not in there or there[name].key != ref.key or not _has(remote, fleet, name, there[name]):
            new[name] = ref
    if not new:
        return 0
    refs = {(facts_name(fleet.name), name): ref for name, ref in new.items()}
    return push(local, remote, [ref.key for ref in new.values()], refs).records


def _has(store: Store, fleet: Fleet, name: str, ref: Ref) -> bool:
    """Return whether a store's ref leads to a record, and both can be trusted."""
    try:
        store.check_ref(facts_name(fleet.name), name, ref)
    except EngineFileError:
        return False
    return store.readable(ref.key) is not None


def _pinned(units: Sequence[Unit]) -> list[Unit]:
    """Return a unit of every pinned checkpoint and length."""
    found = {
        (unit.engine.model.name, unit.fingerprint, length_of(unit.engine)): unit
        for unit in units
        if unit.engine.source.revision is not None
    }
    return list(found.values())


def _is_pinned(name: str, fleet: Fleet) -> bool:
    """Return whether a ref is of a checkpoint that the file pins."""
    model, _, rest = name.partition("/")
    if model not in fleet.models:
        return False
    one = fleet.models[model]
    return rest.partition("/")[0] in {source.revision for source in (one.source, *one.quantized.values())}


def _is_current(name: str, fleet: Fleet) -> bool:
    return _is_pinned(name, fleet) and name.split("/")[2:3] == [reader_digest()]


def _is_young(ref: Ref, days: float) -> bool:
    try:
        made = datetime.datetime.strptime(ref.time, "%Y-%m-%dT%H:%M:%SZ").replace(
            tzinfo=datetime.timezone.utc
        )
    except ValueError:
        return False
    return datetime.datetime.now(datetime.timezone.utc) - made < datetime.timedelta(days=days)
