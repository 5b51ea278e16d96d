"""Every scheme in a plan: its codes as the checkpoint holds them, and its logits.

The chain of comparisons: the plan's tensors hold the checkpoint's codes and scales; the plan in numpy is ONNX Runtime
on the graph, so what comes before a product is right too; the core is the plan in numpy.
"""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from mixed_steps import BLOCK, NUM_BLOCKS, assert_close, run
from plan_interpreter import PlanInterpreter, dequantized
from plansmith.builder.graph import build_graph
from plansmith.builder.limits import make_limits
from plansmith.builder.precision import of_checkpoint
from plansmith.builder.scheme import KvFormat, QuantizedWeight, Scheme
from plansmith.builder.spec import DecoderSpec
from plansmith.builder.targets.cpu import compile_plan, packing, read_plan
from plansmith.builder.targets.cpu.plan_file import DType
from plansmith.builder.targets.cpu.plan_file import KvFormat as PlanKvFormat
from plansmith.builder.targets.cpu.plan_reader import PlanTensor
from plansmith.builder.targets.cpu.session import CpuSession
from plansmith.builder.targets.reference import ReferenceSession
from quantized_weights import SCHEMES, RandomQuantizedWeights, on_fp8_grid, quantization, quantized_spec
from quantized_weights import dequantized as graph_values
from tiny_graph import EVERYTHING, rope

LENGTHS, VOCAB = (10, 1, 10, 17), 96
STORED = {"int8": DType.I8, "int4": DType.I4, "fp8": DType.F8, "fp4": DType.F4}
FORMATS: list[tuple[str, KvFormat]] = [
    *((name, "float") for name in SCHEMES),
    ("fp8", "fp8"),
    ("int8_sq", "int8"),
]


class CountingWeights(RandomQuantizedWeights):
    """Weights that count how often each is unpacked."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.unpacked: collections.Counter[str] = collections.Counter()

    def quantized(self, name: str) -> QuantizedWeight:
        self.unpacked[name] += 1
        return super().quantized(name)


def graph_of(
    scheme: Scheme, kv: KvFormat = "float", spec: DecoderSpec | None = None
) -> tuple[ir.Model, CountingWeights, DecoderSpec]:
    spec = spec or quantized_spec(max_position_embeddings=64)
    held = quantization(spec, scheme, kv=kv)
    weights = CountingWeights(spec, held)
    limits = make_limits(64, tokens_per_block=BLOCK)
    return build_graph(spec, weights, of_checkpoint(held, "float16"), limits), weights, spec


def compiled(
    scheme: Scheme, path: Path, kv: KvFormat = "float", spec: DecoderSpec | None = None
) -> tuple[ir.Model, CountingWeights]:
    model, weights, spec = graph_of(scheme, kv, spec)
    limits = make_limits(64, max_batch_size=4, max_num_tokens=24, max_seq_len=64, tokens_per_block=BLOCK)
    compile_plan(model, spec, limits, path)
    return model, weights


def codes_and_scales(tensor: PlanTensor) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return a tensor's codes [N, K], scales and zero points [N, groups]."""
    has_zeros = bool(tensor.zeros.size)
    codes = packing.unpack(
        tensor.data, tensor.dtype, tensor.layout, tensor.rows, tensor.cols, zero_points=has_zeros
    )
    groups = tensor.cols // tensor.group_size if tensor.group_size else 1
    beside = [packing.unpack_scales(s, tensor.rows, groups) for s in (tensor.scales, tensor.zeros) if s.size]
    return codes, beside[0], beside[1] if has_zeros else None


