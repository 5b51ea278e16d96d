"""Quantizes a checkpoint: samples through ModelOpt, and the result written whole or not at all."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..builder.checkpoint import open_checkpoint
from ..builder.checkpoint.hf_write import gguf_to_directory
from ..builder.engine_dir import destination, replacing
from ..builder.limits import make_limits
from ..builder.machine import PeakMemory, peak_rss_bytes
from ..builder.targets.registry import choose_precision, find_targets
from ..runtime.errors import InvalidArgumentError
from .gate import Gate, gate_build
from .options import REPORT_NAME, QuantizeOptions, QuantizePlan, plan_quantization
from .progress import Progress, Report
from .recipes import DEFAULT_ALPHA, group_size_of, modelopt_config
from .third_party import explained, quiet

if TYPE_CHECKING:
    import torch

    from .simulate import SimulatedModel

__all__ = ["QuantizeOptions", "plan_quantization", "quantize_checkpoint", "quantize_model"]

FORMAT = 1  # of plansmith_quantize.json
# AWQ runs every layer eleven times over these to choose one of eleven scales; its means are of all samples.
AWQ_SEARCH_WINDOWS = 16
_SLACK_BYTES = 64 << 20  # tokenizer, configurations, scales


def quantize_checkpoint(
    path: str | Path,
    out: str | Path,
    options: QuantizeOptions,
    *,
    force: bool = False,
    gate: Gate | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Quantize a checkpoint into a new directory and return the report, which lies beside it as well.

    out : is there whole when this returns, and is as it was after any error, kill or interruption
    force : replace a quantized checkpoint of ours that is there
    gate : bounds on what the quantization may cost; nothing is written where one is broken
    raises what plan_quantization and quantize_model raise, BuildError for a broken gate, InvalidArgumentError for an
        `out` that cannot be, OutOfMemoryError when the disk is full
    """
    out = destination(Path(out), REPORT_NAME)
    if not force and out.is_dir() and any(out.iterdir()):
        raise InvalidArgumentError(
            f"{out} exists and is not empty; give another -o, or --force to replace it"
        )
    _check_place(Path(path), out)
    plan = plan_quantization(path, options)
    _check_device(options.device)
    progress = Progress(report)
    began = time.monotonic()
    with PeakMemory(), replacing(out, REPORT_NAME) as work:
        work.reserve(_bytes_at_most(plan))
        with _directory(plan, work.path) as directory:
            simulated = quantize_model(plan, report=report, directory=directory)
        progress.stage("writing")
        with quiet(), explained():
            quant = simulated.save(work.path)
        facts = _report(plan, simulated, quant, work.path)
        del simulated  # the model's memory, before the engine's
        if gate is not None:
            facts["evaluation"] = _judge(plan, work.path, gate, report)
        facts["seconds"] = round(time.monotonic() - began, 1)
        facts["peak_memory_bytes"] = peak_rss_bytes()  # inside: the report is part of what is swapped in
        text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
        (work.path / REPORT_NAME).write_text(text, encoding="utf-8")
    return facts


def _check_device(name: str) -> None:
    """Refuse a device that is not there before anything is loaded."""
    if name != "cpu":
        with quiet():
            from .model import find_device

            find_device(name)


def _judge(plan: QuantizePlan, written: Path, gate: Gate, report: Report | None) -> dict[str, Any]:
    """Return the evaluation of what was written against its source; raises BuildError where the gate is broken."""
    quantized = open_checkpoint(written)
    recipe = choose_precision("auto", quantized, find_targets(["cpu"])).on_cpu()
    limits = make_limits(quantized.spec.max_position_embeddings)
    judged = gate_build(gate, quantized, recipe, limits, against=plan.checkpoint, progress=report)
    return judged.to_json()


