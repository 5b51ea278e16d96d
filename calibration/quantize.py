"""Quantizes a checkpoint: samples through ModelOpt, and the result written whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..builder.checkpoint import open_checkpoint
from ..builder.checkpoint.hf_write import gguf_to_directory
from ..builder.engine_dir import check_source_stays, destination, replacing
from ..builder.limits import make_limits
from ..builder.machine import PeakMemory, available_memory_bytes, peak_rss_bytes
from ..builder.progress import Progress as Report
from ..builder.targets.registry import choose_precision, find_targets
from ..runtime.errors import CheckpointError, InvalidArgumentError
from .gate import Gate, gate_build
from .layers import LM_HEAD
from .options import REPORT_NAME, QuantizeOptions, QuantizePlan, plan_quantization
from .progress import Progress
from .quantize_report import make_report
from .recipes import DEFAULT_ALPHA, modelopt_config
from .third_party import explained, quiet

if TYPE_CHECKING:
    import torch

    from .calibrate import ActivationWatch
    from .simulate import SimulatedModel

__all__ = ["QuantizeOptions", "plan_quantization", "quantize_checkpoint", "quantize_model"]

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
    before = _states(Path(path))
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
        if _states(plan.path) != before:
            raise CheckpointError(
                f"{plan.path}: files changed while it was quantized, so some weights may be of one version and some of "
                "another; run it again when nothing writes there"
            )
        facts = make_report(plan, simulated, quant, work.path)
        del simulated  # the model's memory, before the engine's
        if gate is not None:
            facts["evaluation"] = _judge(plan, work.path, gate, report)
        facts["seconds"] = round(time.monotonic() - began, 1)
        facts["peak_memory_bytes"] = peak_rss_bytes()  # inside: the report is part of what is swapped in
        text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
        (work.path / REPORT_NAME).write_text(text, encoding="utf-8")
    return facts


def _states(source: Path) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and time of change of the source's files that make the model; {} where there are none."""
    files = source.iterdir() if source.is_dir() else [source]
    found = {
        one.name: one.stat()
        for one in files
        if one.suffix in (".json", ".safetensors", ".gguf") and one.is_file()
    }
    return {name: (one.st_ino, one.st_size, one.st_mtime_ns) for name, one in found.items()}


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
    """Refuse to write over the source, into it, or over a directory that it lies in."""
    resolved = source.resolve()
    if out.resolve() == resolved or resolved in out.resolve().parents:
        raise InvalidArgumentError(f"-o {out} lies in the checkpoint {source}; give a directory beside it")
    check_source_stays(source, out)


def _bytes_at_most(plan: QuantizePlan) -> int:
    """Return what the output takes on disk at most: quantized layers at a byte a weight, the others in 4."""
    spec, weights = plan.checkpoint.spec, plan.checkpoint.weights
    total = sum(math.prod(weights.shape(name)) for name in weights.names())
    quantized = sum(one.in_features * one.out_features for one in plan.layers)
    if spec.tie_embeddings and any(one.name == LM_HEAD for one in plan.layers):
        total += spec.vocab_size * spec.hidden_size  # the table stays, the head is a copy of it
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
    from .calibrate import ActivationWatch, batches, check_scales, check_weights, judge_samples
    from .model import load_model, read_config, stored_dtype
    from .simulate import simulate
    from .smoothquant import lift_zero_columns

    options = plan.options
    torch.manual_seed(options.seed)
    fp4.register()
    names = [one.name for one in plan.layers]
    model = load_model(directory, options.device, options.quantize_lm_head)
    check_weights(model, names)
    if any(one.algorithm == "smoothquant" for one in plan.recipes):
        lift_zero_columns(model, names)
    facts: dict[str, Any] = {"source_config": read_config(directory), "notes": []}
    data: list[torch.Tensor] = []
    if plan.samples is not None:
        data = batches(plan.samples.ids, options.batch_size, next(model.parameters()).device)
        judge_samples(model, data[0][:1], plan.checkpoint.spec.vocab_size, facts)
    watch = ActivationWatch(names)
    run = _Calibration(plan, data, watch, progress, facts)
    model = _auto(model, run) if plan.is_auto else _one_recipe(model, run)
    check_scales(model, [one for one in names if _is_quantized(facts, one)])
    facts["largest_inputs"] = {name: value for name, value in watch.largest().items() if value >= 0}
    dtype = stored_dtype(options.dtype, plan.checkpoint.spec.dtype)
    return simulate(model, plan, dtype, facts)


