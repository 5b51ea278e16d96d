"""Reads cpu plan files, for inspection and tests; the core has a reader of its own."""

from __future__ import annotations

import dataclasses
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ....runtime.errors import EngineFileError
from ....runtime.file_kind import no_file
from . import packing
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
    KvFormat,
    Layout,
    Op,
    OpCode,
    Slot,
    SlotRows,
    View,
)


@dataclasses.dataclass(frozen=True)
class PlanTensor:
    """A tensor of a file that was read; `data`, `scales` and `zeros` are views of the mapped file, flat.

    scales : float32 or bfloat16, of F4 float8_e4m3fn, times outer_scale
    zeros : float32 zero points, empty where there are none
    """

    name: str
    dtype: DType
    layout: Layout
    rows: int
    cols: int
    group_size: int
    data: Array
    scales: Array
    zeros: Array
    outer_scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan file that was read and checked; tensors stay mapped."""

    model: dict[str, int]
    slots: list[Slot]
    tensors: list[PlanTensor]
    ops: list[Op]
    logits_slot: int
    kv_format: KvFormat
    file_bytes: int


_STORED = {
    DType.F32: "<f4",
    DType.BF16: "<u2",
    DType.F16: "<u2",
    DType.I8: "i1",
    DType.I4: "u1",
    DType.F8: "u1",
    DType.F4: "u1",
}


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Return the checked contents of a plan file, tensors as views of the mapping.

    raises EngineFileError naming the rule that is violated.
    """
    return _Reader(Path(path)).plan()


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path = path
        if (wrong := no_file(path)) is not None:
            raise EngineFileError(f"{path}: {wrong}; build the engine or give another path")
        size = path.stat().st_size
        if size < HEADER.itemsize:
            raise self.fail(f"{size} bytes are fewer than the header's {HEADER.itemsize}")
        self.raw = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        self.header = self.raw[: HEADER.itemsize].view(HEADER)[0]
        self.check()
        self.strings = self.bytes_at("strings", int(self.header["strings_bytes"])).tobytes()

    def fail(self, what: str) -> EngineFileError:
        return EngineFileError(f"{self.path}: {what}; build the engine again")

    def check(self) -> None:
        """Check the header and both checksums."""
        header = self.header
        if self.raw[:8].tobytes() != MAGIC:
            raise self.fail("this is not a cpu plan (the first bytes differ)")
        if int(header["format_version"]) != FORMAT_VERSION:
            raise self.fail(
                f"format version {int(header['format_version'])}, this plansmith reads {FORMAT_VERSION}"
            )
        bare = header.copy()
        bare["header_crc32"] = 0
        if zlib.crc32(bare.tobytes()) != int(header["header_crc32"]):
            raise self.fail("the header's checksum does not match, the file is damaged")
        if int(header["file_bytes"]) != self.raw.size:
            raise self.fail(
                f"the file has {self.raw.size} bytes, its header says {int(header['file_bytes'])}"
            )
        tables = self.raw[HEADER.itemsize : int(header["data_offset"])]
        if zlib.crc32(tables.data) != int(header["tables_crc32"]):
            raise self.fail("the tables' checksum does not match, the file is damaged")

    def bytes_at(self, name: str, size: int) -> Array:
        """Return the bytes of a table."""
        start = int(self.header[f"{name}_offset"])
        if start + size > int(self.header["data_offset"]):
            raise self.fail(f"the {name} table ends behind the start of the data")
        return self.raw[start : start + size]

    def table(self, name: str, dtype: np.dtype[Any]) -> Array:
        return self.bytes_at(name, int(self.header[f"num_{name}"]) * dtype.itemsize).view(dtype)

    def text(self, offset: int) -> str:
        end = self.strings.find(b"\0", offset)
        if end < 0:
            raise self.fail(f"string offset {offset} is outside the {len(self.strings)} bytes of strings")
        return self.strings[offset:end].decode(errors="replace")

    def plan(self) -> Plan:
        try:
            return Plan(
                model={field: int(self.header[field]) for field in MODEL_FIELDS},
                slots=[Slot(SlotRows(int(r["rows"])), int(r["width"])) for r in self.table("slots", SLOT)],
                tensors=[self.tensor(r) for r in self.table("tensors", TENSOR)],
                ops=[_read_op(r, self.text(int(r["name"]))) for r in self.table("ops", OP)],
                logits_slot=int(self.header["logits_slot"]),
                kv_format=KvFormat(int(self.header["kv_format"])),
                file_bytes=self.raw.size,
            )
        except (ValueError, KeyError) as error:  # a number that no enum has
            raise self.fail(f"a record does not follow the format ({error})") from error

    def tensor(self, record: Any) -> PlanTensor:
        name = self.text(int(record["name"]))
        dtype, layout = DType(int(record["dtype"])), Layout(int(record["layout"]))
        rows, cols, group = (int(record[field]) for field in ("rows", "cols", "group_size"))
        if layout not in (Layout.ROW_MAJOR, packing.PACKED[dtype]) or (group and cols % group):
            raise self.fail(f"tensor {name!r}: {dtype.name} in layout {layout.name} with groups of {group}")
        groups = cols // group if group else 1
        kind = DType(int(record["scale_dtype"]))
        if kind not in _scale_types(dtype):
            raise self.fail(f"tensor {name!r}: {dtype.name} with scales of {kind.name}")
        per_group = packing.scales_bytes(kind, rows, groups) if dtype in packing.SCALED else 0
        zeros = packing.scales_bytes(DType.F32, rows, groups)
        has_zeros = dtype is DType.I4 and int(record["zeros_bytes"]) > 0
        wanted = {
            "data": (packing.data_bytes(dtype, layout, rows, cols), _STORED[dtype]),
            "scales": (per_group, packing.FLOATS[kind]),
            "zeros": (zeros if has_zeros else 0, "<f4"),
        }
        views = {}
        for section, (size, stored) in wanted.items():
            start, got = int(record[f"{section}_offset"]), int(record[f"{section}_bytes"])
            if got != size or start + size > self.raw.size:
                raise self.fail(
                    f"tensor {name!r}: {section} has {got} bytes at {start}, its shape wants {size} within the file's "
                    f"{self.raw.size}"
                )
            views[section] = self.raw[start : start + size].view(stored)
        outer = float(record["outer_scale"])
        return PlanTensor(name, dtype, layout, rows, cols, group, outer_scale=outer, **views)


def _scale_types(dtype: DType) -> tuple[DType, ...]:
    """Return what scales of a type of weights may be; F32 where there are none."""
    if dtype is DType.F4:
        return (DType.F8,)
    return (DType.F32, DType.BF16) if dtype in (DType.I8, DType.I4) else (DType.F32,)


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