def _check_place(source: Path, out: Path) -> None:
    """Refuse to write over the source, or into it."""
    resolved = source.resolve()
    if out.resolve() == resolved or resolved in out.resolve().parents:
        raise InvalidArgumentError(f"-o {out} lies in the checkpoint {source}; give a directory beside it")


def _bytes_at_most(plan: QuantizePlan) -> int:
    """Return what the output takes on disk at most: quantized layers at a byte a weight, the others in 4."""
    spec, weights = plan.checkpoint.spec, plan.checkpoint.weights
    total = sum(math.prod(weights.shape(name)) for name in weights.names())
    quantized = sum(one.in_features * one.out_features for one in plan.layers)
    width = 4 if plan.options.dtype == "float32" or spec.dtype == "float32" else 2
    return quantized + max(0, total - quantized) * width + _SLACK_BYTES


@contextlib.contextmanager
def _directory(plan: QuantizePlan, work: Path) -> Iterator[Path]:
    """Give the directory transformers loads: the checkpoint itself, or a GGUF file written out for the while."""
    if plan.path.is_dir():
        yield plan.path
        return
    unpacked = work / "source"
    gguf_to_directory(plan.path, unpacked)
    try:
        yield unpacked
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)


def quantize_model(
    plan: QuantizePlan, *, report: Report | None = None, directory: Path | None = None
) -> SimulatedModel:
    """Return the calibrated model, whose forward is a simulation of exactly what its save() writes.

    directory : that transformers loads, where it is not the checkpoint's own
    raises CheckpointError for weights or activations that have no scale, naming the layers; InvalidArgumentError for a
        device that is not there or a budget of bits that cannot be met
    """
    progress = Progress(report)
    with quiet(), explained():
        progress.stage("loading")
        return _quantize_model(plan, directory or plan.path, progress)


def _quantize_model(plan: QuantizePlan, directory: Path, progress: Progress) -> SimulatedModel:
    import torch

    from . import fp4
    from .calibrate import ActivationWatch, batches, check_scales, check_weights
    from .model import load_model, read_config, stored_dtype
    from .simulate import simulate

    options = plan.options
    torch.manual_seed(options.seed)
    fp4.register()
    names = [one.name for one in plan.layers]
    model = load_model(directory, options.device, options.quantize_lm_head)
    check_weights(model, names)
    facts: dict[str, Any] = {"source_config": read_config(directory), "notes": []}
    data: list[torch.Tensor] = []
    if plan.samples is not None:
        data = batches(plan.samples.ids, options.batch_size, next(model.parameters()).device)
        _judge_samples(model, data[0][:1], plan, facts)
    watch = ActivationWatch(names)
    if plan.is_auto:
        model = _auto(model, plan, data, watch, progress, facts)
    else:
        model = _one_recipe(model, plan, data, watch, progress, facts)
    check_scales(model, [one for one in names if _is_quantized(facts, one)])
    facts["largest_inputs"] = {name: value for name, value in watch.largest().items() if value >= 0}
    dtype = stored_dtype(directory / "config.json", options.dtype, model, plan.checkpoint.spec.dtype)
    return simulate(model, plan, dtype, facts)


def _is_quantized(facts: dict[str, Any], name: str) -> bool:
    chosen = facts.get("auto", {}).get("layers", {}).get(name)
    return chosen is None or chosen["recipe"] != "none"


def _judge_samples(model: Any, batch: torch.Tensor, plan: QuantizePlan, facts: dict[str, Any]) -> None:
    """Note where the model predicts the texts no better than chance: the tokenizer may be another model's."""
    from .calibrate import logits, mean_loss

    if batch.shape[1] < 2:
        return
    loss, chance = mean_loss(logits(model, batch), batch), math.log(plan.checkpoint.spec.vocab_size)
    facts["calibration_loss"] = loss
    if loss > chance:
        facts["notes"].append(
            f"the unquantized model predicts the calibration texts no better than chance (loss {loss:.1f} nats a "
            f"token, chance is {chance:.1f}): is the tokenizer this model's own?"
        )


