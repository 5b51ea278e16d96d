"""Rounding in ONNX Runtime against ml_dtypes and numpy, number by number: ties, ends, zeros, NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import pytest
from plansmith.builder.batch import BatchPlanner, PlannedStep
from plansmith.builder.graph import build_graph, contract
from plansmith.builder.limits import make_limits
from plansmith.builder.precision import of_checkpoint, precision
from plansmith.builder.scheme import KvFormat
from plansmith.builder.targets.reference import ReferenceSession
from plansmith.builder.targets.reference.rounding import round_input, to_e2m1, to_e4m3, to_float16, to_int8
from plansmith.builder.targets.reference.tape import Tape
from plansmith.plugins.paged_attention.reference import quantize_kv
from quantized_weights import SCHEMES, RandomQuantizedWeights, quantization, quantized_spec

F32 = ir.DataType.FLOAT
Array = npt.NDArray[Any]


def run(lower: Callable[[Tape, ir.Value], ir.Value], x: Array, **others: Array) -> Array:
    """Return what ONNX Runtime makes of the nodes that `lower` writes, as the session runs them."""
    value = ir.Value(name="x", shape=ir.Shape(x.shape), type=ir.TensorType(ir.DataType.from_numpy(x.dtype)))
    consts: dict[str, ir.Value] = {}
    tape = Tape("t", consts)
    out = lower(tape, value)
    out.type, out.shape = ir.TensorType(value.dtype), value.shape
    inputs = list(consts.values())
    graph = ir.Graph([value], [out], nodes=tape.nodes, initializers=inputs, opset_imports={"": 24}, name="t")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    model = ir.to_proto(ir.Model(graph, ir_version=11)).SerializeToString()
    session = ort.InferenceSession(model, options, ["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]  # type: ignore[no-any-return]


def hostile(dtype: Any) -> Array:
    """All finite numbers of an 8- or 4-bit type, the ties between neighbours, floats beside those, and the ends."""
    bits = np.arange(256 if np.dtype(dtype) != ml_dtypes.float4_e2m1fn else 16, dtype=np.uint8)
    numbers = bits.view(dtype).astype(np.float32)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    ties = (numbers[1:] + numbers[:-1]) / 2
    beside = [np.nextafter(ties, np.float32(sign * np.inf)) for sign in (1, -1)]
    ends = numbers.max() * np.float32([1.01, 1.2, 2.0, 1e30])
    tiny = np.float32([0.0, 1e-45, 1e-38, 1e-9])
    return np.concatenate([numbers, ties, *beside, ends, -ends, tiny, -tiny, np.float32([np.nan])])


def saturated(x: Array, dtype: Any) -> Array:
    """Return x rounded by ml_dtypes after clipping."""
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -largest, largest).astype(dtype).astype(np.float32)  # type: ignore[no-any-return]


def test_e4m3_rounds_as_ml_dtypes_does() -> None:
    x = hostile(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(run(to_e4m3, x), saturated(x, ml_dtypes.float8_e4m3fn))


def test_e2m1_rounds_as_ml_dtypes_does() -> None:
    x = hostile(ml_dtypes.float4_e2m1fn)
    found = run(to_e2m1, x)
    np.testing.assert_array_equal(found[:-1], saturated(x[:-1], ml_dtypes.float4_e2m1fn))
    assert np.isnan(found[-1])  # E2M1 has none; a NaN must not become a number


@pytest.mark.parametrize("lowest", [-127.0, -128.0])
def test_int8_rounds_to_even_and_saturates(lowest: float) -> None:
    whole = np.arange(-140, 141, dtype=np.float32)
    x = np.concatenate([whole, whole + 0.5, np.float32([1e30, -1e30, np.inf, -np.inf, np.nan, -0.0])])
    found = run(lambda t, v: to_int8(t, v, lowest), x)
    np.testing.assert_array_equal(found, np.clip(np.rint(x), lowest, 127))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_static_rounding_is_that_of_the_scheme(kind: str) -> None:
    dtype = {"int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn}[kind]
    scale = np.float32(0.037)
    x = np.random.default_rng(2).standard_normal(1000).astype(np.float32) * scale * 200
    x[:6] = np.float32([0, 0.5, 1.5, -2.5, 1e6, -1e6]) * scale

    def lower(t: Tape, value: ir.Value) -> ir.Value:
        zero = t._const(f"zero.{kind}", np.zeros((), dtype))
        codes = t.op("QuantizeLinear", value, t.number(float(scale)), zero)
        return t.op("DequantizeLinear", codes, t.number(float(scale)), zero)

    ratio = x / scale
    codes = np.clip(np.rint(ratio), -128, 127) if kind == "int8" else saturated(ratio, dtype)
    np.testing.assert_array_equal(run(lower, x), codes * scale)


def round_numpy(x: Array, kind: str, group: int, outer: np.float32) -> Array:
    """RoundInput of contract.py in numpy, group by group."""
    rows = x.astype(np.float32)
    out = np.empty_like(rows)
    width = group or x.shape[1]
    for t in range(x.shape[0]):
        for at in range(0, x.shape[1], width):
            part = rows[t, at : at + width]
            top = np.abs(part).max()
            if kind == "fp4":
                s = saturated(top / (np.float32(6) * outer), ml_dtypes.float8_e4m3fn) * outer
            else:
                s = top / np.float32(127 if kind == "int8" else 448)
            with np.errstate(invalid="ignore", divide="ignore"):
                ratio = part / s
            if s == 0:
                rounded = np.zeros_like(part)
            elif kind == "int8":
                rounded = np.clip(np.rint(ratio), -127, 127)
            else:
                rounded = saturated(
                    ratio, ml_dtypes.float8_e4m3fn if kind == "fp8" else ml_dtypes.float4_e2m1fn
                )
            out[t, at : at + width] = rounded * s
    return out.astype(x.dtype)


def rounded(x: Array, kind: str, group: int, outer: np.float32) -> Array:
    def lower(t: Tape, value: ir.Value) -> ir.Value:
        out = ir.Value(name="rounded", type=ir.TensorType(value.dtype))
        inputs = [value, t.number(float(outer))] if kind == "fp4" else [value]
        attributes = {"format": kind, "group": group}
        return round_input(
            t, ir.node("RoundInput", inputs, attributes, domain=contract.OP_DOMAIN, outputs=[out])
        )

    return run(lower, x)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("kind", "group"), [("int8", 0), ("int8", 32), ("fp8", 0), ("fp8", 32), ("fp4", 16)])
def test_round_input_is_the_contract(kind: str, group: int, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 64)) * np.exp(rng.uniform(-6, 6, (60, 1)))
    x[0], x[1, :32] = 0, 0  # a row, then a group, without a scale
    x[2] = np.tile([127, 2.5, 3.5, -0.5], 16)  # ties at s = 1
    x[3] = np.tile([448, 17, 19, 0.0009765625], 16)
    x[4] = np.tile([6, 0.25, 0.75, -5, 2.5, 3.5, 1.25, 1.75], 8)
    x[5] *= 1e-30 if dtype is np.float32 else 1e-7
    x = x.astype(dtype)
    outer = np.float32(1.0 if dtype is np.float16 else 0.37)
    found = rounded(x, kind, group, outer)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, round_numpy(x, kind, group, outer))
    assert not np.array_equal(found, x)


@pytest.mark.parametrize(("kind", "group"), [("int8", 0), ("fp8", 32), ("fp4", 16)])
def test_nan_in_an_input_stays_and_reaches_no_other_row(kind: str, group: int) -> None:
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    x[1, 5] = np.nan
    found = rounded(x, kind, group, np.float32(1))
    assert np.isnan(found[1, 5]) and np.isfinite(found[[0, 2]]).all()


SPEC = quantized_spec()
LIMITS = make_limits(128, max_seq_len=64, tokens_per_block=8)
BLOCKS = 24


def graph_of(name: str, kv: KvFormat = "float") -> tuple[ir.Model, RandomQuantizedWeights]:
    held = quantization(SPEC, SCHEMES[name], kv=kv)
    weights = RandomQuantizedWeights(SPEC, held)
    return build_graph(SPEC, weights, of_checkpoint(held, "float32"), LIMITS), weights


def steps() -> list[PlannedStep]:
    rng = np.random.default_rng(3)
    seqs = [rng.integers(0, SPEC.vocab_size, n).tolist() for n in (21, 9, 1)]
    return list(
        BatchPlanner(seqs, num_blocks=BLOCKS, tokens_per_block=8, max_blocks_per_seq=8, max_num_tokens=16)
    )


@pytest.mark.parametrize("name", [n for n, one in SCHEMES.items() if one.input == "float"])
def test_weights_alone_are_those_the_codes_mean(name: str) -> None:
    graph, weights = graph_of(name)
    plain = build_graph(SPEC, weights, precision("fp32"), LIMITS)
    found, wanted = ReferenceSession(graph, BLOCKS), ReferenceSession(plain, BLOCKS)
    for step in steps():
        # The order of factors differs: pre_scale meets the input in one and the weight in the other.
        np.testing.assert_allclose(found.step(step.batch), wanted.step(step.batch), atol=1e-4)


@pytest.mark.parametrize("name", [n for n, one in SCHEMES.items() if one.input != "float"])
def test_rounding_moves_logits_by_about_its_noise(name: str) -> None:
    graph, weights = graph_of(name)
    plain = build_graph(SPEC, weights, precision("fp32"), LIMITS)
    found, wanted = ReferenceSession(graph, BLOCKS), ReferenceSession(plain, BLOCKS)
    apart = [np.abs(found.step(s.batch) - wanted.step(s.batch)).mean() for s in steps()]
    # Logits are near 1. Scales of the inputs' own size round a little; the static ones here clip a good part.
    limit = 1.0 if SCHEMES[name].is_static and SCHEMES[name].input != "fp4" else 0.4
    assert 1e-4 < np.mean(apart) < limit, np.mean(apart)


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_quantized_pools_hold_saturated_codes_and_attention_sees_them(kv: KvFormat) -> None:
    graph, weights = graph_of("int8_wo", kv)
    plain, _ = graph_of("int8_wo")
    found, wanted = ReferenceSession(graph, BLOCKS), ReferenceSession(plain, BLOCKS)
    apart = [np.abs(found.step(s.batch) - wanted.step(s.batch)).mean() for s in steps()]
    assert 1e-4 < np.mean(apart) < 0.1, np.mean(apart)
    for side, name in enumerate((contract.k_pool(0), contract.v_pool(0))):  # what layer 0 writes is exact
        codes, values = found.pool(name), wanted.pool(name)
        scale = np.float32(weights.kv_scales(0)[side])
        expected = (
            saturated(values / scale, ml_dtypes.float8_e4m3fn)
            if kv == "fp8"
            else np.clip(np.rint(values / scale), -128, 127)
        )
        np.testing.assert_array_equal(codes, expected)
        assert codes.dtype == np.float32 and np.isnan(codes).any() and np.isfinite(codes).any()


def test_float16_pools_hold_rounded_values_and_infinities() -> None:
    held = quantization(SPEC, SCHEMES["int8_wo"])
    recipe = of_checkpoint(held, "float32").on_cpu()
    assert recipe.kv == "float16"
    graph = build_graph(SPEC, RandomQuantizedWeights(SPEC, held), recipe, LIMITS)
    plain, _ = graph_of("int8_wo")
    found, wanted = ReferenceSession(graph, BLOCKS), ReferenceSession(plain, BLOCKS)
    apart = [np.abs(found.step(s.batch) - wanted.step(s.batch)).mean() for s in steps()]
    assert 1e-6 < np.mean(apart) < 1e-3, np.mean(apart)
    for name in (contract.k_pool(0), contract.v_pool(0)):
        np.testing.assert_array_equal(found.pool(name), wanted.pool(name).astype(np.float16))


def test_what_float16_cannot_hold() -> None:
    given = np.array([1e30, -65520, 65519, 1 / 3, 3e-8, np.inf, -np.inf, np.nan], np.float32)
    half = np.float32(np.float16(1 / 3))
    wanted = [65504, -65504, 65504, half, 2.0**-24, np.inf, -np.inf, np.nan]
    np.testing.assert_array_equal(run(to_float16, given), np.array(wanted, np.float32))
    np.testing.assert_array_equal(quantize_kv(given, 1.0, "float16"), np.array(wanted, np.float32))


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_quantized_pools_saturate(kv: KvFormat) -> None:
    graph, _ = graph_of("int8_wo", kv)
    for name, value in graph.graph.initializers.items():
        if name.endswith((".k_scale", ".v_scale")):
            value.const_value = ir.Tensor(np.array(1e-3, np.float32), name=name)
    session = ReferenceSession(graph, BLOCKS)
    for step in steps():
        assert np.isfinite(session.step(step.batch)).all()
    codes = session.pool(contract.k_pool(0))
    assert (np.nanmin(codes), np.nanmax(codes)) == ((-448, 448) if kv == "fp8" else (-128, 127))


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_cutting_does_not_matter_with_quantized_pools(kv: KvFormat) -> None:
    graph, _ = graph_of("fp8_rows", kv)
    session = ReferenceSession(graph, BLOCKS)
    seqs = [np.random.default_rng(5).integers(0, SPEC.vocab_size, n).tolist() for n in (20, 9)]
    seen: dict[tuple[int, int], Array] = {}
    plan = {"num_blocks": BLOCKS, "tokens_per_block": 8, "max_blocks_per_seq": 8}
    for cut in ({}, {"max_num_tokens": 5}):
        for step in BatchPlanner(seqs, seed=len(cut), **plan, **cut):
            for row, key in zip(session.step(step.batch), step.rows, strict=True):
                # Sums in another order can move a code: a rounding step, not a wrong page.
                assert np.abs(row - seen.setdefault(key, row)).mean() < 0.05
    assert len(seen) == 29