def _is_quantized(facts: dict[str, Any], name: str) -> bool:
    chosen = facts.get("auto", {}).get("layers", {}).get(name)
    return chosen is None or chosen["recipe"] != "none"


@dataclasses.dataclass(frozen=True)
class _Calibration:
    """What every way to calibrate needs.

    data : batches (B, L) of token ids; [] where nothing is calibrated
    facts : filled with what is found
    """

    plan: QuantizePlan
    data: Sequence[torch.Tensor]
    watch: ActivationWatch
    progress: Progress
    facts: dict[str, Any]


def _one_recipe(model: Any, run: _Calibration) -> Any:
    recipe, options = run.plan.recipes[0], run.plan.options
    alpha = DEFAULT_ALPHA if options.smoothquant is None else options.smoothquant
    if recipe.algorithm == "smoothquant":
        if options.smoothquant is None:
            alpha = _searched_alpha(model, run)
        run.facts["smoothquant_alpha"] = alpha
    stage = {"awq_lite": "calibrating and searching scales", "smoothquant": "calibrating and smoothing"}
    run.progress.stage(stage.get(recipe.algorithm, "calibrating" if run.data else "rounding"))
    return _apply(model, run, alpha, run.data, options.kv_cache)


def _searched_alpha(model: Any, run: _Calibration) -> float:
    """Return SmoothQuant's best alpha; the usual one where a second copy of the model does not fit into memory."""
    from .smoothquant import search_alpha

    assert run.plan.samples is not None
    copy_bytes = sum(one.numel() * one.element_size() for one in model.parameters())
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu and copy_bytes > available_memory_bytes():
        run.facts["notes"].append(
            f"SmoothQuant's alpha is {DEFAULT_ALPHA:g} and was not searched: a second copy of the model needs "
            f"{copy_bytes / 1e9:.0f} GB of memory; give --smoothquant to choose it"
        )
        return DEFAULT_ALPHA
    alpha, run.facts["smoothquant_search"] = search_alpha(
        model,
        run.plan.samples,
        lambda net, one, some: _apply(net, run, one, some, "none"),
        run.plan.options.batch_size,
        run.progress,
    )
    return alpha


def _apply(model: Any, run: _Calibration, alpha: float, data: Sequence[torch.Tensor], kv_cache: str) -> Any:
    import modelopt.torch.quantization as mtq

    from .calibrate import forward_loop

    options = run.plan.options
    config = modelopt_config(
        run.plan.recipes[0],
        run.plan.layers,
        group_size=options.group_size,
        kv_cache=kv_cache,
        alpha=alpha,
        torch_fp4=True,  # on a GPU as well: the same numbers everywhere, and nothing to compile
    )
    search = data[: max(1, AWQ_SEARCH_WINDOWS // options.batch_size)]
    return mtq.quantize(model, config, forward_loop(data, run.watch, run.progress, search) if data else None)


def _auto(model: Any, run: _Calibration) -> Any:
    from .auto import auto_quantize
    from .calibrate import forward_loop
    from .kv import calibrate_kv

    kv_cache = run.plan.options.kv_cache
    run.progress.stage("looking at the inputs")
    loop = forward_loop(run.data, run.watch, run.progress)
    loop(model)
    run.facts["auto"] = auto_quantize(model, run.plan, run.data, run.progress)
    if kv_cache != "none":
        run.progress.stage("calibrating the KV cache")
        calibrate_kv(model, kv_cache, loop)
    return model