def _one_recipe(
    model: Any,
    plan: QuantizePlan,
    data: Sequence[torch.Tensor],
    watch: Any,
    progress: Progress,
    facts: dict[str, Any],
) -> Any:
    recipe, options = plan.recipes[0], plan.options
    alpha = options.smoothquant if options.smoothquant is not None else DEFAULT_ALPHA
    if recipe.algorithm == "smoothquant":
        if options.smoothquant is None and plan.samples is not None:
            from .smoothquant import search_alpha

            alpha, facts["smoothquant_search"] = search_alpha(
                model,
                plan.samples,
                lambda net, one, some: _apply(net, plan, one, some, watch, progress, "none"),
                options.batch_size,
                progress,
            )
        facts["smoothquant_alpha"] = alpha
    stage = {"awq_lite": "calibrating and searching scales", "smoothquant": "calibrating and smoothing"}
    progress.stage(stage.get(recipe.algorithm, "calibrating" if data else "rounding"))
    return _apply(model, plan, alpha, data, watch, progress, options.kv_cache)


def _apply(
    model: Any,
    plan: QuantizePlan,
    alpha: float,
    data: Sequence[torch.Tensor],
    watch: Any,
    progress: Progress,
    kv_cache: Any,
) -> Any:
    import modelopt.torch.quantization as mtq

    from .calibrate import forward_loop

    config = modelopt_config(
        plan.recipes[0],
        plan.layers,
        group_size=plan.options.group_size,
        kv_cache=kv_cache,
        alpha=alpha,
        torch_fp4=True,  # on a GPU as well: the same numbers everywhere, and nothing to compile
    )
    search = data[: max(1, AWQ_SEARCH_WINDOWS // plan.options.batch_size)]
    return mtq.quantize(model, config, forward_loop(data, watch, progress, search) if data else None)


def _auto(
    model: Any,
    plan: QuantizePlan,
    data: Sequence[torch.Tensor],
    watch: Any,
    progress: Progress,
    facts: dict[str, Any],
) -> Any:
    from .auto import auto_quantize
    from .calibrate import forward_loop
    from .kv import calibrate_kv

    progress.stage("looking at the inputs")
    loop = forward_loop(data, watch, progress)
    loop(model)
    facts["auto"] = auto_quantize(model, plan, data, progress)
    if plan.options.kv_cache != "none":
        progress.stage("calibrating the KV cache")
        calibrate_kv(model, plan.options.kv_cache, loop)
    return model


def _report(
    plan: QuantizePlan, simulated: SimulatedModel, quant: dict[str, Any], directory: Path
) -> dict[str, Any]:
    options, facts = plan.options, simulated.facts
    samples = plan.samples
    chosen = facts.get("auto", {}).get("layers", {})
    layers = {}
    for one in plan.layers:
        name = chosen.get(one.name, {}).get("recipe", plan.name)
        recipe = next((r for r in plan.recipes if r.name == name), None)
        layers[one.name] = {
            "recipe": name,
            "group_size": 0 if recipe is None else group_size_of(recipe, one, options.group_size),
            **({"scores": chosen[one.name]["scores"]} if one.name in chosen else {}),
            **(
                {"largest_input": facts["largest_inputs"][one.name]}
                if one.name in facts["largest_inputs"]
                else {}
            ),
        }
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
        "calibration": None
        if samples is None
        else {
            "data": samples.source,
            "samples": len(samples.ids),
            "length": int(samples.ids.shape[1]),
            "documents": samples.num_documents,
            "loss": facts.get("calibration_loss"),
        },
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
        "layers": layers,
        "left_out": [one.name for one in plan.left_out],
        "bytes": sum(one.stat().st_size for one in directory.iterdir()),
        "versions": {
            name: importlib.metadata.version(name) for name in ("torch", "transformers", "nvidia-modelopt")
        },
        "notes": _notes(plan, facts),
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
