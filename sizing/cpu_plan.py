"""What a cpu plan says of the memory that its executor takes: the tables of the file, read without their weights.

Standard library only. The records are those of runtime/src/cpu/plan_format.h; a test compares what is read here with
what builder/targets/cpu reads.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import struct
from collections.abc import Iterable, Iterator

from ..runtime.errors import EngineFileError
from .memory import ModelShape

_MAGIC, _FORMAT_VERSION = b"PSMPLAN\0", 3
_HEADER = struct.Struct("<8s6I7Q11i2I60x")
_SLOT = struct.Struct("<2I")
_TENSOR = struct.Struct("<6I6QfI")
_OP = struct.Struct("<2I8i2i6i2f")
_LINEAR, _ATTENTION, _NO_ROUNDING, _FIRST_F8_INPUT = 3, 5, 0, 4
_COLUMN_STEPS = {0: 1, 1: 1, 2: 4, 3: 8}  # of a layout: what it pads the columns of a matrix to
KV_VALUE_BYTES = {0: 4, 1: 1, 2: 1, 3: 2}


@dataclasses.dataclass(frozen=True)
class RoundedInput:
    """A product whose input is rounded before it.

    cols : of its weight, padding included; num_groups : that share a scale; is_f8 : codes are two bytes
    """

    cols: int
    num_groups: int
    is_f8: bool


@dataclasses.dataclass(frozen=True)
class CpuPlan:
    """What of a plan decides how much memory its executor takes.

    file_bytes : of the whole file, of which the weights are nearly all
    slot_widths : columns of each buffer of float32 rows; logits_slot : which one holds the logits
    rounded : products whose inputs are rounded
    head_counts : query heads of the attention ops, each number once
    kv_value_bytes : of a value in the KV pools
    """

    shape: ModelShape
    file_bytes: int
    slot_widths: tuple[int, ...]
    logits_slot: int
    rounded: tuple[RoundedInput, ...]
    head_counts: tuple[int, ...]
    kv_value_bytes: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    tokens_per_block: int

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of a KV block over all layers."""
        shape = self.shape
        values = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * self.tokens_per_block
        return values * self.kv_value_bytes


def padded_cols(cols: int, layout: int) -> int:
    """Return the columns of a matrix in a layout (plan_format.h's number), padding included."""
    step = _COLUMN_STEPS[layout]
    return -(-cols // step) * step


def read_cpu_plan(path: str | os.PathLike[str]) -> CpuPlan:
    """Return what a plan file says of its executor's memory; reads its tables alone.

    raises EngineFileError for a file that is no plan of this version, or whose tables do not fit into it
    """
    path = pathlib.Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HEADER.size)
            if len(head) < _HEADER.size or head[:8] != _MAGIC:
                raise EngineFileError(f"{path}: is no cpu plan; build the engine again")
            data_offset = _HEADER.unpack(head)[12]
            tables = head + file.read(min(data_offset, size) - _HEADER.size)
    except OSError as error:
        raise EngineFileError(f"{path} cannot be read: {error.strerror}; check its permissions") from error
    try:
        return _parse(tables)
    except (struct.error, IndexError, KeyError, ZeroDivisionError) as error:
        raise EngineFileError(f"{path}: its tables are damaged ({error}); build the engine again") from error


def _parse(tables: bytes) -> CpuPlan:
    (
        _,
        version,
        _,
        _,
        num_slots,
        num_tensors,
        num_ops,
        slots_at,
        tensors_at,
        ops_at,
        _,
        _,
        _,
        file_bytes,
        *model,
    ) = _HEADER.unpack_from(tables)
    if version != _FORMAT_VERSION:
        raise KeyError(f"format version {version}")
    vocab, hidden, layers, heads, kv_heads, head_dim, batch, tokens, _, seq_len, block, logits_slot, kv = (
        model
    )
    slots = [_SLOT.unpack_from(tables, slots_at + _SLOT.size * n) for n in range(num_slots)]
    tensors = [_TENSOR.unpack_from(tables, tensors_at + _TENSOR.size * n) for n in range(num_tensors)]
    ops = [_OP.unpack_from(tables, ops_at + _OP.size * n) for n in range(num_ops)]
    return CpuPlan(
        # The MLP's width is no number of the plan; its buffers are slots.
        shape=ModelShape(layers, heads, kv_heads, head_dim, hidden, 0, vocab),
        file_bytes=file_bytes,
        slot_widths=tuple(width for _, width in slots),
        logits_slot=logits_slot,
        rounded=tuple(dict.fromkeys(_rounded(ops, tensors))),
        head_counts=head_counts((op[0], op[12]) for op in ops),
        kv_value_bytes=KV_VALUE_BYTES[kv],
        max_batch_size=batch,
        max_num_tokens=tokens,
        max_seq_len=seq_len,
        tokens_per_block=block,
    )


def _rounded(ops: Iterable[tuple[int, ...]], tensors: list[tuple[int, ...]]) -> Iterator[RoundedInput]:
    for op in ops:  # code, name, three inputs and an output of (slot, column), two tensors, i[0], i[1], ...
        code, weight, kind = op[0], op[10], op[13]
        if code == _LINEAR and kind != _NO_ROUNDING:
            _, layout, _, cols, group_size = tensors[weight][:5]
            yield rounded_input(cols, layout, group_size, kind)


def rounded_input(cols: int, layout: int, group_size: int, kind: int) -> RoundedInput:
    """Return how a product's input is rounded; `layout` and `kind` are plan_format.h's numbers."""
    padded = padded_cols(cols, layout)
    groups = cols // group_size if group_size else 1
    return RoundedInput(padded, groups, kind >= _FIRST_F8_INPUT)


def head_counts(ops: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return the numbers of heads of the attention ops among (code, i[0])."""
    return tuple(dict.fromkeys(heads for code, heads in ops if code == _ATTENTION))
