"""Buffers of the program being lowered, and their slots.

Lowering writes to as many buffers as it likes. Each has a life from its first to its last op, and buffers of one shape
whose lives do not meet share a slot, which keeps a step's working set at a handful of slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .plan_file import Op, OpCode, Slot, SlotRows, View


@dataclasses.dataclass(eq=False)
class Buffer:
    """A buffer of float32 rows; compared by identity."""

    rows: SlotRows
    width: int


@dataclasses.dataclass(frozen=True)
class Ref:
    """Columns [col, ...) of a buffer."""

    buffer: Buffer
    col: int = 0


@dataclasses.dataclass(frozen=True)
class BufferOp:
    """An op over buffers; becomes an Op once buffers have slots."""

    code: OpCode
    name: str
    ins: tuple[Ref, ...]
    out: Ref
    tensors: tuple[int, ...] = ()
    i: tuple[int, ...] = ()
    f: tuple[float, ...] = ()


def assign_slots(ops: Sequence[BufferOp], logits: Buffer) -> tuple[list[Slot], dict[Buffer, int]]:
    """Return the slots and each buffer's slot. The logits have one of their own: their rows must lie side by side.

    A slot is shared by buffers of the same width only: a narrow buffer in a wide slot would spread its rows over
    more pages than it has to.
    """
    last_use: dict[Buffer, int] = {}
    for index, op in enumerate(ops):
        for ref in (*op.ins, op.out):
            last_use[ref.buffer] = index
    slots: list[Slot] = []
    slot_of: dict[Buffer, int] = {}
    free: dict[Slot, list[int]] = {}
    for index, op in enumerate(ops):
        for ref in (*op.ins, op.out):
            if ref.buffer not in slot_of:
                slot = Slot(ref.buffer.rows, ref.buffer.width)
                idle = free.get(slot)
                if idle and ref.buffer is not logits:
                    slot_of[ref.buffer] = idle.pop()
                else:
                    slot_of[ref.buffer] = len(slots)
                    slots.append(slot)
        # Freed behind the op: its output never shares a slot with its inputs unless lowering said so.
        for buffer in dict.fromkeys(ref.buffer for ref in (*op.ins, op.out)):
            if last_use[buffer] == index:
                free.setdefault(Slot(buffer.rows, buffer.width), []).append(slot_of[buffer])
    return slots, slot_of


def to_ops(ops: Sequence[BufferOp], slot_of: dict[Buffer, int]) -> list[Op]:
    """Return the ops over slots."""

    def view(ref: Ref) -> View:
        return View(slot_of[ref.buffer], ref.col)

    return [Op(o.code, o.name, tuple(map(view, o.ins)), view(o.out), o.tensors, o.i, o.f) for o in ops]
