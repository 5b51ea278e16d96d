"""The plan file: the Python records against the C++ header, writing, reading, damage."""

from __future__ import annotations

import json
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plansmith.builder.targets.cpu import plan_file, plan_reader, plan_writer
from plansmith.builder.targets.cpu.plan_file import (
    F8_STEP,
    DType,
    KvFormat,
    Layout,
    LinearInput,
    Op,
    OpCode,
    Program,
    RoundFormat,
    Slot,
    SlotRows,
    Tensor,
    View,
)
from plansmith.runtime.errors import BuildError, EngineFileError

HEADER_FOLDER = Path(__file__).parents[4] / "runtime" / "src" / "cpu"
RECORDS = {
    "PlanHeader": plan_file.HEADER,
    "SlotRecord": plan_file.SLOT,
    "TensorRecord": plan_file.TENSOR,
    "OpRecord": plan_file.OP,
    "View": plan_file.VIEW,
}
ENUMS = {
    "kRowsTokens": SlotRows.TOKENS,
    "kRowsLogits": SlotRows.LOGITS,
    "kF32": DType.F32,
    "kBF16": DType.BF16,
    "kI8": DType.I8,
    "kI4": DType.I4,
    "kF16": DType.F16,
    "kF8": DType.F8,
    "kF4": DType.F4,
    "kKvF32": KvFormat.F32,
    "kKvF8": KvFormat.F8,
    "kKvI8": KvFormat.I8,
    "kInputFloat": LinearInput.FLOAT,
    "kInputInt8Row": LinearInput.INT8_ROW,
    "kInputInt8Group": LinearInput.INT8_GROUP,
    "kInputInt8Static": LinearInput.INT8_STATIC,
    "kInputF8Row": LinearInput.F8_ROW,
    "kInputF8Group": LinearInput.F8_GROUP,
    "kInputF8Static": LinearInput.F8_STATIC,
    "kF8Step": F8_STEP,
    "kRoundInt8": RoundFormat.INT8,
    "kRoundF8": RoundFormat.F8,
    "kRoundF4": RoundFormat.F4,
    "kRowMajor": Layout.ROW_MAJOR,
    "kPackedN16": Layout.PACKED_N16,
    "kPackedN16K4": Layout.PACKED_N16_K4,
    "kPackedN16K8": Layout.PACKED_N16_K8,
    "kOpEmbed": OpCode.EMBED,
    "kOpRmsNorm": OpCode.RMS_NORM,
    "kOpLinear": OpCode.LINEAR,
    "kOpRope": OpCode.ROPE,
    "kOpPagedAttention": OpCode.PAGED_ATTENTION,
    "kOpGlu": OpCode.GLU,
    "kOpAdd": OpCode.ADD,
    "kOpSoftcap": OpCode.SOFTCAP,
    "kOpGatherRows": OpCode.GATHER_ROWS,
    "kOpScale": OpCode.SCALE,
    "kOpRoundInput": OpCode.ROUND_INPUT,
    "kOpMulVector": OpCode.MUL_VECTOR,
    "kNumDTypes": len(DType),
    "kPlanFormatVersion": plan_file.FORMAT_VERSION,
    "kTile": plan_file.TILE,
}
MODEL = dict.fromkeys(plan_file.MODEL_FIELDS, 1) | {"vocab_size": 7, "max_seq_len": 99}


