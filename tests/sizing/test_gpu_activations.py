"""The estimate of a GPU plan's scratch memory, and its weights, against what TensorRT-RTX's compiler tells of one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from plansmith.builder.graph import build_graph
from plansmith.builder.limits import make_limits
from plansmith.builder.targets.registry import find_targets
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
