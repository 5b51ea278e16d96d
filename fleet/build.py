"""`plansmith fleet build`: every unit that the store lacks is compiled, side by side; then engines are assembled."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Sequence

from ..builder.build_key import inputs_key
from ..builder.checkpoint.hash_cache import HashCache
from ..builder.progress import Progress, no_progress
from ..builder.scratch import scratch_directory
from ..builder.targets.registry import CPU
from ..runtime.errors import Error
from .assemble import assemble, can_move
from .budget import Budget
from .compare import UnitState, compare
from .engine_graphs import EngineGraphs
from .facts_store import note_facts
from .fleet_file import Fleet
from .gate_check import failure_of, gates_name, measured_gate
from .job_queue import Job, JobQueue, LetGo
from .member_refs import MemberRefs
from .memory_watch import MemoryWatch, tree_bytes
from .report import EngineResult, FleetReport, UnitResult, UnitStatus
from .store.errors import SignatureError
from .store.local import LocalStore
from .store.pull import pull
from .store.record import Record
from .store.store import Store
from .stored import is_whole
from .unit_build import BuiltUnit, Workshop, build_unit
from .unit_files import KeptFiles
from .units import Unit


@dataclasses.dataclass(frozen=True)
class BuildOptions:
    """How a fleet is built.

    remote : where plans are looked for besides, and with `push` brought to
    assemble : make the engine directories of what the store has
    """

    budget: Budget
    remote: Store | None = None
    push: bool = False
    assemble: bool = True
    hashes: HashCache = dataclasses.field(default_factory=HashCache)
    progress: Progress = no_progress


def build_fleet(
    fleet: Fleet,
    units: Sequence[Unit],
    store: LocalStore,
    options: BuildOptions,
    others: Sequence[Unit] = (),
) -> FleetReport:
    """Build what is not there, and return what became of everything; a failure of one unit does not stop the others.

    units : those to be built, see units_of
    others : further units of the same engines, which are left as they are; their engines are assembled with them
    raises what the store raises where nothing can be written at all
    """
    start = time.monotonic()
    with store.objects.sharing():
        pass  # says so where nothing can be written
    with MemoryWatch() as watch, scratch_directory("fleet", store.root / "work") as scratch:
        stop = threading.Event()
        shop = Workshop(
            store,
            scratch,
            options.hashes,
            EngineGraphs(scratch / "graphs", stop),
            options.progress,
            is_kept=lambda: options.assemble and can_move(scratch, fleet.output),
        )
        run = _Run(fleet, store, options, shop, stop)
        note_facts(fleet, units, store, options.remote if options.push else None)
        run.units(units)
        run.note_others(others)
        run.gates([*units, *others])
        engines = run.assembled(units, others) if options.assemble else []
    results = tuple(run.results[unit.name] for unit in units)
    seconds = round(time.monotonic() - start, 3)
    return FleetReport(fleet.name, results, tuple(engines), seconds, watch.peak_bytes)


class _Run:
    """One build of a fleet, on the way."""

    def __init__(
        self, fleet: Fleet, store: LocalStore, options: BuildOptions, shop: Workshop, stop: threading.Event
    ) -> None:
        self.results: dict[str, UnitResult] = {}
        self._fleet = fleet
        self._store = store
        self._options = options
        self._shop = shop
        self._stop = stop
        self._records: dict[str, Record] = {}
        self._kept: dict[str, KeptFiles] = {}  # by key, of what was built just now
        self._in_remote: set[str] = set()
        self._members = MemberRefs(store, options.remote if options.push else None)
        self._gate_errors: dict[str, str] = {}

    def units(self, units: Sequence[Unit]) -> None:
        """Build the units that are not there."""
        jobs = []
        if self._options.remote is not None:
            there = compare(units, self._options.remote, self._fleet.name)
            self._in_remote = {state.unit.name for state in there if state.key is not None}
        for unit, state in zip(units, compare(units, self._store, self._fleet.name), strict=True):
            if not self._is_settled(unit, state):
                jobs.append(self._job(unit))
        for name, error in self._run(self._in_order(jobs, units)).items():
            self.results[name] = dataclasses.replace(self.results[name], status="failed", why=str(error))

    def note_others(self, others: Sequence[Unit]) -> None:
        """Note which units that are not asked for are there as they should be."""
        for state in compare(others, self._store, self._fleet.name):
            record = self._store.readable(state.key) if state.key is not None else None
            if record is not None:
                self._records[state.unit.name] = record

    def gates(self, units: Sequence[Unit]) -> None:
        """Measure the engines that have a gate, where it was not done."""
        gated = {unit.engine.name: unit for unit in units if unit.gate_inputs and self._is_judged(unit)}
        jobs = []
        for unit in gated.values():
            record = self._verdict(inputs_key(unit.gate_inputs))
            if record is None:
                jobs.append(self._gate_job(unit, units))
            else:
                self._judged(unit, record)
        self._gate_errors |= {name: str(error) for name, error in self._run(jobs).items()}

    def _is_judged(self, unit: Unit) -> bool:
        """Return whether the gate of a unit's engine is looked at: also where others have its plans and wait for it."""
        result = self.results.get(unit.name)
        is_remote = result is not None and result.status == "remote"
        return self._is_here(unit) or (self._options.push and is_remote)

    def _verdict(self, key: str) -> Record | None:
        """Return the record of a gate, which may have been measured elsewhere."""
        remote = self._options.remote
        record = self._store.readable(key)
        if record is None and remote is not None and remote.readable(key) is not None:
            pull(remote, self._store, [key])
            record = self._store.readable(key)
        return record

    def assembled(self, units: Sequence[Unit], others: Sequence[Unit]) -> list[EngineResult]:
        """Make the directories of the units' engines."""
        everyone = [*units, *others]
        names = dict.fromkeys(unit.engine.name for unit in units)
        return [self._engine(name, [one for one in everyone if one.engine.name == name]) for name in names]

    def _is_settled(self, unit: Unit, state: UnitState) -> bool:
        """Note what needs no compiler; False where the unit is to be built here."""
        record = None if state.key is None else self._store.readable(state.key)
        if record is not None and is_whole(self._store, record):
            self._note(unit, "kept", record)
        elif unit.name in self._in_remote:
            self._note(unit, "remote")
        elif unit.buildable.state == "refused":
            self._note(unit, "refused", why=unit.buildable.why)
        elif unit.buildable.state != "here":
            self._note(unit, "elsewhere", why=f"needs {unit.buildable.needs}")
        else:
            return False
        return True

    def _job(self, unit: Unit) -> Job:
        self.results[unit.name] = UnitResult(unit.name, unit.key, "failed", predicted_bytes=unit.peak_bytes)
        self._shop.graphs.expect(unit.engine.name)

        def run(let_go: LetGo) -> bool:
            built = build_unit(unit, self._shop, let_go)
            if built is not None:
                self._built(unit, built)
            return built is not None

        # TensorRT times kernels on the GPU, which it has to have for itself.
        lane = "gpu" if unit.target.compiler == "tensorrt" else ""
        return Job(unit.name, unit.peak_bytes, run, lane)

    def _gate_job(self, unit: Unit, units: Sequence[Unit]) -> Job:
        siblings = [one for one in units if one.engine.name == unit.engine.name]
        cpu = next((one for one in siblings if one.target.name == CPU), None)

        def run(_: LetGo) -> bool:
            record = measured_gate(
                unit, self._shop, lambda: None if cpu is None else self._records.get(cpu.name)
            )
            if record is not None:
                self._judged(unit, record)
            return record is not None

        return Job(unit.engine.name, unit.gate_bytes, run, lane="gate")

    def _judged(self, unit: Unit, record: Record) -> None:
        """Note the verdict on an engine; one that is not passed counts as well, and is told others too."""
        if why := failure_of(record):
            self._gate_errors[unit.engine.name] = why
        self._members.keep(gates_name(self._fleet), {unit.engine.name: record.key})

    def _in_order(self, jobs: Sequence[Job], units: Sequence[Unit]) -> list[Job]:
        """Return jobs, those of one graph one after another, within them the largest first."""
        engines = list(dict.fromkeys(unit.engine.name for unit in units))
        places = {unit.name: engines.index(unit.engine.name) for unit in units}
        return sorted(jobs, key=lambda job: (places[job.name], -job.memory_bytes))

    def _run(self, jobs: Sequence[Job]) -> dict[str, Error]:
        if not jobs:
            return {}
        self._check_signer()
        queue = JobQueue(self._options.budget, tree_bytes(os.getpid()), self._stop)
        return queue.run(jobs)

    def _check_signer(self) -> None:
        """Refuse to make what could not be kept, for nobody who is trusted signs it."""
        key, remote = self._store.key, self._options.remote
        for store in (self._store, remote if self._options.push else None):
            if isinstance(store, LocalStore) and store.trusts_own:
                continue
            if store is not None and store.trust and (key is None or key.public not in store.trust):
                given = "no" if key is None else "another"
                raise SignatureError(
                    f"{store.url} takes what a key under trust has signed, and {given} key is given; give --sign-key "
                    "KEY.pem, or set PLANSMITH_SIGNING_KEY"
                )

    def _built(self, unit: Unit, built: BuiltUnit) -> None:
        if built.kept is not None:
            self._kept[built.record.key] = built.kept
        seconds = 0.0 if built.report is None else sum(one.seconds for one in built.report.targets.values())
        self._note(unit, "kept" if built.report is None else "built", built.record, seconds=seconds)

    def _note(
        self,
        unit: Unit,
        status: UnitStatus,
        record: Record | None = None,
        why: str = "",
        seconds: float = 0.0,
    ) -> None:
        before = self.results.get(unit.name)
        predicted = 0 if before is None else before.predicted_bytes
        key = unit.key if record is None else record.key
        self.results[unit.name] = UnitResult(unit.name, key, status, why, round(seconds, 3), predicted)
        if record is not None:
            self._records[unit.name] = record
            self._members.keep(self._fleet.name, dict.fromkeys(unit.members, record.key))

    def _is_here(self, unit: Unit) -> bool:
        return unit.name in self._records

    def _engine(self, name: str, units: Sequence[Unit]) -> EngineResult:
        path = self._fleet.output / name
        if name in self._gate_errors:
            return EngineResult(name, str(path), "failed", self._gate_errors[name])
        waiting = [unit.name for unit in units if not self._is_here(unit) and not self._is_left_out(unit)]
        records = [self._records[unit.name] for unit in units if self._is_here(unit)]
        if waiting or not records:
            pulls = "its plans are not here; where the remote store has them: plansmith fleet pull"
            why = f"not built here: {', '.join(waiting)}" if waiting else pulls
            return EngineResult(name, str(path), "waiting", why)
        try:
            made = assemble(records, self._store, path, self._kept)
        except Error as error:
            why = str(error).replace("give another -o", "give another output")
            return EngineResult(name, str(path), "failed", why)
        left_out = [unit.target.name for unit in units if not self._is_here(unit)]
        why = f"without {', '.join(left_out)}" if left_out else ""
        return EngineResult(name, str(path), "assembled" if made else "kept", why)

    def _is_left_out(self, unit: Unit) -> bool:
        """Return whether an engine is assembled without a unit: another machine's, whose plan is not here."""
        result = self.results.get(unit.name)
        is_elsewhere = (
            unit.buildable.state != "here" if result is None else result.status in ("elsewhere", "remote")
        )
        return is_elsewhere