@pytest.mark.parametrize("name", SCHEMES)
def test_a_plan_holds_the_checkpoints_codes_and_scales(name: str, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    _, weights = compiled(scheme, tmp_path / "p")
    tensors = {t.name: t for t in read_plan(tmp_path / "p").tensors}
    for product, parts in (("q|k|v", "qkv"), ("down", ["down"])):
        tensor = tensors[f"layers.1.{product}.weight"]
        held = [weights.quantized(f"layers.1.{part}.weight") for part in parts]
        codes, scales, zeros = codes_and_scales(tensor)
        assert scales.dtype == (ml_dtypes.float8_e4m3fn if scheme.weight == "fp4" else np.float32)
        assert tensor.dtype is (DType.F8 if scheme.fp8_grid else STORED[scheme.weight])
        if scheme.fp8_grid:
            assert tensor.group_size == 0
            grid = np.concatenate([np.full((len(one.codes), 1), one.scale_2, np.float32) for one in held])
            np.testing.assert_array_equal(scales, grid)
            wanted = np.concatenate([graph_values(one, scheme) for one in held])
            np.testing.assert_array_equal(codes * scales, wanted)
            continue
        np.testing.assert_array_equal(codes, np.concatenate([one.codes.astype(codes.dtype) for one in held]))
        by_row = [
            np.broadcast_to(one.scale.astype(np.float32).reshape(-1, 1), (len(one.codes), 1))
            if one.scale.ndim < 2
            else one.scale
            for one in held
        ]
        every = np.concatenate(by_row).astype(np.float32)
        np.testing.assert_array_equal(scales, np.repeat(every, scales.shape[1] // every.shape[1], axis=1))
        if scheme.zero_points:
            assert zeros is not None
            np.testing.assert_array_equal(
                zeros, np.concatenate([one.zero for one in held if one.zero is not None])
            )
        assert (zeros is None) is not scheme.zero_points
        assert tensor.outer_scale == np.float32(held[0].scale_2)
        assert scales.dtype.itemsize == (1 if scheme.weight == "fp4" else 4)


def rounds(name: str, kv: KvFormat) -> bool:
    return SCHEMES[name].input != "float" or kv != "float"


@pytest.mark.parametrize(("name", "kv"), FORMATS)
def test_the_plan_is_the_graph(name: str, kv: KvFormat, tmp_path: Path) -> None:
    model, _ = compiled(SCHEMES[name], tmp_path / "p", kv)
    plan, reference = PlanInterpreter(tmp_path / "p", NUM_BLOCKS), ReferenceSession(model, NUM_BLOCKS)
    got, wanted = (run(session, 0, LENGTHS, VOCAB) for session in (plan, reference))
    assert_close(got, wanted, rounds=rounds(name, kv))


@pytest.mark.parametrize("isa", [None, "portable"])
@pytest.mark.parametrize(("name", "kv"), FORMATS)
def test_the_core_is_the_plan(name: str, kv: KvFormat, isa: str | None, tmp_path: Path) -> None:
    compiled(SCHEMES[name], tmp_path / "p", kv)
    wanted = run(PlanInterpreter(tmp_path / "p", NUM_BLOCKS), 0, LENGTHS, VOCAB)
    with CpuSession(tmp_path / "p", NUM_BLOCKS, num_threads=2, isa=isa) as session:
        assert_close(run(session, 0, LENGTHS, VOCAB), wanted, rounds=rounds(name, kv))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["int4_awq", "int8_sq", "int8_row_groups", "w4a8", "nvfp4"])
def test_a_model_with_every_feature_takes_schemes_too(name: str, tied: bool, tmp_path: Path) -> None:
    """Biases, norms of heads, norms behind branches, soft caps, two rotary tables, a table that is the head too."""
    spec = quantized_spec(**{**EVERYTHING, "max_position_embeddings": 64, "tie_embeddings": tied})
    model, _ = compiled(SCHEMES[name], tmp_path / "p", "fp8", spec)
    wanted = run(ReferenceSession(model, NUM_BLOCKS), 0, LENGTHS, VOCAB)
    with CpuSession(tmp_path / "p", NUM_BLOCKS, num_threads=2) as session:
        assert_close(run(session, 0, LENGTHS, VOCAB), wanted, rounds=True)


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme("fp8", 16, input="fp8", input_group=16),
        Scheme("int4", 16, zero_points=True, pre_scale=True),
        Scheme("int4", 16, zero_points=True, fp8_grid=True),
        SCHEMES["int8_rows"],
        SCHEMES["nvfp4"],
    ],
    ids=["fp8", "zeros", "grid", "int8", "fp4"],
)
def test_widths_that_no_tile_divides(scheme: Scheme, tmp_path: Path) -> None:
    """q, k and v of 48, 24 and 24 columns, 51 logits: they meet inside a tile of 16 outputs."""
    fields = {
        "head_dim": 12,
        "ropes": (rope(12),),
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": 51,
    }
    spec = quantized_spec(**{"max_position_embeddings": 64, **fields})
    model, _ = compiled(scheme, tmp_path / "p", "int8", spec)
    wanted = run(ReferenceSession(model, NUM_BLOCKS), 0, LENGTHS, 51)
    with CpuSession(tmp_path / "p", NUM_BLOCKS) as session:
        assert_close(run(session, 0, LENGTHS, 51), wanted, rounds=True)


@pytest.mark.parametrize("name", ["w4a8", "nvfp4", "int4_awq_zeros"])
def test_the_same_checkpoint_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    for file in ("a", "b"):
        compiled(SCHEMES[name], tmp_path / file, "fp8")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_how_rows_are_batched_changes_no_bit(tmp_path: Path) -> None:
    for name in ("fp8", "nvfp4", "int8_sq"):
        compiled(SCHEMES[name], tmp_path / name, "int8")
        with CpuSession(tmp_path / name, NUM_BLOCKS, num_threads=2) as session:
            first, second = (run(session, seed, LENGTHS, VOCAB) for seed in (0, 1))
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("kv", "stored"), [("float", "F32"), ("fp8", "F8"), ("int8", "I8")])
def test_pools_are_in_the_header_and_their_scales_beside_attention(
    kv: KvFormat, stored: str, tmp_path: Path
) -> None:
    _, weights = compiled(SCHEMES["int8_wo"], tmp_path / "p", kv)
    plan = read_plan(tmp_path / "p")
    assert plan.kv_format is PlanKvFormat[stored]
    ops = [op for op in plan.ops if op.code.name == "PAGED_ATTENTION"]
    for layer, op in enumerate(ops):
        if kv == "float":
            assert op.tensors == (-1, -1)
        else:
            scales = plan.tensors[op.tensors[0]]
            assert (scales.dtype, scales.rows, scales.cols) == (DType.F32, 1, 2)
            np.testing.assert_array_equal(scales.data, np.array(weights.kv_scales(layer), np.float32))


