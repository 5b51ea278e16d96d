"""LoRA adapters beside quantized products: they take the input as it was before factors and rounding.

The reference is the same graph with each adapter written into it as float products, run by ONNX Runtime.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from mixed_steps import BLOCK, NUM_BLOCKS, ROUNDED_TOLERANCE, assert_close, row_errors, run
from plansmith.builder.batch import StepBatch
from plansmith.builder.graph import build_graph
from plansmith.builder.limits import make_limits
from plansmith.builder.precision import of_checkpoint
from plansmith.builder.targets.cpu import compile_plan
from plansmith.builder.targets.cpu.session import CpuSession, _struct
from plansmith.builder.targets.reference import ReferenceSession
from plansmith.runtime._native import native
from plansmith.runtime.batch import Batch
from quantized_weights import SCHEMES, RandomQuantizedWeights, linear_layers, quantization, quantized_spec

LENGTHS, VOCAB = (10, 1, 10, 17), 96
MODULES = {"q": 1, "k": 2, "v": 3, "o": 4, "up": 5, "down": 6, "gate": 7}
RANK, SCALE = 4, 0.5

Adapter = dict[str, tuple[np.ndarray, np.ndarray]]


def adapter_of(weights: RandomQuantizedWeights, names: list[str]) -> Adapter:
    """Return random a [rank, in] and b [out, rank] of each product."""
    rng = np.random.default_rng(5)
    made: Adapter = {}
    for name in names:
        n, k = weights.shape(f"{name}.weight")
        a, b = rng.standard_normal((RANK, k)) / k**0.5, rng.standard_normal((n, RANK)) / RANK**0.5
        made[name] = (a.astype(np.float32), b.astype(np.float32))
    return made


class AdapterSession(CpuSession):
    """A session in which every sequence has the adapter of slot 0, once there is one."""

    slot = -1

    def load(self, adapter: Adapter) -> None:
        """Load an adapter into slot 0."""
        core, executor = native(), self._executor
        assert executor is not None
        modules, alive = core.ffi.new("psm_lora_module[]", len(adapter)), []
        for module, (name, (a, b)) in zip(modules, adapter.items(), strict=True):
            _, layer, unit = name.split(".")
            module.layer_idx, module.module, module.rank, module.scale = (
                int(layer),
                MODULES[unit],
                RANK,
                SCALE,
            )
            module.in_features, module.out_features = a.shape[1], b.shape[0]
            alive += [core.ffi.from_buffer("float[]", part) for part in (a, b)]
            module.a, module.b = alive[-2:]
        executor._check(executor.struct.load_adapter(executor.struct.self, 0, modules, len(adapter)))
        self.slot = 0

    def step(self, batch: StepBatch) -> np.ndarray:
        arrays = {name: np.ascontiguousarray(a, np.int32) for name, a in batch.feeds().items()}
        order = np.argsort(batch.logits_rows, kind="stable")
        arrays["logits_rows"] = np.ascontiguousarray(batch.logits_rows[order])
        struct, slots = _struct(arrays), np.full(len(batch.kv_lens), self.slot, np.int32)
        struct.adapter_slots = native().ffi.from_buffer("int32_t[]", slots)
        out = np.empty((len(order), self.info.vocab_size), np.float32)
        assert self._executor is not None
        out[order] = self._executor.step(Batch(**arrays, native=struct))
        return out


def with_adapter(model: ir.Model, adapter: Adapter) -> ir.Model:
    """Return the graph with y + scale * b (a x) behind each product, x as it was before factors and rounding."""
    graph = model.graph

    def weight(name: str, array: np.ndarray) -> ir.Value:
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        graph.initializers.add(value)
        return value

    for product in [
        n for n in graph if n.op_type == "MatMul" and (n.name or "").partition("/")[0] in adapter
    ]:
        name = (product.name or "").partition("/")[0]
        a, b = adapter[name]
        x = product.inputs[0]
        while x is not None and (made_by := x.producer()) is not None and made_by.name is not None:
            if made_by.name.partition("/")[2] not in ("pre_scale", "input_q", "input_dq", "round"):
                break
            x = made_by.inputs[0]
        y = product.outputs[0]
        low = ir.node("MatMul", [x, weight(f"{name}.a", np.ascontiguousarray(a.T))], name=f"{name}/a")
        high = ir.node("MatMul", [low.outputs[0], weight(f"{name}.b", SCALE * b.T)], name=f"{name}/b")
        total = ir.node("Add", [y, high.outputs[0]], name=f"{name}/adapted")
        for node in (low, high, total):
            node.outputs[0].name, node.outputs[0].type = f"{node.name}/out", y.type
        high.outputs[0].shape = total.outputs[0].shape = y.shape
        low.outputs[0].shape = ir.Shape(["num_tokens", RANK])
        y.replace_all_uses_with(total.outputs[0])
        total.replace_input_with(0, y)
        graph.insert_after(product, [low, high, total])
    return model


@pytest.mark.parametrize(
    "name", ["int4_awq", "int8_sq", "int8_row_groups", "fp8", "fp8_blocks", "w4a8", "nvfp4"]
)
def test_adapters_take_inputs_as_they_were(name: str, tmp_path: Path) -> None:
    spec = quantized_spec(max_position_embeddings=64)
    held = quantization(spec, SCHEMES[name])
    weights = RandomQuantizedWeights(spec, held)
    limits = make_limits(64, max_batch_size=4, max_num_tokens=24, max_seq_len=64, tokens_per_block=BLOCK)
    model = build_graph(spec, weights, of_checkpoint(held, "float32"), limits)
    compile_plan(model, spec, limits, tmp_path / "p")
    adapter = adapter_of(weights, [n for n in linear_layers(spec) if n.startswith("layers.")])
    with AdapterSession(tmp_path / "p", NUM_BLOCKS, num_threads=2) as session:
        plain = run(session, 0, LENGTHS, VOCAB)
        session.load(adapter)
        adapted = run(session, 0, LENGTHS, VOCAB)
    wanted = run(ReferenceSession(with_adapter(model, adapter), NUM_BLOCKS), 0, LENGTHS, VOCAB)
    assert_close(adapted, wanted, rounds=SCHEMES[name].input != "float")
    assert np.median(row_errors(plain, wanted)) > ROUNDED_TOLERANCE  # the adapter matters
