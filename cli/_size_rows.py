"""The rows of `plansmith size`: a GPU (or this machine's cpu) and a recipe each, with memory and predicted speed."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..builder.targets.registry import CPU
from ..runtime.admission import room_in
from ..runtime.control_groups import available_memory_bytes, usable_cores
from ..sizing.cpu_memory import DEFAULT_NUM_TOKENS, CpuLoad, cpu_use
from ..sizing.memory import (
    Load,
    MemoryUse,
    ModelShape,
    blocks_for,
    devices_needed,
    gpu_use,
    kv_room,
    sequences_that_fit,
    split_use,
)
from ..sizing.roofline import decode_step, prefill_seconds
from ..sizing.skus import Sku
from ._output import size_text
from ._size_plans import Plan, Refused


@dataclasses.dataclass(frozen=True)
class Row:
    """What one plan takes on one device, and how fast it can be there.

    reason : why there is no such plan; "" = there is one, and everything below is known
    memory_bytes : of the device; on cpu what is available here now
    plan_file_bytes : which has kernels beside the weights; None where that is not known before it is built
    max_sequences : of the load's context that fit at a time, at most max_batch_size
    devices : the fewest that hold it; None = no even cut does, or on cpu it does not fit
    split : what each of several devices takes, as text; "" for one
    prefill_tokens_s, decode_tokens_s : of one sequence; decode_batch_tokens_s : of max_sequences together; None where
        it does not fit on one device, and on cpu
    decode_bound : what keeps decode_batch_tokens_s from more: "memory" or "compute"; "" as above
    """

    device: str
    target: str
    precision: str
    reason: str = ""
    memory_bytes: int = 0
    use: MemoryUse | None = None
    plan_file_bytes: int | None = None
    fits: bool = False
    max_sequences: int = 0
    devices: int | None = None
    split: str = ""
    prefill_tokens_s: float | None = None
    decode_tokens_s: float | None = None
    decode_batch_tokens_s: float | None = None
    decode_bound: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return plain values, sizes in bytes."""
        plain = dataclasses.asdict(self)
        use = plain.pop("use")
        sizes = {} if use is None else {f"{name}_bytes": size for name, size in use.items()}
        if self.use is not None:
            sizes["total_bytes"] = self.use.total
        return plain | sizes


def size_row(
    plan: Plan | Refused,
    load: Load,
    *,
    efficiency: float = 1.0,
    memory_bytes: int | None = None,
    threads: int = 0,
) -> Row:
    """Return what a plan takes for a load on its device.

    memory_bytes : of the device, instead of the GPU's own or what is available here
    threads : of the cpu target; 0 = one a core
    """
    if isinstance(plan, Refused):
        return Row(plan.device, plan.target, plan.precision, plan.reason)
    if plan.sku is None:
        return _cpu_row(plan, load, memory_bytes or available_memory_bytes(), threads or usable_cores())
    return _gpu_row(plan, plan.sku, load, memory_bytes or plan.sku.memory_bytes, efficiency)


def plan_use(plan: Plan, load: Load, threads: int = 0) -> MemoryUse:
    """Return what a plan takes for a load."""
    if plan.cpu_plan is not None:
        blocks = load.sequences * blocks_for(load.context, load.tokens_per_block)
        tokens = min(load.max_num_tokens, max(DEFAULT_NUM_TOKENS, load.max_batch_size))
        return cpu_use(plan.cpu_plan, CpuLoad(threads or usable_cores(), blocks, tokens))
    return gpu_use(
        plan.shape,
        load,
        plan.weight_bytes,
        kv_value_bytes=plan.kv_value_bytes,
        compute_bytes=plan.compute_bytes,
        gathers_pages=plan.gathers_pages,
    )


def _cpu_row(plan: Plan, load: Load, memory_bytes: int, threads: int) -> Row:
    use = plan_use(plan, load, threads)
    room = room_in(memory_bytes)  # what the runtime admits
    use = dataclasses.replace(use, reserve=memory_bytes - room)
    fitting = sequences_that_fit(plan.shape, load, plan.kv_value_bytes, max(0, memory_bytes - use.beside_kv))
    return Row(
        CPU,
        plan.target,
        plan.precision,
        memory_bytes=memory_bytes,
        use=use,
        plan_file_bytes=plan.file_bytes,
        fits=use.total <= memory_bytes,
        max_sequences=fitting,
        devices=1 if use.total <= memory_bytes else None,
    )


def _gpu_row(plan: Plan, sku: Sku, load: Load, memory_bytes: int, efficiency: float) -> Row:
    use = plan_use(plan, load)
    room = kv_room(use, memory_bytes)
    devices = devices_needed(plan.shape, use, memory_bytes)
    row = Row(
        sku.name,
        plan.target,
        plan.precision,
        memory_bytes=memory_bytes,
        use=use,
        plan_file_bytes=plan.file_bytes,
        fits=devices == 1,
        max_sequences=sequences_that_fit(plan.shape, load, plan.kv_value_bytes, room),
        devices=devices,
        split=_split_text(plan.shape, use, devices, memory_bytes),
    )
    return _with_speed(row, plan, sku, load, efficiency) if row.fits else row


def _split_text(shape: ModelShape, use: MemoryUse, devices: int | None, memory_bytes: int) -> str:
    """Return the arithmetic of several devices; "" for one."""
    if devices == 1:
        return ""
    if devices is None:
        return f"no cut into powers of two that divide {shape.num_heads} heads fits"
    part = split_use(shape, use, devices)
    return (
        f"{devices} devices with {size_text(part.total)} of {size_text(memory_bytes)} each: weights "
        f"{size_text(part.weights)}, KV {size_text(part.kv)}, activations and logits "
        f"{size_text(part.activations + part.logits)}, reserve {size_text(part.reserve)}"
    )


def _with_speed(row: Row, plan: Plan, sku: Sku, load: Load, efficiency: float) -> Row:
    work, shape = plan.work, plan.shape
    if work is None:
        return row
    one = decode_step(shape, work, sku, batch=1, context=load.context, efficiency=efficiency)
    batch = max(1, row.max_sequences)
    full = decode_step(shape, work, sku, batch=batch, context=load.context, efficiency=efficiency)
    seconds = prefill_seconds(
        shape, work, sku, tokens=load.context, max_num_tokens=load.max_num_tokens, efficiency=efficiency
    )
    return dataclasses.replace(
        row,
        prefill_tokens_s=load.context / seconds,
        decode_tokens_s=1 / one.seconds,
        decode_batch_tokens_s=batch / full.seconds,
        decode_bound=full.bound,
    )
