"""All but the plugins of a packed graph goes through the parser and the compiler that are here, TensorRT-RTX's.

They share TensorRT's layers and its rules of types, so what does not parse or type here would not there. Each chain of
plugins is replaced by sums that read the same tensors.
"""

from __future__ import annotations

import os
from pathlib import Path

import onnx_ir as ir
import pytest
from plansmith.builder.graph import build_graph
from plansmith.builder.graph import contract as graph_contract
from plansmith.builder.graph.save import save
from plansmith.builder.precision import of_checkpoint
from plansmith.builder.targets.compiler_process import Compiler, run_child
from plansmith.builder.targets.rtx.compile import CHILD_MODULE
from plansmith.builder.targets.rtx.pen import Pen
from plansmith.builder.targets.tensorrt import compile as compiling
from plansmith.builder.targets.tensorrt import contract, lowering, targets
from quantized_weights import SCHEMES, RandomQuantizedWeights, quantization, quantized_spec
from rtx_models import LIMITS, tiny_graph, tiny_spec

pytest.importorskip("tensorrt_rtx")


def without_plugins(model: ir.Model) -> ir.Model:
    """Replace every chain in place: out is q and sums of all else that the chain reads, pools go through."""
    pen = Pen(model.graph, lowering._COMPUTE[lowering.compute_type_of(model)])
    for node in [n for n in model.graph if n.op_type in contract.PLUGINS]:
        pen.anchor, name = node, f"{node.name}/stand_in"
        inputs = [value for value in node.inputs if value is not None]
        if node.op_type == contract.KV_WRITE:
            for n in (0, 1):
                rows = pen.node("ReduceSum", [inputs[n]], f"{name}/rows.{n}", pen.compute, keepdims=0)
                pool = pen.node("Add", [inputs[2 + n], rows], f"{name}/pool.{n}", pen.compute)
                pen.replace(node.outputs[n], pool)
        elif node.op_type == contract.DECODE:
            out = inputs[0]
            for n, value in enumerate(inputs[1:6]):
                total = pen.node("ReduceSum", [value], f"{name}/sum.{n}", value.dtype, keepdims=0)
                out = pen.node(
                    "Add", [out, pen.cast(total, f"{name}/cast.{n}")], f"{name}/add.{n}", pen.compute
                )
            pen.replace(node.outputs[0], out)
        else:
            ir.convenience.replace_all_uses_with(node.outputs[0], inputs[0])
    for node in reversed([n for n in model.graph if n.op_type in contract.PLUGINS]):
        model.graph.remove(node, safe=True)
    del model.graph.opset_imports[graph_contract.OP_DOMAIN]
    return model


@pytest.mark.parametrize("recipe", ["fp16", "bf16", "int4", "fp8", "int8_sq"])
def test_the_rest_of_the_graph_compiles(recipe: str, tmp_path: Path) -> None:
    compute = "bfloat16" if recipe == "bf16" else "float16"
    if recipe in SCHEMES:
        spec = quantized_spec(num_layers=1, layers=quantized_spec().layers[:1])
        held = quantization(spec, SCHEMES[recipe])
        weights = RandomQuantizedWeights(spec, held)
        graph = build_graph(spec, weights, of_checkpoint(held, compute), LIMITS, compute=compute)
    else:
        spec = tiny_spec(windows=(0,))
        graph = tiny_graph(spec, recipe=recipe, compute=compute)
    path = tmp_path / "graph.onnx"
    save(without_plugins(lowering.lower(graph, LIMITS)), path)
    job = compiling.make_job(graph, LIMITS, spec, targets.TARGETS["sm89-tensorrt"], path, tmp_path / "plan")
    job |= {"capabilities": ["SM89"], "kv_updates": 0, "parent_pid": os.getpid()}
    done = run_child(
        Compiler(CHILD_MODULE, "TensorRT-RTX", "sm89"), job, tmp_path, tmp_path / "log", None, None
    )
    assert done.warnings == () and (tmp_path / "plan").stat().st_size > 0
