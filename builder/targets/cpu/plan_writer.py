"""Writes cpu plan files: every offset is known before a weight is read, so tensors stream behind the tables."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ....runtime.errors import BuildError
from .plan_file import (
    ALIGN,
    FORMAT_VERSION,
    HEADER,
    MAGIC,
    MODEL_FIELDS,
    OP,
    SECTIONS,
    SLOT,
    TENSOR,
    Op,
    Program,
    Tensor,
)


def align(offset: int) -> int:
    """Return the next multiple of ALIGN at or behind offset."""
    return -(-offset // ALIGN) * ALIGN


class _Strings:
    """NUL-terminated texts, each stored once."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._offsets: dict[str, int] = {}

    def add(self, text: str) -> int:
        if text not in self._offsets:
            self._offsets[text] = len(self.data)
            self.data += text.encode() + b"\0"
        return self._offsets[text]


class PlanWriter:
    """Writes one program: tables first, then its tensors one at a time."""

    def __init__(self, path: str | os.PathLike[str], program: Program) -> None:
        self._path = Path(path)
        self._program = program
        self._strings = _Strings()
        self._lay_out()

    def _lay_out(self) -> None:
        program = self._program
        self.slots = np.array([(s.rows, s.width) for s in program.slots], dtype=SLOT)
        self.tensors = np.zeros(len(program.tensors), dtype=TENSOR)
        self.ops = np.zeros(len(program.ops), dtype=OP)
        for record, tensor in zip(self.tensors, program.tensors, strict=True):
            for field in ("dtype", "layout", "rows", "cols", "group_size", "scale_dtype"):
                record[field] = getattr(tensor, field)
            record["name"], record["outer_scale"] = self._strings.add(tensor.name), tensor.outer_scale
        for record, op in zip(self.ops, program.ops, strict=True):
            self._fill_op(record, op)
        header = np.zeros((), dtype=HEADER)
        header["magic"], header["format_version"] = MAGIC, FORMAT_VERSION
        header["logits_slot"], header["kv_format"] = program.logits_slot, program.kv_format
        for field in MODEL_FIELDS:
            header[field] = program.model[field]
        offset = HEADER.itemsize
        for name, table in (("slots", self.slots), ("tensors", self.tensors), ("ops", self.ops)):
            header[f"num_{name}"] = len(table)
            header[f"{name}_offset"] = offset = align(offset)
            offset += table.nbytes
        header["strings_offset"], header["strings_bytes"] = align(offset), len(self._strings.data)
        offset = align(align(offset) + len(self._strings.data))
        header["data_offset"] = offset
        for record, tensor in zip(self.tensors, program.tensors, strict=True):
            for section in SECTIONS:
                size = tensor.sections.get(section, 0)
                if size:
                    record[f"{section}_offset"], record[f"{section}_bytes"] = offset, size
                    offset = align(offset + size)
        header["file_bytes"] = offset
        self.header = header

    def _fill_op(self, record: Any, op: Op) -> None:
        record["code"], record["name"] = op.code, self._strings.add(op.name)
        record["in"]["slot"], record["tensors"] = -1, -1
        for n, view in enumerate(op.ins):
            record["in"][n] = (view.slot, view.col)
        record["out"] = (op.out.slot, op.out.col)
        record["tensors"][: len(op.tensors)] = op.tensors
        record["i"][: len(op.i)] = op.i
        record["f"][: len(op.f)] = op.f

    def _tables(self) -> bytes:
        """Return the bytes from the header's end to the first tensor."""
        start = HEADER.itemsize
        tables = bytearray(int(self.header["data_offset"]) - start)
        for name, data in (
            ("slots", self.slots.tobytes()),
            ("tensors", self.tensors.tobytes()),
            ("ops", self.ops.tobytes()),
            ("strings", bytes(self._strings.data)),
        ):
            offset = int(self.header[f"{name}_offset"]) - start
            tables[offset : offset + len(data)] = data
        return bytes(tables)

    def write(self, progress: Callable[[str, int, int], None] | None = None) -> int:
        """Write the file and return its bytes; holds one tensor at a time.

        progress(name, done, total) is called after each tensor with bytes written.
        raises BuildError when a tensor yields more or fewer bytes than it announced.
        """
        tables = self._tables()
        self.header["tables_crc32"] = zlib.crc32(tables)
        self.header["header_crc32"] = 0
        self.header["header_crc32"] = zlib.crc32(self.header.tobytes())
        total = int(self.header["file_bytes"])
        with self._path.open("wb") as file:
            file.truncate(total)
            file.write(self.header.tobytes() + tables)
            for record, tensor in zip(self.tensors, self._program.tensors, strict=True):
                self._write_tensor(file, record, tensor)
                if progress is not None:
                    progress(tensor.name, file.tell(), total)
        return total

    def _write_tensor(self, file: Any, record: Any, tensor: Tensor) -> None:
        done = dict.fromkeys(SECTIONS, 0)
        for section, block in tensor.blocks():
            size = block.nbytes
            if done[section] + size > int(record[f"{section}_bytes"]):
                break
            file.seek(int(record[f"{section}_offset"]) + done[section])
            file.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
            done[section] += size
        for section, size in done.items():
            if size != int(record[f"{section}_bytes"]):
                raise BuildError(
                    f"tensor {tensor.name!r}: {section} gave {size} bytes, {int(record[f'{section}_bytes'])} were "
                    f"announced for {tensor.rows} x {tensor.cols}; the weight's shape differs from the graph's"
                )


def write_plan(
    path: str | os.PathLike[str],
    program: Program,
    progress: Callable[[str, int, int], None] | None = None,
) -> int:
    """Write a program as a plan file and return its bytes."""
    return PlanWriter(path, program).write(progress)


def total_bytes(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Return bytes by stored type, scales and zero points included."""
    totals: dict[str, int] = {}
    for tensor in tensors:
        name = tensor.dtype.name.lower()
        totals[name] = totals.get(name, 0) + sum(tensor.sections.values())
    return totals
