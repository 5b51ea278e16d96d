"""Float weights of any type are stored in the plan's compute type, with the same numbers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from plansmith.builder.graph import build_graph
from plansmith.builder.precision import of_checkpoint, precision
from plansmith.builder.targets.rtx import lowering
from plansmith.runtime.errors import CheckpointError
from quantized_weights import SCHEMES, RandomQuantizedWeights, quantization, quantized_spec
from rtx_models import LIMITS

FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


def lowered(float_type: str, compute: str, *, tied: bool = False) -> tuple[ir.Model, RandomQuantizedWeights]:
    spec = quantized_spec(num_layers=1, layers=quantized_spec().layers[:1], tie_embeddings=tied)
    held = quantization(spec, SCHEMES["int8_rows"])
    weights = RandomQuantizedWeights(spec, held)
    recipe = of_checkpoint(held, float_type)  # type: ignore[arg-type]
    return lowering.lower(build_graph(spec, weights, recipe, LIMITS, compute=compute)), weights


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("float_type", "compute"), [("bfloat16", "float16"), ("float32", "float16"), ("float16", "bfloat16")]
)
def test_weights_have_the_compute_type_and_no_cast_is_left(float_type: str, compute: str, tied: bool) -> None:
    model, weights = lowered(float_type, compute, tied=tied)
    table = model.graph.initializers["rtx/embed.weight"]
    stored = ir.DataType[{"float16": "FLOAT16", "bfloat16": "BFLOAT16"}[compute]]
    first = ir.DataType[{"float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16"}[float_type]]
    wanted = weights.get("embed.weight").astype(first.numpy()).astype(stored.numpy())
    np.testing.assert_array_equal(table.const_value.numpy(), wanted)  # type: ignore[union-attr]
    kinds = {value.dtype for value in model.graph.initializers.values()} & FLOATS
    assert kinds == {ir.DataType.FLOAT, stored}  # float32: norms and scales
    constant = [n.name for n in model.graph if n.op_type == "Cast" and n.inputs[0].producer() is None]  # type: ignore[union-attr]
    assert [name for name in constant if "weight" in str(name)] == []


def test_a_weight_beyond_float16_is_named() -> None:
    spec = quantized_spec(num_layers=1, layers=quantized_spec().layers[:1])
    weights = RandomQuantizedWeights(spec, quantization(spec, SCHEMES["int8_rows"]))
    graph = build_graph(spec, weights, precision("bf16"), LIMITS, compute="float16")
    value = graph.graph.initializers["embed.weight"]
    value.const_value = ir.Tensor(np.full(value.shape.numpy(), 1e5, value.dtype.numpy()), name="embed.weight")  # type: ignore[union-attr]
    stored = lowering.lower(graph).graph.initializers["rtx/embed.weight"]
    with pytest.raises(
        CheckpointError, match=r"embed\.weight has weights beyond float16's largest number, 65504"
    ):
        stored.const_value.numpy()  # type: ignore[union-attr]
