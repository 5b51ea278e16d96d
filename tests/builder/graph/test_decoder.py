"""The graph's contract, names, types, laziness and determinism."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from plansmith.builder.graph import build_graph, contract, save
from plansmith.builder.limits import make_limits
from plansmith.builder.precision import PRECISIONS, precision
from plansmith.builder.spec import DecoderSpec
from plansmith.runtime.errors import CheckpointError, InvalidArgumentError
from tiny_graph import EVERYTHING, RandomWeights, tiny_spec

LIMITS = make_limits(128, tokens_per_block=8)


def build(
    spec: DecoderSpec, recipe: str = "fp32", compute: str = "float32"
) -> tuple[ir.Model, RandomWeights]:
    weights = RandomWeights(spec)
    return build_graph(spec, weights, precision(recipe), LIMITS, compute=compute), weights


def test_inputs_and_outputs_are_the_contract() -> None:
    model, _ = build(tiny_spec(), compute="float16")
    shapes = {v.name: (v.dtype, [str(d) for d in v.shape]) for v in model.graph.inputs}  # type: ignore[union-attr]
    i32, f16 = ir.DataType.INT32, ir.DataType.FLOAT16
    pool = ["num_blocks", "2", "8", "32"]
    assert shapes == {
        contract.INPUT_IDS: (i32, ["num_tokens"]),
        contract.POSITION_IDS: (i32, ["num_tokens"]),
        contract.QUERY_LENS: (i32, ["num_seqs"]),
        contract.KV_LENS: (i32, ["num_seqs"]),
        contract.CU_QUERY_LENS: (i32, ["num_seqs_plus_1"]),
        contract.BLOCK_TABLE: (i32, ["num_seqs", "blocks_per_seq"]),
        contract.LOGITS_ROWS: (i32, ["num_logits"]),
        **{name(n): (f16, pool) for n in (0, 1) for name in (contract.k_pool, contract.v_pool)},
    }
    assert [v.name for v in model.graph.outputs] == [
        contract.LOGITS,
        *(name(n) for n in (0, 1) for name in (contract.k_pool_out, contract.v_pool_out)),
    ]
    logits = model.graph.outputs[0]
    assert logits.dtype == ir.DataType.FLOAT and [str(d) for d in logits.shape] == ["num_logits", "96"]  # type: ignore[union-attr]
    assert model.graph.opset_imports == {"": 24, contract.OP_DOMAIN: 1}


@pytest.mark.parametrize("compute", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("recipe", sorted(PRECISIONS))
@pytest.mark.parametrize("fields", [{}, EVERYTHING], ids=["plain", "everything"])
def test_every_variant_is_valid_onnx_with_true_types(
    fields: dict[str, Any], recipe: str, compute: str, tmp_path: Path
) -> None:
    model, _ = build(tiny_spec(**fields), recipe, compute)
    save(model, tmp_path / "m.onnx")
    onnx.checker.check_model(tmp_path / "m.onnx", full_check=True)
    proto = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    declared = {v.name: v.type.tensor_type.elem_type for v in proto.graph.value_info}
    del proto.graph.value_info[:]  # let ONNX find the types itself
    inferred = onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
    found = {v.name: v.type.tensor_type.elem_type for v in inferred.graph.value_info}
    common = declared.keys() & found.keys()
    assert len(common) > 40
    assert {k: declared[k] for k in common} == {k: found[k] for k in common}


def test_every_node_and_value_has_a_name_of_its_own_and_a_block() -> None:
    model, _ = build(tiny_spec(**EVERYTHING), "int4", "float16")
    names = [n.name for n in model.graph]
    values = [o.name for n in model.graph for o in n.outputs]
    assert None not in names and len(set(names)) == len(names)
    assert None not in values and len(set(values)) == len(values)
    blocks = {n.metadata_props["plansmith.block"] for n in model.graph}
    assert blocks == {
        "embed",
        "logits",
        *(f"layers.{n}.{part}" for n in (0, 1) for part in ("attn", "mlp")),
    }


@pytest.mark.parametrize("tied", [True, False])
def test_units_carry_the_names_that_the_lowerings_match(tied: bool) -> None:
    model, _ = build(tiny_spec(**{**EVERYTHING, "tie_embeddings": tied, "lm_head_bias": False}), "int8")
    by_name = {n.name: n for n in model.graph}
    for unit in ("q", "k", "v", "o", "gate", "up", "down"):
        bias = by_name[f"layers.1.{unit}/bias"]
        assert bias.op_type == "Add" and bias.outputs[0].name == f"layers.1.{unit}/out"
        matmul = bias.inputs[0].producer()  # type: ignore[union-attr]
        assert matmul is by_name[f"layers.1.{unit}/matmul"]
        dq = matmul.inputs[1].producer()  # type: ignore[union-attr]
        assert dq is by_name[f"layers.1.{unit}.weight/dq"] and dq.attributes["axis"].value == 1
        assert [v.name for v in dq.inputs] == [f"layers.1.{unit}.weight", f"layers.1.{unit}.weight.scale"]  # type: ignore[union-attr]
    head = by_name["lm_head/matmul"].inputs[1].producer()  # type: ignore[union-attr]
    if tied:
        assert head.name == "lm_head.weight/transpose"
        assert head.inputs[0] is by_name["embed/gather"].inputs[0]
    else:
        assert head.name == "lm_head.weight/dq"
    assert by_name["embed/gather"].inputs[0].producer().name == "embed.weight/dq"  # type: ignore[union-attr]
    assert by_name["layers.0.attn"].attributes["window"].value == 8
    assert by_name["layers.0.q_rope"].inputs[1].name == "rope.1.cos"  # type: ignore[union-attr]


def test_layers_without_rope_have_no_rotary_node() -> None:
    from plansmith.builder.spec import LayerSpec

    model, _ = build(tiny_spec(layers=(LayerSpec(rope_idx=-1), LayerSpec())))
    rotary = [n.name for n in model.graph if n.op_type == "RotaryEmbedding"]
    assert rotary == ["layers.1.q_rope", "layers.1.k_rope"]


def test_int4_is_grouped_along_the_input_and_the_tied_table_has_eight_bits() -> None:
    model, _ = build(tiny_spec(), "int4")
    init = model.graph.initializers
    assert init["layers.0.down.weight"].dtype == ir.DataType.INT4
    assert init["layers.0.down.weight"].shape == (96, 64)
    assert init["layers.0.down.weight.scale"].shape == (3, 64)
    assert init["embed.weight"].dtype == ir.DataType.INT8 and init["embed.weight"].shape == (96, 64)
    assert init["embed.weight.scale"].shape == (96,)


def test_norm_offset_is_in_the_weight_and_norms_are_float32() -> None:
    spec = tiny_spec(norm_offset=1.0)
    model, weights = build(spec, "bf16", "bfloat16")
    value = model.graph.initializers["layers.0.attn_norm.weight"]
    assert value.dtype == ir.DataType.FLOAT
    got = value.const_value.numpy()  # type: ignore[union-attr]
    np.testing.assert_array_equal(got, np.asarray(weights.get("layers.0.attn_norm.weight")) + np.float32(1))


def test_building_reads_no_weight_and_saving_holds_one_at_a_time(tmp_path: Path) -> None:
    for recipe in PRECISIONS:
        model, weights = build(tiny_spec(**EVERYTHING), recipe)
        assert weights.reads == []
        save(model, tmp_path / f"{recipe}.onnx")
        # Scales of 256 bytes or less are written into the .onnx later, which costs a second pass over a tiny weight.
        repeated = len(weights.reads) - len(set(weights.reads))
        small = sum(
            v.const_value.nbytes <= 256  # type: ignore[union-attr]
            for k, v in model.graph.initializers.items()
            if k.endswith(".scale") and k != "embed.scale"
        )
        assert repeated <= small
        assert set(weights.reads) == set(weights.names())
        assert weights.peak_alive == 1, recipe


def test_a_weights_codes_and_scale_come_from_one_pass() -> None:
    model, weights = build(tiny_spec(**EVERYTHING), "int4")
    for name in ("layers.0.q.weight", "layers.0.q.weight.scale", "lm_head.weight", "lm_head.weight.scale"):
        model.graph.initializers[name].const_value.numpy()  # type: ignore[union-attr]
    assert weights.reads == ["layers.0.q.weight", "lm_head.weight"]


@pytest.mark.parametrize("recipe", ["bf16", "int4"])
def test_the_same_model_makes_the_same_bytes(recipe: str, tmp_path: Path) -> None:
    digests = set()
    for turn in ("a", "b"):
        folder = tmp_path / turn
        folder.mkdir()
        model, _ = build(tiny_spec(**EVERYTHING), recipe)
        save(model, folder / "m.onnx")
        save(model, folder / "m.onnx")  # again, over itself: the model stays lazy and whole
        digests.add(
            tuple(hashlib.sha256((folder / f).read_bytes()).hexdigest() for f in ("m.onnx", "m.onnx.data"))
        )
    assert len(digests) == 1


def test_bad_arguments_are_named() -> None:
    spec = tiny_spec()
    with pytest.raises(InvalidArgumentError, match="float64"):
        build(spec, compute="float64")
    with pytest.raises(CheckpointError, match=r"layers\.0\.q_norm\.weight"):
        build_graph(tiny_spec(qk_norm=True), RandomWeights(spec), precision("fp32"), LIMITS)
    with pytest.raises(CheckpointError, match=r"layers\.0\.gate\.weight has shape \(96, 64\).*\(128, 64\)"):
        build_graph(tiny_spec(intermediate_size=128), RandomWeights(spec), precision("fp32"), LIMITS)
    odd = tiny_spec(hidden_size=72)
    with pytest.raises(InvalidArgumentError, match="72"):
        build(odd, "int4")


def test_float16_overflow_is_refused() -> None:
    class Huge(RandomWeights):
        def get(self, name: str) -> Any:
            return np.asarray(super().get(name)) * np.float32(1e6)

    spec = tiny_spec()
    model = build_graph(spec, Huge(spec), precision("fp16"), LIMITS)
    with pytest.raises(CheckpointError, match=r"layers\.0\.q\.weight.*bf16"):
        model.graph.initializers["layers.0.q.weight"].const_value.numpy()  # type: ignore[union-attr]


@pytest.mark.parametrize("recipe", ["fp32", "fp16", "bf16", "int8", "int4"])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_refused_at_every_precision(recipe: str, bad: float) -> None:
    class Damaged(RandomWeights):
        def get(self, name: str) -> Any:
            w = np.array(super().get(name))
            w.reshape(-1)[-1] = bad
            return w

    spec = tiny_spec(**EVERYTHING)
    model = build_graph(spec, Damaged(spec), precision(recipe), LIMITS)
    names = {name.removesuffix(".scale") for name in model.graph.initializers} & set(Damaged(spec).names())
    assert {"embed.weight", "final_norm.weight", "layers.0.q.bias", "layers.0.down.weight"} <= names
    for name in names:
        with pytest.raises(CheckpointError, match=rf"{name}.*NaN or infinite"):
            model.graph.initializers[name].const_value.numpy()  # type: ignore[union-attr]
