"""plansmith_quantize.json: what a quantization did, of what and with what."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import QuantizePlan
from .recipes import group_size_of

if TYPE_CHECKING:
    from .simulate import SimulatedModel

FORMAT = 1


def make_report(
    plan: QuantizePlan, simulated: SimulatedModel, quant: dict[str, Any], directory: Path
) -> dict[str, Any]:
    """Return plansmith_quantize.json's values but for the time and memory it took.

    quant : hf_quant_config.json's object
    directory : what was written, for its size
    """
    options, facts = plan.options, simulated.facts
    return {
        "format": FORMAT,
        "recipe": plan.name,
        "kv_cache": options.kv_cache,
        "source": {
            "path": str(plan.path.resolve()),
            "fingerprint": plan.checkpoint.fingerprint(),
            "architecture": plan.checkpoint.spec.architecture,
        },
        "quant_algo": quant["quantization"].get("quant_algo"),
        "stored_dtype": str(simulated.dtype).removeprefix("torch."),
        "calibration": _calibration(plan, facts),
        "seed": options.seed,
        "options": {
            "exclude": list(options.exclude),
            "quantize_lm_head": options.quantize_lm_head,
            "group_size": options.group_size,
            "auto_bits": options.auto_bits,
            "auto_recipes": [one.name for one in plan.recipes] if plan.is_auto else [],
            "device": options.device,
            "batch_size": options.batch_size,
        },
        **{key: facts[key] for key in ("smoothquant_alpha", "smoothquant_search") if key in facts},
        **({"effective_bits": facts["auto"]["effective_bits"]} if "auto" in facts else {}),
        "layers": _layers(plan, facts),
        "left_out": [one.name for one in plan.left_out],
        "bytes": sum(one.stat().st_size for one in directory.iterdir()),
        "versions": {
            name: importlib.metadata.version(name) for name in ("torch", "transformers", "nvidia-modelopt")
        },
        "notes": _notes(plan, facts),
    }


def _layers(plan: QuantizePlan, facts: dict[str, Any]) -> dict[str, Any]:
    """Return what each quantized layer got, and what was measured of it."""
    chosen, largest = facts.get("auto", {}).get("layers", {}), facts["largest_inputs"]
    layers: dict[str, Any] = {}
    for one in plan.layers:
        name = chosen.get(one.name, {}).get("recipe", plan.name)
        recipe = next((r for r in plan.recipes if r.name == name), None)
        size = 0 if recipe is None else group_size_of(recipe, one, plan.options.group_size)
        layers[one.name] = {"recipe": name, "group_size": size}
        if one.name in chosen:
            layers[one.name]["scores"] = chosen[one.name]["scores"]
        if one.name in largest:
            layers[one.name]["largest_input"] = largest[one.name]
    return layers


def _calibration(plan: QuantizePlan, facts: dict[str, Any]) -> dict[str, Any] | None:
    samples = plan.samples
    if samples is None:
        return None
    return {
        "data": samples.source,
        "samples": len(samples.ids),
        "length": int(samples.ids.shape[1]),
        "documents": samples.num_documents,
        "loss": facts.get("calibration_loss"),
    }


def _notes(plan: QuantizePlan, facts: dict[str, Any]) -> list[str]:
    notes = list(facts["notes"])
    samples = plan.samples
    if samples is not None and len(samples.ids) < samples.wanted:
        notes.append(
            f"{samples.source} gave {len(samples.ids)} samples of {samples.ids.shape[1]} tokens, "
            f"{samples.wanted} were asked for"
        )
    return notes
