"""Engine directories of the tiny checkpoints, with small limits so that steps, blocks and lengths run out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LIMITS = {
    "max_batch_size": 8,
    "max_num_tokens": 32,
    "max_input_len": 96,
    "max_seq_len": 128,
    "tokens_per_block": 8,
}


def build_tiny(checkpoint: Path, out: Path, precision: str = "fp32", **options: Any) -> Path:
    """Build the cpu target of a checkpoint into `out` and return it; options as of plan_build."""
    from plansmith.builder.build import build_engine, plan_build

    build_engine(plan_build(checkpoint, ["cpu"], precision=precision, limits=dict(LIMITS), **options), out)
    return out


class KvScales:
    """A checkpoint's weights with a scale of K and V beside them, the same for every layer."""

    def __init__(self, weights: Any, k_scale: float, v_scale: float) -> None:
        self._weights, self._scales = weights, (k_scale, v_scale)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """Return the scales of a layer's K and V."""
        return self._scales


def build_tiny_kv(checkpoint: Path, out: Path, kv: str) -> Path:
    """Build a float32 plan with FP8 or INT8 KV pools into `out` and return it: model.plan of the cpu target alone.

    kv : "fp8" or "int8"; the scales are such that few values of a tiny model are cut off
    """
    from plansmith.builder.checkpoint import open_checkpoint
    from plansmith.builder.graph import build_graph
    from plansmith.builder.limits import make_limits
    from plansmith.builder.precision import of_checkpoint
    from plansmith.builder.scheme import Quantization
    from plansmith.builder.targets.cpu import compile_plan

    opened = open_checkpoint(checkpoint)
    limits = make_limits(opened.spec.max_position_embeddings, **LIMITS)
    largest = {"fp8": 448.0, "int8": 127.0}[kv]
    weights = KvScales(opened.weights, 3.0 / largest, 3.0 / largest)
    recipe = of_checkpoint(Quantization(f"{kv}_kv", "tests", (), kv), "float32")
    plan = out / "targets" / "cpu" / "model.plan"
    plan.parent.mkdir(parents=True)
    compile_plan(build_graph(opened.spec, weights, recipe, limits), opened.spec, limits, plan)
    return out
