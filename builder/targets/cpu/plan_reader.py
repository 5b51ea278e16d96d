"""Reads cpu plan files, for inspection and tests; the core has a reader of its own."""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ....runtime.errors import EngineFileError
from .plan_file import (
    FORMAT_VERSION,
    HEADER,
    MAGIC,
    MODEL_FIELDS,
    OP,
    SLOT,
    TENSOR,
    Array,
    DType,
    Layout,
    Op,
    OpCode,
    Slot,
    SlotRows,
    View,
)


@dataclasses.dataclass(frozen=True)
class PlanTensor:
    """A tensor of a file that was read; `data`, `scales`, `sums` are views of the mapped file, flat."""

    name: str
    dtype: DType
    layout: Layout
    rows: int
    cols: int
    group_size: int
    data: Array
    scales: Array
    sums: Array


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan file that was read and checked; tensors stay mapped."""

    model: dict[str, int]
    slots: list[Slot]
    tensors: list[PlanTensor]
    ops: list[Op]
    logits_slot: int
    file_bytes: int


_STORED = {DType.F32: "<f4", DType.BF16: "<u2", DType.I8: "i1", DType.I4: "u1"}


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Return the checked contents of a plan file, tensors as views of the mapping.

    raises EngineFileError naming the rule that is violated.
    """
    path = Path(path)

    def fail(what: str) -> EngineFileError:
        return EngineFileError(f"{path}: {what}; build the engine again")

    if not path.is_file():
        raise EngineFileError(f"{path}: there is no such plan file; build the engine or give another path")
    if path.stat().st_size < HEADER.itemsize:
        raise fail(f"{path.stat().st_size} bytes are fewer than the header's {HEADER.itemsize}")
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    header = raw[: HEADER.itemsize].view(HEADER)[0]
    _check_header(header, raw, fail)

    def table(name: str, dtype: np.dtype[Any]) -> Array:
        start = int(header[f"{name}_offset"])
        return raw[start : start + int(header[f"num_{name}"]) * dtype.itemsize].view(dtype)

    start = int(header["strings_offset"])
    strings = raw[start : start + int(header["strings_bytes"])].tobytes()

    def text(offset: int) -> str:
        end = strings.find(b"\0", offset)
        if end < 0:
            raise fail(f"string offset {offset} is outside the {len(strings)} bytes of strings")
        return strings[offset:end].decode()

    def section(record: Any, name: str, dtype: str) -> Array:
        first, size = int(record[f"{name}_offset"]), int(record[f"{name}_bytes"])
        if first + size > raw.size:
            raise fail(f"tensor {text(int(record['name']))!r}: {name} ends behind the file")
        return raw[first : first + size].view(dtype)

    tensors = [
        PlanTensor(
            text(int(r["name"])),
            DType(int(r["dtype"])),
            Layout(int(r["layout"])),
            int(r["rows"]),
            int(r["cols"]),
            int(r["group_size"]),
            section(r, "data", _STORED[DType(int(r["dtype"]))]),
            section(r, "scales", "<f4"),
            section(r, "sums", "<i4"),
        )
        for r in table("tensors", TENSOR)
    ]
    return Plan(
        model={field: int(header[field]) for field in MODEL_FIELDS},
        slots=[Slot(SlotRows(int(r["rows"])), int(r["width"])) for r in table("slots", SLOT)],
        tensors=tensors,
        ops=[_read_op(r, text(int(r["name"]))) for r in table("ops", OP)],
        logits_slot=int(header["logits_slot"]),
        file_bytes=raw.size,
    )


def _check_header(header: Any, raw: Array, fail: Callable[[str], EngineFileError]) -> None:
    if raw[:8].tobytes() != MAGIC:
        raise fail("this is not a cpu plan (the first bytes differ)")
    if int(header["format_version"]) != FORMAT_VERSION:
        raise fail(f"format version {int(header['format_version'])}, this plansmith reads {FORMAT_VERSION}")
    bare = header.copy()
    bare["header_crc32"] = 0
    if zlib.crc32(bare.tobytes()) != int(header["header_crc32"]):
        raise fail("the header's checksum does not match, the file is damaged")
    if int(header["file_bytes"]) != raw.size:
        raise fail(f"the file has {raw.size} bytes, its header says {int(header['file_bytes'])}")
    tables = raw[HEADER.itemsize : int(header["data_offset"])]
    if zlib.crc32(tables.data) != int(header["tables_crc32"]):
        raise fail("the tables' checksum does not match, the file is damaged")


def _read_op(record: Any, name: str) -> Op:
    return Op(
        OpCode(int(record["code"])),
        name,
        tuple(View(int(v["slot"]), int(v["col"])) for v in record["in"]),
        View(int(record["out"]["slot"]), int(record["out"]["col"])),
        tuple(int(t) for t in record["tensors"]),
        tuple(int(i) for i in record["i"]),
        tuple(float(f) for f in record["f"]),
    )
