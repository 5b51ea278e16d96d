"""The accuracy gate of an engine: measured once for its inputs, its verdict kept in the store as a record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..builder.build_key import inputs_key
from ..builder.checkpoint import Checkpoint, open_checkpoint
from ..builder.targets.registry import CPU
from .absent_checkpoint import require_weights
from .fleet_file import Fleet, Source
from .store.record import Record
from .unit_build import Workshop, disk_errors
from .units import Unit

GATE = "gate"
# What plans of all targets of one engine have in common, beside their limits.
_OF_ALL_TARGETS = ("checkpoint", "spec", "precision.name")


def gates_name(fleet: Fleet) -> str:
    """Return the name under which a store has the refs of a fleet's gates, by engine."""
    return f"{fleet.name}@gates"  # which no fleet can be called


def failure_of(record: Record) -> str:
    """Return why a gate was not passed, as its record says; "" = it was."""
    gate = record.content.get("gate")
    if isinstance(gate, dict) and gate.get("passed") is True:
        return ""
    return str(record.content.get("error") or f"the record {record.key} has no verdict of a gate")


def is_verdict_on(gate: Record, bounds: str, plans: Sequence[Record]) -> bool:
    """Return whether a gate's record is of these bounds, and of the engine that plans of whatever targets are of."""
    told = {name.removeprefix("plan."): value for name, value in gate.inputs.items()}
    names = [name for name in told if name in _OF_ALL_TARGETS or name.startswith("limits.")]
    return told.get("bounds") == "".join(bounds.split()) and all(
        plan.inputs.get(name) == told[name] for plan in plans for name in names
    )


def measured_gate(unit: Unit, shop: Workshop, cpu_record: Callable[[], Record | None]) -> Record | None:
    """Return the verdict on an engine, which is in the store then; None while another process measures it.

    unit : any of the engine's
    cpu_record : returns the record of the engine's cpu plan; None = it has none, and one is compiled for the time being
    raises as calibration.gate.try_gate where nothing could be measured, and BuildError for what the disk says
    """
    key = inputs_key(unit.gate_inputs)
    held = shop.store.lock_unit(key)
    if held is None:
        return None
    with held, disk_errors(unit.engine.name):
        return shop.store.readable(key) or shop.store.put_record(_measure(unit, key, shop, cpu_record()))


def _measure(unit: Unit, key: str, shop: Workshop, cpu: Record | None) -> Record:
    from ..calibration.gate import try_gate

    def progress(_: str, phase: str, done: int, total: int) -> None:
        shop.progress(f"{unit.engine.name} gate", phase, done, total)

    for source in (unit.engine.source, unit.engine.model.source):
        require_weights(source)
    report, error = try_gate(
        unit.engine.recipe.gate or "",
        unit.checkpoint,
        unit.recipe.on_cpu(),
        unit.limits,
        plan_path=None if cpu is None else _plan(cpu, shop),
        against=_original(unit),
        progress=progress,
    )
    content = {
        "gate": (report.gate or {}),
        "evaluation": report.to_json(),
        "error": "" if error is None else str(error),
        "lines": [] if error is None else list(error.log_lines),
    }
    return Record(key=key, kind=GATE, inputs=dict(unit.gate_inputs), files=(), content=content, provenance={})


def _plan(cpu: Record, shop: Workshop) -> Path:
    """Return the engine's cpu plan, taken out of the store for the time being."""
    path = f"targets/{CPU}/model.plan"
    out = shop.scratch / f"gate-{cpu.key}"
    shop.store.extract([file for file in cpu.files if file.path == path], out)
    return out / path


def _original(unit: Unit) -> Checkpoint:
    source: Source = unit.engine.model.source
    return open_checkpoint(source.path, unit.limits.max_seq_len, source.tokenizer)
