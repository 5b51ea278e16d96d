"""One PagedAttention at a time: the ONNX lowering against the float64 reference, over hostile pools."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plansmith.builder.graph import contract
from plansmith.builder.targets.reference import lower
from plansmith.plugins.paged_attention.reference import paged_attention, quantize_kv
from plansmith.runtime.errors import UnsupportedError

D, BS = 8, 4


def one_op(attrs: dict[str, Any], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Model:
    """A graph of one PagedAttention whose q, k and v are inputs."""
    h, kvh = attrs["num_heads"], attrs["kv_num_heads"]
    pool = ["num_blocks", kvh, BS, D]

    def value(name: str, shape: list[Any], kind: ir.DataType = dtype) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))

    i32 = ir.DataType.INT32
    ids = value(contract.INPUT_IDS, ["T"], i32)
    op_inputs = [
        value("q", ["T", h * D]),
        value("k", ["T", kvh * D]),
        value("v", ["T", kvh * D]),
        value(contract.k_pool(0), pool),
        value(contract.v_pool(0), pool),
        value(contract.CU_QUERY_LENS, ["B1"], i32),
        value(contract.KV_LENS, ["B"], i32),
        value(contract.BLOCK_TABLE, ["B", "MB"], i32),
    ]
    outs = [
        value("out", ["T", h * D]),
        value(contract.k_pool_out(0), pool),
        value(contract.v_pool_out(0), pool),
    ]
    node = ir.node(
        contract.PAGED_ATTENTION, op_inputs, attrs, domain=contract.OP_DOMAIN, outputs=outs, name="attn"
    )
    opsets = {"": 24, contract.OP_DOMAIN: 1}
    graph = ir.Graph([ids, *op_inputs], outs, nodes=[node], opset_imports=opsets, name="one_op")
    return ir.Model(graph, ir_version=11)


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])
    return session.run(None, feeds)  # type: ignore[no-any-return]


def hostile_step(
    rng: np.random.Generator, chunks: list[tuple[int, int]], h: int, kvh: int, dtype: Any
) -> Any:
    """A step of (past, new) sequences over scattered blocks; every row that no sequence holds is NaN or inf."""
    num_blocks = sum(-(-(past + new) // BS) for past, new in chunks) + 3
    free = rng.permutation(num_blocks).tolist()
    columns = max(-(-(past + new) // BS) for past, new in chunks) + 2
    table = np.full((len(chunks), columns), -1, np.int32)
    pools = [np.full((num_blocks, kvh, BS, D), np.nan, dtype) for _ in range(2)]
    pools[1][::2] = np.inf
    for b, (past, new) in enumerate(chunks):
        used = -(-(past + new) // BS)
        table[b, :used] = [free.pop() for _ in range(used)]
        for pos in range(past):
            for pool in pools:
                pool[table[b, pos // BS], :, pos % BS] = rng.standard_normal((kvh, D))
    new_lens = [new for _, new in chunks]
    t = sum(new_lens)
    q, k, v = (rng.standard_normal((t, n * D)).astype(dtype) for n in (h, kvh, kvh))
    cu = np.cumsum([0, *new_lens]).astype(np.int32)
    kv_lens = np.array([past + new for past, new in chunks], np.int32)
    return q, k, v, *pools, cu, kv_lens, table


def compare(
    seed: int, chunks: list[tuple[int, int]], attrs: dict[str, Any], dtype: Any, tolerance: float
) -> None:
    rng = np.random.default_rng(seed)
    args = hostile_step(rng, chunks, attrs["num_heads"], attrs["kv_num_heads"], dtype)
    wanted, k_pool, v_pool = paged_attention(*args, **attrs)
    model = lower(one_op(attrs, ir.DataType.from_numpy(np.dtype(dtype))))
    names = ["q", "k", "v", contract.k_pool(0), contract.v_pool(0)]
    names += [contract.CU_QUERY_LENS, contract.KV_LENS, contract.BLOCK_TABLE]
    feeds = {**dict(zip(names, args, strict=True)), contract.INPUT_IDS: np.zeros(len(args[0]), np.int32)}
    out, k_out, v_out = run(model, feeds)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, wanted, atol=tolerance)
    np.testing.assert_array_equal(k_out, k_pool)  # every row: what was to be written and what was to be left
    np.testing.assert_array_equal(v_out, v_pool)


def quantized_op(attrs: dict[str, Any], kv: str, scales: tuple[float, float]) -> ir.Model:
    """The same graph with FP8 or INT8 pools and their scales, or FLOAT16 pools, which have none."""
    model = one_op(attrs)
    kind = {"float16": ir.DataType.FLOAT16, "fp8": ir.DataType.FLOAT8E4M3FN, "int8": ir.DataType.INT8}[kv]
    node = next(iter(model.graph))
    for value in (*node.inputs[3:5], *node.outputs[1:]):
        assert value is not None
        value.type = ir.TensorType(kind)
    if kv == "float16":
        return model
    for at, (name, scale) in enumerate(zip(("k_scale", "v_scale"), scales, strict=True), 8):
        value = ir.Value(name=name, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.FLOAT))
        value.const_value = ir.Tensor(np.array(scale, np.float32), name=name)
        model.graph.register_initializer(value)
        node.resize_inputs(at + 1)
        node.replace_input_with(at, value)
    return model


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 999),
    chunks=st.lists(st.tuples(st.integers(0, 13), st.integers(1, 9)), min_size=1, max_size=4),
    kv=st.sampled_from(["float16", "fp8", "int8"]),
    softcap=st.sampled_from([0.0, 1.5]),
    window=st.sampled_from([0, 4]),
)
def test_quantized_pools_are_the_reference_s(
    seed: int, chunks: list[tuple[int, int]], kv: Any, softcap: float, window: int
) -> None:
    rng = np.random.default_rng(seed)
    attrs = attributes(6, 2, softcap, window)
    q, k, v, k_pool, v_pool, *rest = hostile_step(rng, chunks, 6, 2, np.float32)
    limit = {"float16": 1, "fp8": 448, "int8": 127}[kv]
    scales = (2.0 / limit, 3.0 / limit)  # of numbers up to 3 and more: some saturate
    if kv == "float16":
        scales = (1.0, 1.0)
        v[rng.random(v.shape) < 0.05] = 1e5
    pools = []
    for pool, scale in ((k_pool, scales[0]), (v_pool, scales[1])):
        held = np.isfinite(pool)
        pools.append(
            np.where(held, quantize_kv(np.where(held, pool, 0), scale, kv), np.nan).astype(np.float32)
        )
    extra = {"kv": kv, "k_scale": scales[0], "v_scale": scales[1]}
    wanted, k_wanted, v_wanted = paged_attention(q, k, v, *pools, *rest, **attrs, **extra)
    names = ["q", "k", "v", contract.k_pool(0), contract.v_pool(0)]
    names += [contract.CU_QUERY_LENS, contract.KV_LENS, contract.BLOCK_TABLE]
    feeds = {
        **dict(zip(names, (q, k, v, *pools, *rest), strict=True)),
        contract.INPUT_IDS: np.zeros(len(q), np.int32),
    }
    out, k_out, v_out = run(lower(quantized_op(attrs, kv, scales)), feeds)
    np.testing.assert_allclose(out, wanted, atol=1e-5, rtol=1e-6)
    np.testing.assert_array_equal(k_out, k_wanted)
    np.testing.assert_array_equal(v_out, v_wanted)


def attributes(h: int, kvh: int, softcap: float, window: int) -> dict[str, Any]:
    return {
        "num_heads": h,
        "kv_num_heads": kvh,
        "head_dim": D,
        "scale": 0.6,
        "softcap": softcap,
        "window": window,
    }


CHUNKS = st.lists(st.tuples(st.integers(0, 13), st.integers(1, 9)), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    chunks=CHUNKS,
    heads=st.sampled_from([(4, 4), (6, 2), (3, 1)]),
    softcap=st.sampled_from([0.0, 1.5]),
    window=st.sampled_from([0, 1, 4, 7]),
)
def test_lowering_is_the_reference(
    seed: int, chunks: list[tuple[int, int]], heads: tuple[int, int], softcap: float, window: int
) -> None:
    compare(seed, chunks, attributes(*heads, softcap, window), np.float32, 2e-6)


def test_lowering_in_float16() -> None:
    compare(0, [(5, 3), (0, 1), (12, 1)], attributes(6, 2, 0.0, 4), np.float16, 2e-3)


def test_the_original_model_is_left_alone_and_windows_share_a_mask() -> None:
    from plansmith.builder.graph import build_graph
    from plansmith.builder.limits import make_limits
    from plansmith.builder.precision import precision
    from plansmith.builder.spec import LayerSpec
    from tiny_graph import RandomWeights, tiny_spec

    spec = tiny_spec(num_layers=4, layers=(LayerSpec(), LayerSpec(window=8)) * 2)
    weights = RandomWeights(spec)
    model = build_graph(spec, weights, precision("fp32"), make_limits(64))
    before = str(model)
    lowered = lower(model)
    assert str(model) == before and weights.reads == []
    assert {n.domain for n in lowered.graph} == {""} and contract.OP_DOMAIN not in lowered.opset_imports
    assert [v.name for v in lowered.graph.outputs] == [v.name for v in model.graph.outputs]
    assert (
        sum(n.op_type == "And" for n in lowered.graph) == 3
    )  # all: one; window 8: two; not one for each layer


def test_bfloat16_graphs_are_refused() -> None:
    from plansmith.builder.graph import build_graph
    from plansmith.builder.limits import make_limits
    from plansmith.builder.precision import precision
    from tiny_graph import RandomWeights, tiny_spec

    spec = tiny_spec()
    model = build_graph(spec, RandomWeights(spec), precision("bf16"), make_limits(64), compute="bfloat16")
    with pytest.raises(UnsupportedError, match="compute='float32'"):
        lower(model)
