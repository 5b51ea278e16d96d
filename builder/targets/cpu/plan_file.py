"""The cpu plan file's records in Python, as runtime/src/cpu/plan_format.h has them, and a program made of them.

The header file says what the records mean; a test compiles it and compares sizes, offsets and numbers.
plan_writer.py and plan_reader.py do the files.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"PSMPLAN\0"
FORMAT_VERSION = 3
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
    F16 = 4
    F8 = 5
    F4 = 6


class KvFormat(enum.IntEnum):
    """What the KV pools hold."""

    F32 = 0
    F8 = 1
    I8 = 2
    F16 = 3


class LinearInput(enum.IntEnum):
    """What a product takes its input as."""

    FLOAT = 0
    INT8_ROW = 1
    INT8_GROUP = 2
    INT8_STATIC = 3
    F8_ROW = 4
    F8_GROUP = 5
    F8_STATIC = 6


F8_STEP = 4  # columns, and those of a group, that meet E4M3 inputs are a multiple of it


class RoundFormat(enum.IntEnum):
    """What ROUND_INPUT rounds to."""

    INT8 = 0
    F8 = 1
    F4 = 2


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
    ROUND_INPUT = 11
    MUL_VECTOR = 12


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
    + [("logits_slot", "<u4"), ("kv_format", "<u4"), ("reserved", "<u4", (15,))]
)
SECTIONS = ("data", "scales", "zeros")  # what a tensor has in the file
SLOT = np.dtype([("rows", "<u4"), ("width", "<u4")])
TENSOR = np.dtype(
    [(n, "<u4") for n in ("dtype", "layout", "rows", "cols", "group_size", "name")]
    + [(f"{section}_{what}", "<u8") for section in SECTIONS for what in ("offset", "bytes")]
    + [("outer_scale", "<f4"), ("scale_dtype", "<u4")]
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

    sections : bytes of each of SECTIONS (0 = none)
    blocks : yields (section, array) in file order within each section; called once, when its turn comes
    scale_dtype : of the scales; F32 without
    """

    name: str
    dtype: DType
    layout: Layout
    rows: int
    cols: int
    group_size: int
    sections: dict[str, int]
    blocks: Callable[[], Iterator[tuple[str, Array]]]
    outer_scale: float = 1.0
    scale_dtype: DType = DType.F32


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
    kv_format: KvFormat = KvFormat.F32
