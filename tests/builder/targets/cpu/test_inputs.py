"""What comes before a product in the program: factors and rounding, shared, in place or left to the product."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from plansmith.builder.scheme import FLOAT, QuantizedInput, QuantizedWeight, Scheme
from plansmith.builder.targets.cpu.lowering import lower
from plansmith.builder.targets.cpu.plan_file import (
    LinearInput,
    Op,
    OpCode,
    Program,
    RoundFormat,
    SlotRows,
)
from quantized_weights import SCHEMES, RandomQuantizedWeights, quantization, quantized_spec
from scheme_graphs import graph_of

FLOAT_IN, ROW, GROUP, STATIC, F8_ROW, F8_GROUP, F8_STATIC = LinearInput


def program_of(*args: Any, **fields: Any) -> Program:
    return lower(*graph_of(*args, **fields))


def layer(program: Program, number: int = 0) -> list[str]:
    """Return the ops of a layer, or what concerns its products."""
    known = ("LINEAR", "ROUND_INPUT", "MUL_VECTOR")
    return [
        f"{op.code.name} {op.name.removeprefix(f'layers.{number}.')}"
        for op in program.ops
        if op.name.startswith(f"layers.{number}.") and op.code.name in known
    ]


def by_name(program: Program) -> dict[str, Op]:
    return {op.name: op for op in program.ops}


# name of a scheme: how products take their input, the group size of their tensors, format and group of rounding
KINDS: dict[str, tuple[LinearInput, int, tuple[RoundFormat, int] | None]] = {
    "int8_wo": (FLOAT_IN, 0, None),
    "int8_groups": (FLOAT_IN, 32, None),
    "int4_32": (FLOAT_IN, 32, None),
    "int4_64": (FLOAT_IN, 64, None),
    "int4_128": (FLOAT_IN, 128, None),
    "int4_outputs": (FLOAT_IN, 0, None),
    "int4_zeros": (FLOAT_IN, 32, None),
    "int4_awq": (FLOAT_IN, 32, None),
    "int4_awq_zeros": (FLOAT_IN, 64, None),
    "int8_sq": (STATIC, 0, None),
    "int8_static": (STATIC, 0, None),
    "int8_rows": (ROW, 0, None),
    "int8_row_groups": (GROUP, 32, None),
    "int4_int8_rows": (ROW, 32, None),
    "int4_int8_groups": (GROUP, 32, None),
    "fp8_wo": (FLOAT_IN, 0, None),
    "fp8": (F8_STATIC, 0, None),
    "fp8_rows": (F8_ROW, 0, None),
    "fp8_blocks": (F8_GROUP, 32, None),
    "fp8_blocks_128": (F8_GROUP, 128, None),
    "w4a8": (F8_STATIC, 0, None),
    "nvfp4_wo": (FLOAT_IN, 16, None),
    "nvfp4": (FLOAT_IN, 16, (RoundFormat.F4, 16)),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_products_share_what_comes_before_them(name: str) -> None:
    scheme, (kind, group, rounding) = SCHEMES[name], KINDS[name]
    program = program_of(scheme)
    wanted = []
    for first, product in (("q", "q|k|v"), ("o", "o"), ("gate", "gate|up"), ("down", "down")):
        wanted += [f"MUL_VECTOR {first}/pre_scale"] if scheme.pre_scale else []
        if rounding:
            wanted += [f"ROUND_INPUT {first}/{'input_q' if rounding[1] == -1 else 'round'}"]
        wanted += [f"LINEAR {product}"]
    assert layer(program) == layer(program, 1) == wanted
    calibrated = RandomQuantizedWeights(quantized_spec(), quantization(quantized_spec(), scheme))
    scale = np.float32(calibrated.quantized_input("layers.0.k.weight").scale)
    op = by_name(program)["layers.0.q|k|v"]
    assert op.i[1] == kind and program.tensors[op.tensors[0]].group_size == group
    assert op.f == (pytest.approx(scale) if kind in (STATIC, F8_STATIC) else 0.0,)
    for op in program.ops:
        if op.code is OpCode.ROUND_INPUT:
            assert rounding is not None and op.i[1:] == rounding
    if rounding is not None:
        found = by_name(program)[f"layers.0.q/{'input_q' if rounding[1] == -1 else 'round'}"]
        assert found.i[0] == 128 and found.f == (pytest.approx(scale) if scheme.is_static else 1.0,)


def test_only_what_all_products_can_round_is_left_to_them() -> None:
    rows = Scheme("int8", input="int8", input_group=0)
    coarse = Scheme("int8", 32, input="int8", input_group=64)  # one input scale for two of the weight's
    fine = Scheme("int4", 64, input="int8", input_group=32)
    whole = Scheme("int4", 32, input="int8", input_group=128)  # all columns of q's input
    f8 = Scheme("fp8", 128, input="fp8", input_group=32)
    zeros = Scheme("int4", 32, zero_points=True, input="int8", input_group=0)
    cases = {
        "coarse": ({"q": coarse}, ["ROUND_INPUT q/round", "LINEAR q", "LINEAR k|v"], FLOAT_IN, 32),
        "fine": ({"q": fine}, ["LINEAR q", "LINEAR k|v"], GROUP, 32),
        "whole": ({"q": whole}, ["LINEAR q", "LINEAR k|v"], ROW, 32),
        "f8": ({"q": f8, "k": f8, "v": f8}, ["LINEAR q|k|v"], F8_GROUP, 32),
        "zeros": ({"q": zeros}, ["ROUND_INPUT q/round", "LINEAR q", "LINEAR k|v"], FLOAT_IN, 32),
        "mixed": (
            {"q": rows, "k": zeros, "v": rows},
            ["ROUND_INPUT q/round", "LINEAR q|v", "LINEAR k"],
            FLOAT_IN,
            0,
        ),
    }
    for schemes, wanted, kind, group in cases.values():
        program = program_of(schemes)
        assert layer(program)[: len(wanted)] == wanted
        op = next(op for op in program.ops if op.code is OpCode.LINEAR)
        assert op.i[1] == kind and program.tensors[op.tensors[0]].group_size == group


def test_each_layer_has_a_scheme_of_its_own() -> None:
    program = program_of({"q": SCHEMES["fp8"], "k": SCHEMES["fp8"], "v": FLOAT, "down": SCHEMES["nvfp4"]})
    wanted = """LINEAR q+k|LINEAR v|LINEAR o|LINEAR gate+up|ROUND_INPUT down/round|LINEAR down"""
    assert layer(program) == [line.replace("+", "|") for line in wanted.split("|")]


class UnequalOuterScales(RandomQuantizedWeights):
    """FP4 weights whose k has another outer scale than its q and v."""

    def quantized(self, name: str) -> QuantizedWeight:
        made = super().quantized(name)
        return dataclasses.replace(made, scale_2=made.scale_2 * (2 if name.endswith("k.weight") else 1))


class UnequalInputs(RandomQuantizedWeights):
    """Products whose v was calibrated apart."""

    def quantized_input(self, name: str) -> QuantizedInput:
        made = super().quantized_input(name)
        return dataclasses.replace(made, scale=made.scale * (2 if name.endswith("v.weight") else 1))


def test_what_one_tensor_or_one_input_cannot_hold_stays_apart() -> None:
    assert layer(program_of(SCHEMES["nvfp4_wo"], UnequalOuterScales))[:2] == ["LINEAR q|v", "LINEAR k"]
    lines = layer(program_of(SCHEMES["fp8"], UnequalInputs))
    assert lines[:2] == ["LINEAR q|k", "LINEAR v"]
    assert layer(program_of(SCHEMES["int8_static"], UnequalInputs))[:2] == ["LINEAR q|k", "LINEAR v"]


@pytest.mark.parametrize(
    "name", ["int8_wo", "int8_static", "int8_rows", "int4_int8_groups", "fp8", "fp8_blocks"]
)
def test_inputs_that_nothing_changed_are_told_once(name: str) -> None:
    assert all(len(op.ins) == 1 for op in program_of(SCHEMES[name]).ops if op.code is OpCode.LINEAR)


@pytest.mark.parametrize("name", ["int8_sq", "w4a8", "nvfp4", "fp8_rows"])
def test_the_last_layers_inputs_are_rounded_for_the_wanted_rows_alone(name: str) -> None:
    program = program_of(SCHEMES[name])
    gather = OpCode.GATHER_ROWS
    rows = {op.name: program.slots[op.out.slot].rows for op in program.ops if op.code is not gather}
    before = [op for op in rows if op.startswith(("layers.1.o", "layers.1.gate", "layers.1.down", "lm_head"))]
    assert before and all(rows[op] is SlotRows.LOGITS for op in before)
    assert all(rows[op] is SlotRows.TOKENS for op in rows if op.startswith(("layers.0.", "layers.1.q")))


def test_a_weight_of_two_products_that_round_differently_is_two_tensors() -> None:
    model, header = graph_of(SCHEMES["int8_row_groups"])
    nodes = {node.name: node for node in model.graph}
    nodes["layers.1.o/matmul"].replace_input_with(1, nodes["layers.0.o/matmul"].inputs[1])
    nodes["layers.1.o/round"].attributes.update({"group": ir.AttrInt64("group", 64)})
    program = lower(model, header)
    first, second = (by_name(program)[f"layers.{n}.o"].tensors[0] for n in (0, 1))
    assert [program.tensors[n].group_size for n in (first, second)] == [32, 64]
