"""The cpu plan file in Python: the records of runtime/src/cpu/plan_format.h, a writer and a reader.

The header file says what the records mean; a test compiles it and compares sizes, offsets and numbers.
The writer knows every offset before it reads a weight, so tables come first and tensors stream behind them.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ....runtime.errors import BuildError, EngineFileError

MAGIC = b"PSMPLAN\0"
FORMAT_VERSION = 1
TILE = 16
ALIGN = 64

Array = npt.NDArray[Any]


class SlotRows(enum.IntEnum):
    """How many rows a slot has in a step."""

    TOKENS = 0
    LOGITS = 1


class DType(enum.IntEnum):
    """Stored type of a tensor."""

    F32 = 0
    BF16 = 1
    I8 = 2
    I4 = 3


class Layout(enum.IntEnum):
    """How a matrix [N, K] lies in memory."""

    ROW_MAJOR = 0
    PACKED_N16 = 1
    PACKED_N16_K4 = 2
    PACKED_N16_K8 = 3


class OpCode(enum.IntEnum):
    """Operations of the executor."""

    EMBED = 1
    RMS_NORM = 2
    LINEAR = 3
    ROPE = 4
    PAGED_ATTENTION = 5
    GLU = 6
    ADD = 7
    SOFTCAP = 8
    GATHER_ROWS = 9
    SCALE = 10


MODEL_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_batch_size",
    "max_num_tokens",
    "max_input_len",
    "max_seq_len",
    "tokens_per_block",
)

HEADER = np.dtype(
    [("magic", "S8")]
    + [
        (n, "<u4")
        for n in ("format_version", "header_crc32", "tables_crc32", "num_slots", "num_tensors", "num_ops")
    ]
    + [
        (n, "<u8")
        for n in (
            "slots_offset",
            "tensors_offset",
            "ops_offset",
            "strings_offset",
            "strings_bytes",
            "data_offset",
            "file_bytes",
        )
    ]
    + [(n, "<i4") for n in MODEL_FIELDS]
    + [("logits_slot", "<u4"), ("reserved", "<u4", (16,))]
)
SLOT = np.dtype([("rows", "<u4"), ("width", "<u4")])
TENSOR = np.dtype(
    [(n, "<u4") for n in ("dtype", "layout", "rows", "cols", "group_size", "name")]
    + [(f"{section}_{what}", "<u8") for section in ("data", "scales", "sums") for what in ("offset", "bytes")]
)
VIEW = np.dtype([("slot", "<i4"), ("col", "<u4")])
OP = np.dtype(
    [
        ("code", "<u4"),
        ("name", "<u4"),
        ("in", VIEW, (3,)),
        ("out", VIEW),
        ("tensors", "<i4", (2,)),
        ("i", "<i4", (6,)),
        ("f", "<f4", (2,)),
    ]
)


@dataclasses.dataclass(frozen=True)
class Slot:
    """A buffer of float32 rows."""

    rows: SlotRows
    width: int


@dataclasses.dataclass(frozen=True)
class View:
    """Columns [col, ...) of a slot."""

    slot: int = -1
    col: int = 0


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of the file and how to make its bytes.

    sections : bytes of "data", "scales", "sums" (0 = none)
    blocks : yields (section, array) in file order within each section; called once, when its turn comes
    """

    name: str
    dtype: DType
    layout: Layout
    rows: int
    cols: int
    group_size: int
    sections: dict[str, int]
    blocks: Callable[[], Iterator[tuple[str, Array]]]


@dataclasses.dataclass(frozen=True)
class Op:
    """One step of the program; the fields' meaning by code is in plan_format.h."""

    code: OpCode
    name: str
    ins: tuple[View, ...] = ()
    out: View = View()
    tensors: tuple[int, ...] = ()
    i: tuple[int, ...] = ()
    f: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Program:
    """What a plan file holds."""

    slots: list[Slot]
    tensors: list[Tensor]
    ops: list[Op]
    model: dict[str, int]  # MODEL_FIELDS
    logits_slot: int


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
            for field in ("dtype", "layout", "rows", "cols", "group_size"):
                record[field] = getattr(tensor, field)
            record["name"] = self._strings.add(tensor.name)
        for record, op in zip(self.ops, program.ops, strict=True):
            self._fill_op(record, op)
        header = np.zeros((), dtype=HEADER)
        header["magic"], header["format_version"] = MAGIC, FORMAT_VERSION
        header["logits_slot"] = program.logits_slot
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
            for section in ("data", "scales", "sums"):
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
        done = dict.fromkeys(("data", "scales", "sums"), 0)
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


def write_plan(
    path: str | os.PathLike[str],
    program: Program,
    progress: Callable[[str, int, int], None] | None = None,
) -> int:
    """Write a program as a plan file and return its bytes."""
    return PlanWriter(path, program).write(progress)


def total_bytes(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Return bytes by stored type, scales and sums included."""
    totals: dict[str, int] = {}
    for tensor in tensors:
        name = tensor.dtype.name.lower()
        totals[name] = totals.get(name, 0) + sum(tensor.sections.values())
    return totals
