"""The estimate of a GPU plan's scratch memory, and its weights, against what TensorRT-RTX's compiler tells of one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from plansmith.builder.graph import build_graph
from plansmith.builder.limits import make_limits
from plansmith.builder.targets.registry import find_targets, recipe_for
from plansmith.builder.targets.rtx.compile import compile_plan
from plansmith.builder.weight_sizes import assumed_recipe, plan_sizes, shape_of
from plansmith.sizing.memory import Load, gpu_activation_bytes
from random_weights import LLAMA, RandomWeights, spec_of

SHAPE: dict[str, Any] = LLAMA | {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
}


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ({}, {"max_batch_size": 32, "max_num_tokens": 512, "max_seq_len": 2048}),  # a decode step's pages
        (
            {"num_key_value_heads": 1},
            {"max_batch_size": 16, "max_num_tokens": 64, "max_seq_len": 512},
        ),  # few of them
        ({}, {"max_batch_size": 4, "max_num_tokens": 1024, "max_seq_len": 512}),  # a prefill's products
        (
            {"intermediate_size": 256},
            {"max_batch_size": 2, "max_num_tokens": 2048, "max_seq_len": 2048},
        ),  # its mask
    ],
)
def test_what_the_compiler_tells(tmp_path: Path, changes: dict[str, int], limits: dict[str, int]) -> None:
    spec = spec_of(SHAPE | changes)
    made = make_limits(spec.max_position_embeddings, **limits)
    recipe, (target,) = assumed_recipe("fp16", spec), find_targets(["sm89"])
    graph = build_graph(spec, RandomWeights(spec), recipe, made, compute="float16")
    compile_plan(graph, made, spec, "sm89", tmp_path / "model.plan", tmp_path / "log")
    log = (tmp_path / "log").read_text(encoding="utf-8")
    told = max(map(int, re.findall(r"Total Activation Memory: (\d+)", log)))
    load = Load(made.max_seq_len, 1, made.max_batch_size, made.max_num_tokens)
    found = gpu_activation_bytes(shape_of(spec), load, 2, gathers_pages=True)
    assert found == pytest.approx(told, rel=0.15)
    (weights,) = map(int, re.findall(r"Total Weights Memory: (\d+)", log))
    assert plan_sizes(spec, recipe, made, target).weight_bytes == pytest.approx(weights, rel=0.01)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_what_a_plan_file_holds(tmp_path: Path, precision: str, is_tied: bool) -> None:
    """Weights to the kilobyte, a table of codes twice where it is tied; kernels within a tenth."""
    changes = {"num_hidden_layers": 4, "vocab_size": 8192, "tie_word_embeddings": is_tied}
    spec = spec_of(SHAPE | changes)
    made = make_limits(spec.max_position_embeddings, max_batch_size=8, max_num_tokens=256)
    recipe, (target,) = assumed_recipe(precision, spec), find_targets(["sm89"])
    graph = build_graph(spec, RandomWeights(spec), recipe_for(target, recipe), made, compute="float16")
    compile_plan(graph, made, spec, "sm89", tmp_path / "model.plan", tmp_path / "log")
    (held,) = map(
        int, re.findall(r"Total Weights Memory: (\d+)", (tmp_path / "log").read_text(encoding="utf-8"))
    )
    sizes = plan_sizes(spec, recipe, made, target)
    assert sizes.weight_bytes == pytest.approx(held, abs=4096)
    assert sizes.source_bytes == pytest.approx((tmp_path / "model.plan").stat().st_size - held, rel=0.1)
    assert sizes.read_bytes == sum(sizes.by_type.values()) - (not is_tied) * 8192 * 512 * (
        2 if precision == "fp16" else 1
    )
