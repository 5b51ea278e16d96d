"""Slots: shared only by buffers whose lives do not meet, and few."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from plansmith.builder.targets.cpu.buffers import Buffer, BufferOp, Ref, assign_slots, to_ops
from plansmith.builder.targets.cpu.plan_file import OpCode, SlotRows, View


def op(ins: list[Buffer], out: Buffer) -> BufferOp:
    return BufferOp(OpCode.ADD, "op", tuple(Ref(b) for b in ins), Ref(out))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_value_is_whole_when_it_is_read(data: st.DataObject) -> None:
    """Run random programs twice, over buffers and over slots: each read finds what was written last."""
    buffers: list[Buffer] = []
    ops: list[BufferOp] = []
    for _ in range(data.draw(st.integers(1, 25))):
        known = st.sampled_from(buffers) if buffers else st.nothing()
        ins = data.draw(st.lists(known, max_size=3)) if buffers else []
        if buffers and data.draw(st.booleans()):
            out = data.draw(known)  # in place
        else:
            out = Buffer(data.draw(st.sampled_from(SlotRows)), data.draw(st.sampled_from([8, 16])))
            buffers.append(out)
        ops.append(op(ins, out))
    logits = Buffer(SlotRows.LOGITS, 8)
    ops.append(op([], logits))
    slots, slot_of = assign_slots(ops, logits)
    in_buffers: dict[Buffer, int] = {}
    in_slots: dict[int, int] = {}
    for index, (over_buffers, over_slots) in enumerate(zip(ops, to_ops(ops, slot_of), strict=True)):
        for ref, view in zip(over_buffers.ins, over_slots.ins, strict=True):
            assert in_slots[view.slot] == in_buffers[ref.buffer]
            slot = slots[view.slot]
            assert (slot.rows, slot.width) == (ref.buffer.rows, ref.buffer.width)
        in_buffers[over_buffers.out.buffer] = in_slots[over_slots.out.slot] = index
        fresh = over_buffers.out.buffer not in {r.buffer for r in over_buffers.ins}
        assert not fresh or over_slots.out.slot not in {v.slot for v in over_slots.ins}
    assert sum(slot_of[b] == slot_of[logits] for b in slot_of) == 1


def test_a_chain_takes_two_slots() -> None:
    chain = [Buffer(SlotRows.TOKENS, 8) for _ in range(9)]
    logits = Buffer(SlotRows.LOGITS, 8)
    ops = [op([a], b) for a, b in itertools.pairwise(chain)] + [op([], logits)]
    slots, slot_of = assign_slots(ops, logits)
    assert len(slots) == 3 and to_ops(ops, slot_of)[-1].out == View(slot_of[logits], 0)
