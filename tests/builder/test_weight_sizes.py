"""Bytes of weights from shapes alone, against what builds and quantized checkpoints really hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.builder.build import build_engine, plan_build
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.graph import build_graph, weight_bytes
from plansmith.builder.limits import make_limits
from plansmith.builder.precision import RECIPES, of_checkpoint
from plansmith.builder.spec import weight_shapes
from plansmith.builder.targets.registry import compute_dtype, find_targets, recipe_for
from plansmith.builder.weight_sizes import (
    ShapesOnly,
    assumed_recipe,
    pages_are_gathered,
    plan_sizes,
    plan_work,
    shape_of,
    sku_target,
)
from plansmith.runtime.errors import InternalError, InvalidArgumentError
from plansmith.sizing.skus import SKUS
from random_weights import LLAMA, LLAMA_70B, spec_of

FAMILIES = ("llama", "gemma2", "phi3", "qwen3", "mistral")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8", "int4"])
def test_a_cpu_plan_has_the_predicted_size(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path, family: str, precision: str
) -> None:
    checkpoint = tiny_checkpoint(family)
    planned = plan_build(checkpoint, ["cpu"], precision=precision, limits={"max_seq_len": 64})
    build_engine(planned, tmp_path / "engine")
    opened = open_checkpoint(checkpoint)
    recipe = assumed_recipe(precision, opened.spec)
    sizes = plan_sizes(opened.spec, recipe, planned.limits, find_targets(["cpu"])[0])
    plan = tmp_path / "engine" / "targets" / "cpu" / "model.plan"
    assert sizes.weight_bytes == plan.stat().st_size


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("target", ["sm89", "sm90"])
def test_a_gpu_graph_has_the_predicted_size(
    tiny_checkpoint: Callable[[str], Path], family: str, target: str
) -> None:
    opened = open_checkpoint(tiny_checkpoint(family))
    limits = make_limits(opened.spec.max_position_embeddings)
    (found,) = find_targets([target])
    for name in ("fp16", "bf16", "int8", "int4"):
        recipe = assumed_recipe(name, opened.spec)
        compute = compute_dtype(found, opened.spec, recipe)
        graph = build_graph(opened.spec, opened.weights, recipe_for(found, recipe), limits, compute=compute)
        sizes = plan_sizes(opened.spec, recipe, limits, found)
        assert sizes.by_type == weight_bytes(graph)
        # The compiler holds the codes of a table that is tied to the logits twice.
        is_twice = opened.spec.tie_embeddings and name in ("int8", "int4")
        again = opened.spec.vocab_size * opened.spec.hidden_size if is_twice else 0
        assert sizes.weight_bytes == sum(weight_bytes(graph).values()) + again
        assert sizes.compute_dtype == compute and sizes.cpu_plan is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_assumed_as_it_comes_out(tmp_path: Path, recipe: str) -> None:
    """Of a checkpoint that ModelOpt quantized; factors of inputs (AWQ, SmoothQuant) are not foreseen."""
    from tiny_quantized import GROUP, make_modelopt

    path, _ = make_modelopt(recipe, tmp_path / recipe, num_hidden_layers=1)
    opened = open_checkpoint(path)
    assert opened.quantization is not None
    assumed = assumed_recipe(recipe, opened.spec)
    assert assumed.quantization is not None
    found, expected = dict(assumed.quantization.schemes), dict(opened.quantization.schemes)
    assert found.keys() == expected.keys()
    for name, scheme in found.items():
        own = expected[name]
        group = scheme.weight_group if own.weight != "int4" else own.weight_group
        assert group == own.weight_group or group == GROUP
        assert dataclasses.replace(scheme, weight_group=group, pre_scale=own.pre_scale) == own
    limits = make_limits(opened.spec.max_position_embeddings)
    (cpu,) = find_targets(["cpu"])
    true = of_checkpoint(opened.quantization, assumed.float_type)
    sizes = plan_sizes(opened.spec, assumed, limits, cpu)
    exact = plan_sizes(opened.spec, true, limits, cpu, opened.weights)
    assert sizes.weight_bytes == pytest.approx(exact.weight_bytes, rel=0.05)


def test_a_large_model_is_what_its_numbers_say() -> None:
    spec = spec_of(LLAMA_70B)
    limits = make_limits(spec.max_position_embeddings)
    parameters = sum(math.prod(shape) for shape in weight_shapes(spec).values())
    assert parameters == pytest.approx(70.55e9, rel=1e-3)
    (gpu, cpu) = (find_targets([name])[0] for name in ("sm90", "cpu"))
    for target in (gpu, cpu):
        half = plan_sizes(spec, assumed_recipe("fp16", spec), limits, target)
        assert half.weight_bytes == pytest.approx(2 * parameters, rel=2e-3)
        # A step reads everything but the embedding's table, of which it reads rows.
        assert half.weight_bytes - half.read_bytes == 2 * spec.vocab_size * spec.hidden_size
        eighth = plan_sizes(spec, assumed_recipe("int8", spec), limits, target)
        assert eighth.weight_bytes == pytest.approx(parameters, rel=0.08)
        quarter = plan_sizes(spec, assumed_recipe("int4", spec), limits, target)
        assert quarter.weight_bytes == pytest.approx(parameters / 2, rel=0.2)


def test_a_tied_table_is_there_once_and_read_whole() -> None:
    own = spec_of(LLAMA_70B)
    tied = dataclasses.replace(own, tie_embeddings=True)
    limits = make_limits(own.max_position_embeddings)
    two, one = (
        plan_sizes(spec, assumed_recipe("fp16", spec), limits, find_targets(["sm90"])[0])
        for spec in (own, tied)
    )
    assert two.weight_bytes - one.weight_bytes == 2 * own.vocab_size * own.hidden_size
    assert one.read_bytes == one.weight_bytes


def test_what_is_multiplied_as_what() -> None:
    spec = spec_of(LLAMA_70B)
    limits, (target,) = make_limits(spec.max_position_embeddings), find_targets(["sm90"])
    layers = sum(
        math.prod(shape)
        for name, shape in weight_shapes(spec).items()
        if name.startswith("layers.") and len(shape) == 2
    )
    for name, kind in (
        ("fp16", "float16"),
        ("int8", "float16"),
        ("fp8", "fp8"),
        ("int8_sq", "int8"),
        ("nvfp4", "fp4"),
    ):
        recipe = assumed_recipe(name, spec)
        work = plan_work(spec, recipe, target, plan_sizes(spec, recipe, limits, target))
        assert work.products == {kind: layers}
        assert work.head == {"float16": spec.vocab_size * spec.hidden_size}
        assert work.windows == ()


@pytest.mark.parametrize(("kv", "value_bytes"), [(None, 2), ("float16", 2), ("fp8", 1), ("int8", 1)])
def test_kv_pools_are_what_was_asked_for(kv: Any, value_bytes: int) -> None:
    spec = spec_of(LLAMA_70B)
    limits = make_limits(spec.max_position_embeddings)
    for target in ("cpu", "sm90"):
        sizes = plan_sizes(spec, assumed_recipe("fp16", spec, kv), limits, find_targets([target])[0])
        assert sizes.kv_value_bytes == value_bytes
        assert sizes.cpu_plan is None or sizes.cpu_plan.kv_value_bytes == value_bytes


def test_gpus_have_the_target_that_builds_for_them() -> None:
    compilers = {one.name: sku_target(one).compiler for one in SKUS.values()}
    assert compilers["l40s"] == compilers["rtx5090"] == "rtx" and compilers["h100"] == "tensorrt"
    assert pages_are_gathered(sku_target(SKUS["l40s"])) and not pages_are_gathered(sku_target(SKUS["b200"]))


def test_unknown_recipes_and_groups_that_do_not_divide_are_refused() -> None:
    spec = spec_of(LLAMA_70B)
    with pytest.raises(
        InvalidArgumentError, match="--precision 'fp7' is not known; choose one or more of fp32"
    ):
        assumed_recipe("fp7", spec)
    odd = LLAMA | {
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 320,
        "max_position_embeddings": 64,
    }
    with pytest.raises(
        InvalidArgumentError, match=r"int4_awq needs groups of 128 or 64 or 32 columns, layers\.0\.q"
    ):
        assumed_recipe("int4_awq", spec_of(odd))
    with pytest.raises(InvalidArgumentError, match=r"nvfp4 needs blocks of 16 columns, layers\.0\.down"):
        assumed_recipe("nvfp4", spec_of(odd))


def test_shapes_alone_have_no_values() -> None:
    spec = spec_of(LLAMA_70B)
    with pytest.raises(InternalError, match=r"the values of embed\.weight are asked for"):
        ShapesOnly(spec).get("embed.weight")
    assert shape_of(spec).num_kv_heads == 8