def test_records_match_the_header(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    lines = [f'P("{n}", sizeof({n}));' for n in RECORDS]
    for name, dtype in RECORDS.items():
        assert dtype.names
        lines += [f'P("{name}.{field}", offsetof({name}, {field}));' for field in dtype.names]
    lines += [f'P("{n}", {n});' for n in ENUMS]
    source = tmp_path / "layout.cc"
    source.write_text(
        '#include <cstddef>\n#include <cstdio>\n#include "plan_format.h"\nusing namespace plansmith::cpu;\n'
        'static void P(const char* n, unsigned long v) { std::printf(",\\"%s\\": %lu", n, v); }\n'
        'int main() { std::printf("{\\"_\\": 0"); ' + "\n".join(lines) + ' std::printf("}"); }\n'
    )
    program = tmp_path / "layout"
    subprocess.run(
        [compiler, "-std=c++17", "-I", str(HEADER_FOLDER), str(source), "-o", str(program)], check=True
    )
    got = json.loads(subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout)
    want = {"_": 0} | {n: d.itemsize for n, d in RECORDS.items()} | {n: int(v) for n, v in ENUMS.items()}
    for name, dtype in RECORDS.items():
        assert dtype.fields
        want |= {f"{name}.{field}": dtype.fields[field][1] for field in dtype.fields}
    assert got == want


def small_program(extra: int = 0) -> Program:
    """Return a program of one matrix whose blocks are `extra` elements longer than announced."""

    def blocks() -> Iterator[tuple[str, np.ndarray]]:
        yield "data", np.arange(24 + extra, dtype=np.uint8)
        yield "scales", np.arange(16, dtype=ml_dtypes.bfloat16)
        yield "data", np.arange(24, 64, dtype=np.uint8)
        yield "zeros", np.arange(16, 32, dtype=np.float32)

    sections = {"data": 64, "scales": 32, "zeros": 64}
    tensor = Tensor("w", DType.I4, Layout.PACKED_N16_K8, 6, 8, 8, sections, blocks, 0.25, DType.BF16)
    op = Op(OpCode.LINEAR, "layers.0.q", (View(0, 4),), View(1, 2), (0, -1), (1,), (0.5,))
    slots = [Slot(SlotRows.TOKENS, 32), Slot(SlotRows.LOGITS, 9)]
    return Program(slots, [tensor], [op, op], MODEL, 1, KvFormat.I8)


def test_round_trip_and_alignment(tmp_path: Path) -> None:
    path = tmp_path / "model.plan"
    seen: list[tuple[str, int, int]] = []
    size = plan_writer.write_plan(path, small_program(), lambda *what: seen.append(what))
    plan = plan_reader.read_plan(path)
    assert size == path.stat().st_size == plan.file_bytes and seen[-1][0] == "w" and size % 64 == 0
    assert plan.model == MODEL and plan.logits_slot == 1 and plan.slots == small_program().slots
    assert (
        plan.ops
        == [
            Op(
                OpCode.LINEAR,
                "layers.0.q",
                (View(0, 4), View(), View()),
                View(1, 2),
                (0, -1),
                (1, 0, 0, 0, 0, 0),
                (0.5, 0),
            )
        ]
        * 2
    )
    tensor = plan.tensors[0]
    assert (tensor.name, tensor.rows, tensor.cols, tensor.group_size) == ("w", 6, 8, 8)
    assert tensor.outer_scale == 0.25 and plan.kv_format is KvFormat.I8
    np.testing.assert_array_equal(tensor.data, np.arange(64, dtype=np.uint8))
    np.testing.assert_array_equal(tensor.scales, np.arange(16, dtype=ml_dtypes.bfloat16))
    np.testing.assert_array_equal(tensor.zeros, np.arange(16, 32, dtype=np.float32))
    header = np.frombuffer(path.read_bytes()[:200], plan_file.HEADER)[0]
    for field in ("slots_offset", "tensors_offset", "ops_offset", "strings_offset", "data_offset"):
        assert header[field] % 64 == 0 and header[field] > 0


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_tensor_of_another_size_is_refused(tmp_path: Path, extra: int) -> None:
    with pytest.raises(BuildError, match="'w': data gave"):
        plan_writer.write_plan(tmp_path / "model.plan", small_program(extra))


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    path = tmp_path / "model.plan"
    plan_writer.write_plan(path, small_program())
    good = path.read_bytes()
    header = np.frombuffer(good[:200], plan_file.HEADER)[0]
    cases = {
        "first bytes differ": b"X" + good[1:],
        "format version 1": good[:8] + b"\1" + good[9:],
        "header's checksum": good[:100] + bytes([good[100] ^ 1]) + good[101:],
        "header says": good + b"\0" * 64,
        "fewer than the header": good[:60],
        "tables' checksum": good[: int(header["ops_offset"])]
        + b"\x55"
        + good[int(header["ops_offset"]) + 1 :],
    }
    for message, data in cases.items():
        path.write_bytes(data)
        with pytest.raises(EngineFileError, match=message):
            plan_reader.read_plan(path)
    with pytest.raises(EngineFileError, match="absent: is missing"):
        plan_reader.read_plan(tmp_path / "absent")


def signed(data: bytearray) -> bytes:
    """Return a plan with right checksums over whatever it holds."""
    header = np.frombuffer(data[:200], plan_file.HEADER)[0].copy()
    header["tables_crc32"] = zlib.crc32(bytes(data[200 : int(header["data_offset"])]))
    header["header_crc32"] = 0
    header["header_crc32"] = zlib.crc32(header.tobytes())
    return header.tobytes() + bytes(data[200:])


@settings(max_examples=300, deadline=None)
@given(at=st.integers(8, 1000), value=st.integers(0, 255), width=st.integers(1, 8))
def test_forged_plans_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int, width: int
) -> None:
    """Bytes changed and signed again: what is wrong is an EngineFileError, never another exception."""
    path = tmp_path_factory.getbasetemp() / "forged.plan"
    plan_writer.write_plan(path, small_program())
    data = bytearray(path.read_bytes())
    at = min(at, len(data) - width)
    data[at : at + width] = bytes([value]) * width
    path.write_bytes(signed(data))
    try:
        plan = plan_reader.read_plan(path)
    except EngineFileError as error:
        assert str(path) in str(error)
    else:
        assert plan.file_bytes == len(data)


def test_checksums_are_zlibs(tmp_path: Path) -> None:
    path = tmp_path / "model.plan"
    plan_writer.write_plan(path, small_program())
    data = path.read_bytes()
    header = np.frombuffer(data[:200], plan_file.HEADER)[0]
    assert zlib.crc32(data[200 : int(header["data_offset"])]) == int(header["tables_crc32"])
    assert zlib.crc32(data[:12] + b"\0\0\0\0" + data[16:200]) == int(header["header_crc32"])
