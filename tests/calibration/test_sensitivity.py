"""Sensitivity: the layer that was made worst comes out as the worst, and mixtures are what they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from plansmith.builder.checkpoint import Checkpoint, open_checkpoint
from plansmith.builder.precision import precision
from plansmith.builder.scheme import FLOAT
from plansmith.calibration.mixture import HEAD, KV_CACHE, mixed, quantized_layers
from plansmith.calibration.sensitivity import bits_table, measure_sensitivity
from plansmith.runtime.errors import InvalidArgumentError

PRODUCTS = ("q", "k", "v", "o", "gate", "up", "down")


class Broken:
    """A checkpoint in which one block's MLP has an outlier a row, in a column whose input its norm makes 0.

    In float the column does nothing; in int8 its scale leaves no step for the rest of the row.
    """

    def __init__(self, checkpoint: Checkpoint, block: str) -> None:
        self.spec, self.path, self.weights = checkpoint.spec, checkpoint.path, self
        self.quantization = None
        self._inner, self._block = checkpoint, block

    def tokenizer_files(self) -> Any:
        return self._inner.tokenizer_files()

    def names(self) -> tuple[str, ...]:
        return self._inner.weights.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.weights.shape(name)

    def get(self, name: str) -> Any:
        weight = np.array(self._inner.weights.get(name))
        if name in (f"{self._block}.gate.weight", f"{self._block}.up.weight"):
            weight[:, 5] = 100.0
        if name == f"{self._block}.mlp_norm.weight":
            weight[5] = 0.0
        return weight


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    from tiny_models import make_tiny

    return open_checkpoint(make_tiny("llama", tmp_path_factory.mktemp("deep") / "llama", num_hidden_layers=5))


@pytest.mark.parametrize("block", ["layers.1", "layers.3"])
def test_a_broken_layer_costs_most(deep: Checkpoint, block: str) -> None:
    broken: Any = Broken(deep, block)
    found = measure_sensitivity(broken, precision("int8"), broken, mode="both", num_tokens=96, num_threads=1)
    assert [row.layer for row in found.layers] == [*(f"layers.{n}" for n in range(5)), HEAD]
    assert found.costliest(1)[0].layer == block
    by_gain = max(found.layers, key=lambda row: found.kl - (row.kl_kept or 0.0))
    assert by_gain.layer == block
    others = [row.kl_alone or 0.0 for row in found.layers if row.layer != block]
    worst = next(row.kl_alone or 0.0 for row in found.layers if row.layer == block)
    assert worst > 3 * max(others)
    assert found.tokens == 96


def test_modes_and_budget(deep: Checkpoint) -> None:
    candidates = {name: (deep, precision(name)) for name in ("int8", "int4")}
    steps: list[tuple[str, str, int, int]] = []
    found = bits_table(
        candidates, deep, num_tokens=48, num_threads=1, progress=lambda *step: steps.append(step)
    )
    assert list(found) == ["int8", "int4"]
    for eight, four in zip(found["int8"].layers[:-1], found["int4"].layers[:-1], strict=True):
        assert eight.layer == four.layer and eight.kl_kept is None
        assert (four.kl_alone or 0) > (eight.kl_alone or 1)
        assert four.weight_bytes < eight.weight_bytes < eight.float_bytes
    # q, k, v, o, gate, up, down of hidden 64, 4 heads of 32, 2 KV heads, 96 inner: their codes and a scale an output
    shapes = [(128, 64), (64, 64), (64, 64), (64, 128), (96, 64), (96, 64), (64, 96)]
    assert found["int8"].layers[0].weight_bytes == sum(n * k + 4 * n for n, k in shapes)
    assert found["int8"].layers[0].float_bytes == 2 * sum(n * k for n, k in shapes)
    assert found["int8"].layers[-1].weight_bytes == 320 * 64 + 4 * 320
    assert [step[2] for step in steps] == [*range(8)] * 2 and {step[3] for step in steps} == {8}
    kept = measure_sensitivity(deep, precision("int8"), deep, mode="kept", num_tokens=48, num_threads=1)
    assert all(row.kl_alone is None and row.kl_kept is not None for row in kept.layers)
    content = kept.to_json()
    assert content["layers"][0]["cost"] == pytest.approx(kept.kl - (kept.layers[0].kl_kept or 0))


def test_one_layer_at_a_time(deep: Checkpoint) -> None:
    recipe = precision("int4")
    one = mixed(deep, recipe, deep, ["layers.2"]).recipe
    schemes = {(n, name): one.scheme(f"layers.{n}.{name}", 64) for n in range(5) for name in PRODUCTS}
    assert {n for (n, _), scheme in schemes.items() if scheme != FLOAT} == {2}
    assert schemes[2, "up"] == recipe.scheme("layers.2.up", 64)
    assert one.scheme(HEAD, 64) == FLOAT and one.head_bits == 32
    head = mixed(deep, recipe, deep, [HEAD]).recipe
    assert head.scheme(HEAD, 64) == recipe.scheme(HEAD, 64)
    assert all(head.scheme(f"layers.{n}.q", 64) == FLOAT for n in range(5))


def test_nothing_quantized(deep: Checkpoint) -> None:
    assert quantized_layers(deep.spec, precision("bf16")) == ()
    with pytest.raises(InvalidArgumentError, match="bf16 quantizes no layer"):
        measure_sensitivity(deep, precision("bf16"), deep)


def test_a_quantized_checkpoint_s_layers(deep: Checkpoint) -> None:
    """Schemes of a checkpoint: what is chosen keeps its scheme, the rest is float with the original's weights."""
    from plansmith.builder.precision import of_checkpoint
    from plansmith.builder.scheme import Quantization, Scheme

    schemes = tuple(
        (f"layers.{n}.{name}", Scheme("fp8", -1, input="fp8")) for n in (0, 2) for name in PRODUCTS
    )
    recipe = of_checkpoint(Quantization("mixed", "somebody", schemes, kv="fp8"), "bfloat16")
    assert quantized_layers(deep.spec, recipe) == ("layers.0", "layers.2", KV_CACHE)
    only = mixed(deep, recipe, deep, ["layers.2"]).recipe
    assert only.kv == "float" and only.scheme("layers.0.q", 64) == FLOAT
    assert only.scheme("layers.2.q", 64) == Scheme("fp8", -1, input="fp8")
    assert mixed(deep, recipe, deep, [KV_CACHE]).recipe.kv == "fp8"

    class Other:
        """Weights that tell where they come from."""

        weights: Any = None
        spec = deep.spec

        def names(self) -> tuple[str, ...]:
            return deep.weights.names()

        def shape(self, name: str) -> tuple[int, ...]:
            return deep.weights.shape(name)

        def get(self, name: str) -> Any:
            return np.zeros(self.shape(name), np.float32)

    zeros: Any = Other()
    zeros.weights = zeros
    weights = mixed(zeros, recipe, deep, ["layers.2"]).weights
    for name in weights.names():
        assert (not np.any(weights.get(name))) == (name.startswith("layers.2.")), name
