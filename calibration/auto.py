"""Mixed precision: the recipe of each layer by its sensitivity, within a budget of bits (ModelOpt's auto_quantize)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from ..runtime.errors import InvalidArgumentError
from .layers import Layer
from .options import QuantizePlan
from .progress import Progress
from .recipes import (
    DEFAULT_ALPHA,
    Recipe,
    algorithm_of,
    group_size_of,
    input_attributes,
    weight_attributes,
)

SCORE_BATCHES = 8  # gradients of few samples order the layers well enough

UNQUANTIZED = "none"


def auto_quantize(
    model: Any, plan: QuantizePlan, data: Sequence[torch.Tensor], progress: Progress
) -> dict[str, Any]:
    """Quantize the model in place within plan.options.auto_bits, and return what was chosen and why.

    data : batches (B, L) of token ids
    returns : {"effective_bits", "layers": {name: {"recipe", "scores": {recipe: score}, "bits"}}}; a score is how much
        the loss is expected to rise when that layer alone is rounded so (squared error of its output, weighted with
        squared gradients), the same for layers that share an input; ModelOpt takes it that more bits never do worse
    raises InvalidArgumentError when the budget cannot be met
    """
    import modelopt.torch.quantization as mtq

    budget = plan.options.auto_bits
    assert budget is not None
    names: dict[str, str] = {}
    spaces = _spaces(plan, names)
    progress.stage("calibrating and scoring the recipes of each layer")
    counted = _Counted(data, progress)
    model, state = mtq.auto_quantize(
        model,
        constraints={"effective_bits": _with_left_out(plan, budget)},
        quantization_formats=spaces[0]["quantization_formats"],
        module_search_spaces=spaces,
        data_loader=counted,
        forward_step=lambda net, batch: net(input_ids=batch, use_cache=False).logits,
        loss_func=_loss,
        disabled_layers=[one.name for one in plan.left_out],
        num_calib_steps=len(data),
        num_score_steps=min(SCORE_BATCHES, len(data)),
        verbose=False,
        method="gradient",
    )
    if not state["best"]["is_satisfied"]:
        raise InvalidArgumentError(
            f"--auto-bits {budget:g} cannot be met with "
            f"{', '.join(one.name for one in plan.recipes)}; give more bits, or recipes with fewer"
        )
    report = _report(state, names, plan)
    if all(one["recipe"] == UNQUANTIZED for one in report["layers"].values()):
        raise InvalidArgumentError(
            f"--auto-bits {budget:g} leaves every layer as it is, so there is nothing to write; give fewer bits, or "
            "--recipe for one recipe"
        )
    return report


def _sizes(plan: QuantizePlan) -> tuple[int, int]:
    """Return the weights of the layers that are quantized, and of those that are left out."""
    inside, outside = (
        sum(one.in_features * one.out_features for one in layers) for layers in (plan.layers, plan.left_out)
    )
    return inside, outside


def _with_left_out(plan: QuantizePlan, bits: float) -> float:
    """Return ModelOpt's budget, in whose mean the layers that are left out count with 16 bits."""
    inside, outside = _sizes(plan)
    return (bits * inside + 16 * outside) / (inside + outside)


def _without_left_out(plan: QuantizePlan, bits: float) -> float:
    """Return the mean of the quantized layers alone from ModelOpt's mean."""
    inside, outside = _sizes(plan)
    return (bits * (inside + outside) - 16 * outside) / inside


def _spaces(plan: QuantizePlan, names: dict[str, str]) -> list[dict[str, Any]]:
    """Return ModelOpt's search spaces, one for each size of int4 group, and fill in what its formats are called."""
    by_group: dict[int, list[Layer]] = defaultdict(list)
    int4 = next((one for one in plan.recipes if one.is_int4), None)
    for layer in plan.layers:
        size = group_size_of(int4, layer, plan.options.group_size) if int4 else 0
        by_group[size].append(layer)
    alpha = DEFAULT_ALPHA if plan.options.smoothquant is None else plan.options.smoothquant
    spaces = []
    for number, (size, layers) in enumerate(by_group.items()):
        formats = [_format(one, size, alpha) for one in plan.recipes]
        for n, one in enumerate(plan.recipes):
            names[f"CUSTOM_MODULE_{number}_{n}"] = one.name
            names.setdefault(f"CUSTOM_{n}", one.name)
        spaces.append({"module_name_patterns": [one.name for one in layers], "quantization_formats": formats})
    return spaces


def _format(recipe: Recipe, group_size: int, alpha: float) -> dict[str, Any]:
    inputs = input_attributes(recipe, True)
    return {
        "quant_cfg": [
            {"quantizer_name": "*", "enable": False},
            {
                "quantizer_name": "*weight_quantizer",
                "cfg": weight_attributes(recipe, group_size if recipe.is_int4 else 16, True),
            },
            {"quantizer_name": "*input_quantizer", **({"cfg": inputs} if inputs else {"enable": False})},
        ],
        "algorithm": algorithm_of(recipe, alpha),
        "effective_bits": recipe.bits,
    }


def _loss(scores: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    flat = scores[:, :-1].flatten(0, 1).float()
    return torch.nn.functional.cross_entropy(flat, batch[:, 1:].flatten())


class _Counted:
    """Batches that say when they are taken; ModelOpt goes through them several times."""

    def __init__(self, data: Sequence[torch.Tensor], progress: Progress) -> None:
        self._data = data
        self._progress = progress

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Any:
        for done, batch in enumerate(self._data):
            self._progress.step(done, len(self._data))
            yield batch


def _report(state: dict[str, Any], names: dict[str, str], plan: QuantizePlan) -> dict[str, Any]:
    layers: dict[str, Any] = {}
    for key, stats in state["candidate_stats"].items():
        best = state["best"]["recipe"][key]
        scores = {
            _name(one, names): float(score)
            for one, score in zip(stats["formats"], stats["scores"], strict=True)
        }
        for module in stats["module_names"]:
            layers[module] = {"recipe": _name(best, names), "scores": scores}
    ordered = {one.name: layers[one.name] for one in plan.layers if one.name in layers}
    bits = _without_left_out(plan, float(state["best"]["constraints"]["effective_bits"]))
    return {"effective_bits": bits, "layers": ordered}


def _name(recipe: Any, names: dict[str, str]) -> str:
    text = str(recipe).partition("(")[0]
    return names.get(text, UNQUANTIZED if "NONE" in text.upper() else text)