class FineGrid(RandomQuantizedWeights):
    """W4A8 weights whose largest values lie beyond the grid."""

    def quantized(self, name: str) -> QuantizedWeight:
        made = super().quantized(name)
        return dataclasses.replace(made, scale_2=made.scale_2 / 3)


def test_weights_beyond_the_fp8_grid_saturate(tmp_path: Path) -> None:
    spec, scheme = quantized_spec(), SCHEMES["w4a8"]
    held, limits = quantization(spec, scheme), make_limits(64)
    weights = FineGrid(spec, held)
    compile_plan(
        build_graph(spec, weights, of_checkpoint(held, "float32"), limits), spec, limits, tmp_path / "p"
    )
    tensor = next(t for t in read_plan(tmp_path / "p").tensors if t.name == "layers.0.o.weight")
    codes, grid, _ = codes_and_scales(tensor)
    assert np.abs(codes).max() == 448
    np.testing.assert_array_equal(codes * grid, graph_values(weights.quantized(tensor.name), scheme))


def test_codes_of_the_fp8_grid_are_those_of_quantize_linear(tmp_path: Path) -> None:
    """Against ONNX Runtime, on grids of any fineness: values beyond the grid saturate."""
    ort = pytest.importorskip("onnxruntime")
    _, weights = compiled(SCHEMES["w4a8"], tmp_path / "p")
    tensor = next(t for t in read_plan(tmp_path / "p").tensors if t.name == "layers.0.o.weight")
    codes, grid, _ = codes_and_scales(tensor)
    plain = Scheme("int4", 32)
    values = graph_values(weights.quantized("layers.0.o.weight"), plain)
    for scale in (grid[0, 0], np.float32(1e-4)):
        x = ir.Value(name="x", shape=ir.Shape(values.shape), type=ir.TensorType(ir.DataType.FLOAT))
        zero = ir.tensor(np.zeros((), ir.DataType.FLOAT8E4M3FN.numpy()), name="zero")
        held = [ir.Value(name=t.name, const_value=t) for t in (ir.tensor(np.array(scale), name="s"), zero)]
        q = ir.node("QuantizeLinear", [x, *held])
        back = ir.node("DequantizeLinear", [q.outputs[0], *held])
        back.outputs[0].name = "y"
        graph = ir.Graph([x], back.outputs, nodes=[q, back], initializers=held, opset_imports={"": 23})
        ir.save(ir.Model(graph, ir_version=10), tmp_path / "q.onnx")
        (wanted,) = ort.InferenceSession(tmp_path / "q.onnx").run(None, {"x": values})
        np.testing.assert_array_equal(on_fp8_grid(values, float(scale)), wanted)
        if scale == grid[0, 0]:
            np.testing.assert_array_equal(codes * grid, wanted)


@pytest.mark.parametrize("name", ["fp8", "int4_awq_zeros", "w4a8", "nvfp4"])
def test_a_weight_is_unpacked_once_for_its_codes_and_scales(name: str, tmp_path: Path) -> None:
    _, weights = compiled(SCHEMES[name], tmp_path / "p")
    # FP4's outer scale decides which products are one, before anything is written.
    assert set(weights.unpacked.values()) == {2 if name == "nvfp4" else 1}
    assert len(weights.unpacked) == 15


def test_float16_weights_take_two_bytes(tmp_path: Path) -> None:
    spec = quantized_spec()
    held = quantization(spec, SCHEMES["int8_wo"])
    some = type(held)(held.name, held.producer, held.schemes[:1])
    weights = RandomQuantizedWeights(spec, some)
    limits = make_limits(64)
    stats = compile_plan(
        build_graph(spec, weights, of_checkpoint(some, "float16"), limits), spec, limits, tmp_path / "p"
    )
    tensors = {t.name: t for t in read_plan(tmp_path / "p").tensors}
    for name, packed in (("layers.1.down", True), ("embed", False)):
        tensor = tensors[f"{name}.weight"]
        assert tensor.dtype is DType.F16 and tensor.data.nbytes == 2 * tensor.rows * tensor.cols
        assert (tensor.layout is packing.PACKED[DType.F16]) is packed
        np.testing.assert_array_equal(dequantized(tensor), weights.get(tensor.name).astype(np.float16))
    assert set(stats["bytes_by_dtype"]) == {"f32", "f16", "i8"}
