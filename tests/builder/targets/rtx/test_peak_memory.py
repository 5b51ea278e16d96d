"""What a compile is said to take is what it takes, and follows the graph."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from plansmith.builder.build_memory import predicted_peak_bytes as predicted_of_spec
from plansmith.builder.precision import PRECISIONS
from plansmith.builder.targets.registry import find_targets
from plansmith.builder.targets.rtx.compile import compile_plan
from plansmith.builder.targets.rtx.peak_memory import predicted_peak_bytes
from plansmith.fleet.memory_watch import MemoryWatch, tree_bytes
from rtx_models import LIMITS, tiny_graph, tiny_spec

SPEC = tiny_spec(windows=(0,))
SM89 = find_targets(["sm89"])[0]


@pytest.mark.parametrize("recipe", ["fp16", "int8", "int4"])
def test_a_compile_takes_what_is_predicted(recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    graph = tiny_graph(SPEC, recipe=recipe)
    before = tree_bytes(os.getpid())
    with MemoryWatch(interval_s=0.005) as watch:
        compile_plan(graph, LIMITS, SPEC, "sm89", tmp_path / "model.plan", tmp_path / "build.log")
    assert watch.peak_bytes - before == pytest.approx(predicted_peak_bytes(graph), rel=0.2)


@pytest.mark.parametrize("recipe", ["fp16", "int8", "int4"])
def test_shapes_alone_say_the_same(recipe: str) -> None:
    graph = tiny_graph(SPEC, recipe=recipe)
    assert predicted_of_spec(SM89, SPEC, PRECISIONS[recipe], LIMITS) == predicted_peak_bytes(graph)


def test_it_grows_with_layers_weights_and_vocabulary() -> None:
    def of(**changed: int) -> int:
        return predicted_of_spec(SM89, dataclasses.replace(SPEC, **changed), PRECISIONS["fp16"], LIMITS)

    more_layers = predicted_peak_bytes(tiny_graph(tiny_spec(windows=(0, 0, 0))))
    assert more_layers > of() + 2 * 12e6
    assert (
        of(intermediate_size=4096) > of() + 1.6 * 2 * 3 * (4096 - SPEC.intermediate_size) * SPEC.hidden_size
    )
    assert of(vocab_size=65536) == pytest.approx(
        of() + 1.02 * 2 * (65536 - SPEC.vocab_size) * SPEC.hidden_size * (1 if SPEC.tie_embeddings else 2),
        rel=1e-6,
    )
