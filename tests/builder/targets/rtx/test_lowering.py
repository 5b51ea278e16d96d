"""What TensorRT-RTX is given, run in numpy over mixed steps on scattered blocks: the model's own logits come out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from plansmith.builder.graph import build_graph, save
from plansmith.builder.precision import precision
from plansmith.builder.targets.reference import ReferenceSession
from plansmith.builder.targets.rtx import contract, lowering
from plansmith.runtime.errors import InvalidArgumentError
from rtx_models import BLOCKS, LIMITS, RandomWeights, graph_of, sequences, steps, tiny_graph, tiny_spec
from rtx_numpy import NumpySession
from tiny_models import FAMILIES
from transformers_reference import transformers_logits

TinyCheckpoint = Callable[[str], Path]


@pytest.mark.parametrize("family", FAMILIES)
def test_lowered_graph_gives_transformers_logits(family: str, tiny_checkpoint: TinyCheckpoint) -> None:
    path = tiny_checkpoint(family)
    session = NumpySession(lowering.lower(graph_of(path, "fp32", "float32")), BLOCKS)
    wanted = transformers_logits(path, sequences(320))
    for step in steps(320):
        logits = session.step(step.batch)
        for row, (seq, at) in enumerate(step.rows):
            # Logits are up to 10; float32 sums over 2 to 4 layers differ by some 1e-5.
            np.testing.assert_allclose(
                logits[row], wanted[seq][at], atol=1e-3, err_msg=f"{family} {seq} {at}"
            )


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("causal", ["mask", "lower_right"])
@pytest.mark.parametrize("family", ["llama3", "qwen2", "gemma2"])
def test_padding_and_both_kinds_of_masking_change_nothing(
    family: str, causal: lowering.Causal, together: bool, tiny_checkpoint: TinyCheckpoint
) -> None:
    graph = graph_of(tiny_checkpoint(family), "fp32", "float32")
    session = NumpySession(lowering.lower(graph, causal=causal), BLOCKS)
    reference = ReferenceSession(graph, BLOCKS)
    for step in steps(320, seed=2):
        logits = session.step(step.batch, together=together)
        np.testing.assert_allclose(logits, reference.step(step.batch), atol=1e-4)


@pytest.mark.parametrize("recipe", ["fp16", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_half_precision_stays_near_the_same_weights_in_float32(
    family: str, recipe: str, tiny_checkpoint: TinyCheckpoint
) -> None:
    path = tiny_checkpoint(family)
    session = NumpySession(lowering.lower(graph_of(path, recipe, "float16")), BLOCKS)
    reference = ReferenceSession(graph_of(path, recipe, "float32"), BLOCKS)
    errors, scale = [], []
    for step in steps(320, seed=3):
        logits, wanted = session.step(step.batch), reference.step(step.batch)
        errors.append(np.square(logits - wanted).mean())
        scale.append(np.square(wanted).mean())
    # float16 carries 2^-11 and some 20 roundings a layer leave 0.4 %; scales rounded to float16 also move codes of
    # int8 and int4, up to 2.5 %. A wrong mask or page gives about 100 %.
    assert np.sqrt(np.mean(errors) / np.mean(scale)) < (0.01 if recipe == "fp16" else 0.05)


def test_bfloat16_graph_runs_with_bfloat16_pools() -> None:
    spec = tiny_spec()
    session = NumpySession(lowering.lower(tiny_graph(spec, recipe="bf16", compute="bfloat16")), BLOCKS)
    graph = build_graph(spec, RandomWeights(spec), precision("bf16"), LIMITS, compute="float32")
    reference = ReferenceSession(graph, BLOCKS)
    for step in steps(spec.vocab_size, seed=4):
        # bfloat16 carries 2^-8, eight times coarser than float16.
        np.testing.assert_allclose(session.step(step.batch), reference.step(step.batch), atol=1.0)
    assert {pool.dtype.name for pool in session.pools.values()} == {"bfloat16"}


def test_only_the_new_tokens_rows_of_the_pools_change() -> None:
    graph = tiny_graph(recipe="fp32", compute="float32")
    session, reference = NumpySession(lowering.lower(graph), BLOCKS), ReferenceSession(graph, BLOCKS)
    for step in steps(96, seed=5):
        session.step(step.batch, together=True)
        reference.step(step.batch)
    for name, pool in session.pools.items():
        np.testing.assert_allclose(pool, reference.pool(name), atol=1e-4, err_msg=name)
        assert np.isnan(pool).any(), "the plan left no block unwritten: nothing was checked"


def test_what_an_earlier_owner_left_in_a_block_reaches_nobody() -> None:
    graph = tiny_graph(recipe="fp32", compute="float32")
    clean, dirty = (NumpySession(lowering.lower(graph), BLOCKS) for _ in range(2))
    for pool in clean.pools.values():
        pool[:] = 0.0
    for pool in dirty.pools.values():
        pool[:] = np.where(np.random.default_rng(0).random(pool.shape) < 0.5, np.inf, -np.inf)
    for step in steps(96, seed=6):
        np.testing.assert_array_equal(
            clean.step(step.batch, together=True), dirty.step(step.batch, together=True)
        )


@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_inputs_and_outputs_are_the_contract(compute: str, softcap: float, tmp_path: Path) -> None:
    spec = tiny_spec(attn_softcap=softcap)
    recipe = {"float16": "fp16", "bfloat16": "bf16"}[compute]
    save(lowering.lower(tiny_graph(spec, recipe=recipe, compute=compute)), tmp_path / "graph.onnx")
    onnx.checker.check_model(tmp_path / "graph.onnx")
    graph = onnx.load(tmp_path / "graph.onnx", load_external_data=False).graph
    for found, wanted in (
        (graph.input, contract.plan_inputs(spec, LIMITS, compute)),
        (graph.output, contract.plan_outputs(spec, LIMITS, compute)),
    ):
        assert [v.name for v in found] == [t.name for t in wanted]
        for value, tensor in zip(found, wanted, strict=True):
            kind = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()
            assert {"float": "float32"}.get(kind, kind) == tensor.dtype, value.name
            assert len(value.type.tensor_type.shape.dim) == len(tensor.dims), value.name
    domains = {node.domain for node in graph.node}
    assert domains == {"", "trt"}


def test_the_graph_that_is_lowered_stays_as_it_is() -> None:
    graph = tiny_graph()
    before = ir.to_proto(graph).SerializeToString(deterministic=True)
    lowering.lower(graph)
    assert ir.to_proto(graph).SerializeToString(deterministic=True) == before


def test_types_of_a_graph() -> None:
    assert lowering.types_of(tiny_graph(recipe="int4")) == {"fp32", "fp16", "int8", "int4"}
    assert lowering.types_of(tiny_graph(recipe="bf16", compute="bfloat16")) == {"fp32", "bf16"}


def test_another_graph_is_refused() -> None:
    x = ir.Value(name="x", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.FLOAT))
    graph = ir.Graph([x], [x], nodes=[], opset_imports={"": 24}, name="other")
    with pytest.raises(InvalidArgumentError, match=r"no input k_pool\.0"):
        lowering.lower(ir.Model(graph, ir_version=11))
