"""What goes into a plan, by name, and the key over it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.builder.build_key import inputs_key, target_inputs
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.limits import Limits
from plansmith.builder.precision import Precision, precision
from plansmith.builder.scheme import Quantization, Scheme
from plansmith.builder.targets.registry import find_targets

CPU = find_targets(["cpu"])[0]
Inputs = Callable[..., dict[str, str]]


@pytest.fixture
def inputs(tiny_checkpoint: Callable[[str], Path]) -> Inputs:
    """The inputs of the tiny llama's cpu plan."""
    spec = open_checkpoint(tiny_checkpoint("llama")).spec

    def make(
        recipe: Precision | None = None, limits: Limits | None = None, fingerprint: str = "f"
    ) -> dict[str, str]:
        return target_inputs(CPU, fingerprint, spec, recipe or precision("int8"), limits or Limits())

    return make


def differing(one: dict[str, str], two: dict[str, str]) -> list[str]:
    return sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))


def test_every_input_is_a_text_under_a_dotted_name(inputs: Inputs) -> None:
    found = inputs()
    assert all(isinstance(value, str) for value in found.values())
    assert found["checkpoint"] == "f"
    assert found["limits.max_batch_size"] == "64"
    assert found["precision.name"] == "int8"
    assert found["compiler_version"].startswith("format-")


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"limits": Limits(max_batch_size=8)}, ["limits.max_batch_size"]),
        ({"fingerprint": "g"}, ["checkpoint"]),
        ({"recipe": precision("int8").in_groups(64)}, ["precision.group_size"]),
        ({"limits": Limits(max_beam_width=4)}, []),  # no plan depends on it
    ],
)
def test_a_change_is_told_by_its_name(inputs: Inputs, changed: dict[str, Any], names: list[str]) -> None:
    assert differing(inputs(), inputs(**changed)) == names
    assert (inputs_key(inputs()) == inputs_key(inputs(**changed))) == (not names)


def test_a_quantization_is_one_input(inputs: Inputs) -> None:
    def recipe(group: int) -> Precision:
        quantization = Quantization("int4_awq", "somebody", (("layers.0.q", Scheme("int4", group)),))
        return dataclasses.replace(precision("int4"), quantization=quantization)

    assert differing(inputs(recipe(32)), inputs(recipe(64))) == ["precision.quantization"]


def test_a_key_is_of_the_inputs_whatever_their_order(
    inputs: Inputs, tiny_checkpoint: Callable[[str], Path]
) -> None:
    spec = open_checkpoint(tiny_checkpoint("llama")).spec
    backwards = dict(reversed(list(inputs().items())))
    assert inputs_key(target_inputs(CPU, "f", spec, precision("int8"), Limits())) == inputs_key(backwards)
