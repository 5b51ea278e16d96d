"""What TensorRT 11 is given, run in numpy over mixed steps on scattered blocks: the reference's logits come out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.graph import build_graph
from plansmith.builder.graph import contract as graph_contract
from plansmith.builder.precision import of_checkpoint
from plansmith.builder.scheme import KvFormat, Quantization
from plansmith.builder.targets.reference import ReferenceSession
from plansmith.builder.targets.tensorrt import contract, lowering
from plansmith.runtime.errors import InvalidArgumentError, UnsupportedError
from quantized_weights import SCHEMES, RandomQuantizedWeights, quantization, quantized_spec
from rtx_models import BLOCKS, LIMITS, graph_of, steps, tiny_graph, tiny_spec
from tensorrt_numpy import NumpySession
from tiny_models import FAMILIES

TinyCheckpoint = Callable[[str], Path]


@pytest.fixture(params=["whole", "split"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Contexts of one split, as the limits of these tests give; and of up to four."""
    if request.param == "split":
        monkeypatch.setattr(lowering, "splitting", lambda *shape: lowering.Splitting(2, 16, has_combine=True))
    return str(request.param)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_references_logits(
    family: str, parts: str, tiny_checkpoint: TinyCheckpoint
) -> None:
    graph = graph_of(tiny_checkpoint(family))
    lowered = lowering.lower(graph, LIMITS)
    session, reference = NumpySession(lowered, BLOCKS), ReferenceSession(graph, BLOCKS)
    checkpoint = open_checkpoint(tiny_checkpoint(family))
    ops = [node.op_type for node in lowered.graph if node.domain == graph_contract.OP_DOMAIN]
    chain = [op for op in contract.PLUGINS if parts == "split" or op != contract.COMBINE]
    assert ops == chain * checkpoint.spec.num_layers
    for step in steps(320):
        # Logits are up to 10; float32 sums over 2 to 4 layers differ by some 1e-5.
        np.testing.assert_allclose(session.step(step.batch), reference.step(step.batch), atol=1e-3)


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_quantized_pools(kv: KvFormat, parts: str) -> None:
    spec = quantized_spec()
    held = Quantization("test", "tests", (), kv)
    weights = RandomQuantizedWeights(spec, held)
    graph = build_graph(spec, weights, of_checkpoint(held, "float32"), LIMITS, compute="float32")
    session, reference = NumpySession(lowering.lower(graph, LIMITS), BLOCKS), ReferenceSession(graph, BLOCKS)
    errors = []
    for step in steps(spec.vocab_size):
        logits, wanted = session.step(step.batch), reference.step(step.batch)
        errors.extend(np.abs(logits - wanted).max(axis=1) / np.abs(wanted).max())
    # A code that lies between two may fall either way where float sums are in another order: few rows show it.
    assert np.median(errors) < 1e-4 and max(errors) < 0.03


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_lowers_and_keeps_its_numbers(scheme: str) -> None:
    spec = quantized_spec()
    held = quantization(spec, SCHEMES[scheme])
    weights = RandomQuantizedWeights(spec, held)
    graph = build_graph(spec, weights, of_checkpoint(held, "float32"), LIMITS, compute="float32")
    lowered = lowering.lower(graph, LIMITS)
    assert not any(node.op_type == graph_contract.ROUND_INPUT for node in lowered.graph)
    step = next(iter(steps(spec.vocab_size)))
    logits, wanted = (
        NumpySession(lowered, BLOCKS).step(step.batch),
        ReferenceSession(graph, BLOCKS).step(step.batch),
    )
    # Rounded inputs are chaotic: a difference of 1e-7 moves some codes by a step each layer.
    assert np.sqrt(np.square(logits - wanted).mean() / np.square(wanted).mean()) < 0.1


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_half_precision_and_its_pools(compute: str) -> None:
    spec = tiny_spec()
    graph = tiny_graph(spec, recipe="fp16" if compute == "float16" else "bf16", compute=compute)
    session = NumpySession(lowering.lower(graph, LIMITS), BLOCKS)
    reference = ReferenceSession(tiny_graph(spec, recipe="fp32", compute="float32"), BLOCKS)
    errors, size = [], []
    for step in steps(spec.vocab_size):
        logits, wanted = session.step(step.batch), reference.step(step.batch)
        errors.append(np.square(logits - wanted).mean())
        size.append(np.square(wanted).mean())
    # 2^-11 and 2^-8 a rounding, some 20 roundings a layer; a wrong page or mask gives about 1.
    assert np.sqrt(np.mean(errors) / np.mean(size)) < (0.01 if compute == "float16" else 0.08)
    assert {kind.dtype.name for kind in session.pools.values()} == {compute}


def test_inputs_are_the_contracts_without_what_nothing_reads() -> None:
    graph = tiny_graph()
    lowered = lowering.lower(graph, LIMITS)
    pools = [n for layer in range(2) for n in (graph_contract.k_pool(layer), graph_contract.v_pool(layer))]
    assert [v.name for v in lowered.graph.inputs] == [*contract.STEP_INPUTS, *pools]
    assert set(graph_contract.PACKED_INPUTS) - set(contract.STEP_INPUTS) == {graph_contract.QUERY_LENS}
    assert all(v.uses() for v in lowered.graph.inputs)
    assert [v.name for v in lowered.graph.outputs][1:] == [graph_contract.pool_out(n) for n in pools]
    assert [v.name for v in graph.graph.inputs] == [*graph_contract.PACKED_INPUTS, *pools]  # itself unchanged


def test_how_the_context_is_split_follows_the_limits() -> None:
    assert lowering.splitting(4, 2, 32, LIMITS) == lowering.Splitting(4, 512, has_combine=False)
    long = dataclasses.replace(LIMITS, max_seq_len=4096, max_input_len=4096)
    assert lowering.splitting(32, 8, 128, long) == lowering.Splitting(4, 512, has_combine=True)
    assert lowering.splitting(32, 2, 128, long).query_rows == 1
    assert lowering.count_plugins(tiny_spec(), LIMITS) == 6
    assert lowering.count_plugins(tiny_spec(), long) == 8


def test_shapes_that_the_kernels_do_not_take() -> None:
    odd = dataclasses.replace(LIMITS, tokens_per_block=24)
    with pytest.raises(
        UnsupportedError, match=r"power of two positions, not 24; build with --tokens-per-block 16"
    ):
        lowering.lower(tiny_graph(limits=odd), odd)
    with pytest.raises(UnsupportedError, match="head size 12; the kernels take multiples of 8"):
        lowering.splitting(4, 2, 12, LIMITS)


def test_something_else_than_a_graph_of_build_graph() -> None:
    x = ir.Value(name="x", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.FLOAT))
    model = ir.Model(ir.Graph([x], [x], nodes=[], opset_imports={"": 24}, name="other"), ir_version=11)
    with pytest.raises(InvalidArgumentError, match="does not say what it computes in"):
        lowering.lower(model, LIMITS)
    with pytest.raises(InvalidArgumentError, match=r"no input k_pool\.0"):
        lowering.kv_type_of(model)
