"""`plansmith quantize`: a checkpoint in, a quantized checkpoint out."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Annotated, Any

import typer

from ..runtime.errors import InvalidArgumentError
from ._output import BuildProgress, print_json, size_text

_DATA = "Calibration data"
_AUTO = "Mixed precision"


def quantize(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="A Hugging Face directory or a .gguf file, not quantized yet.", show_default=False
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", "--output-dir", "--export-path", help="The directory to write.")
    ] = Path("exported_model"),
    recipe: Annotated[
        str,
        typer.Option(
            "-r",
            "--recipe",
            "--qformat",
            help="fp8, fp8_per_channel, int8_sq, int8_wo, int4_awq, int4_wo, w4a8_awq, nvfp4, nvfp4_wo",
        ),
    ] = "fp8",
    kv_cache: Annotated[
        str,
        typer.Option("--kv-cache", "--kv-cache-dtype", help="none, fp8 or int8: what the KV cache holds."),
    ] = "none",
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", help="Layers to leave as they are, e.g. '*down_proj'; may be repeated."),
    ] = None,
    quantize_lm_head: Annotated[
        bool, typer.Option("--quantize-lm-head", help="Quantize the output layer too.")
    ] = False,
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size",
            "--awq-block-size",
            help="Inputs that share a scale, of int4. Default: 128, 64 or 32, the largest that divides.",
        ),
    ] = None,
    smoothquant: Annotated[
        str, typer.Option("--smoothquant", help="Of int8_sq: 0 to 1, or auto, which tries 0.5 to 0.9.")
    ] = "auto",
    calib_data: Annotated[
        str | None,
        typer.Option(
            "--calib-data",
            "--calib-dataset",
            help='A .txt file, or .jsonl with {"text": ...} or {"messages": [...]} a line. Default: a shipped set of '
            "prose, code, mathematics and chats in several languages.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    calib_size: Annotated[int, typer.Option("--calib-size", help="Samples.", rich_help_panel=_DATA)] = 64,
    calib_length: Annotated[
        int,
        typer.Option(
            "--calib-length",
            "--calib-max-seq-length",
            help="Tokens of a sample. Texts are packed end to end, so no sample is padded.",
            rich_help_panel=_DATA,
        ),
    ] = 256,
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="Samples at a time.", rich_help_panel=_DATA)
    ] = 8,
    seed: Annotated[
        int, typer.Option("--seed", help="Of the order of the texts.", rich_help_panel=_DATA)
    ] = 1234,
    auto_bits: Annotated[
        float | None,
        typer.Option(
            "--auto-bits",
            "--auto-quantize-bits",
            help="Choose the recipe of each layer by its sensitivity, with this many bits a weight in the mean.",
            rich_help_panel=_AUTO,
        ),
    ] = None,
    auto_recipes: Annotated[
        str | None,
        typer.Option(
            "--auto-recipes",
            "--autoq-format",
            help="What to choose from, with commas between. Default: int4_awq,fp8. Unquantized is always a choice.",
            rich_help_panel=_AUTO,
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", help="Of what is not quantized: auto (as it is), float32, float16 or bfloat16."
        ),
    ] = "auto",
    device: Annotated[str, typer.Option("--device", help="Where to calibrate: cpu or cuda.")] = "cpu",
    gate: Annotated[
        str | None,
        typer.Option(
            help="What it may cost against the unquantized model, e.g. 'kl<=0.05,top1>=0.95' (see plansmith eval); "
            "where it costs more nothing is written, and the layers that cost most are named."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a quantized checkpoint that is there.")
    ] = False,
    checkpoint_dir: Annotated[
        Path | None, typer.Option("--model-dir", "--checkpoint-dir", help="The same as CHECKPOINT.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Quantize a checkpoint with NVIDIA ModelOpt, into a checkpoint that plansmith build takes as it is.

    The output is the unified Hugging Face form, which TensorRT-LLM and others read as well.
    """
    if (checkpoint is None) == (checkpoint_dir is None):
        raise typer.BadParameter("give one checkpoint, as CHECKPOINT or as --model-dir")
    from ..calibration.gate import Gate
    from ..calibration.quantize import QuantizeOptions, quantize_checkpoint

    source = checkpoint or checkpoint_dir
    assert source is not None
    bounds = None if gate is None else Gate.parse(gate)
    options = QuantizeOptions(
        recipe=recipe,
        kv_cache=kv_cache,
        exclude=tuple(exclude or ()),
        quantize_lm_head=quantize_lm_head,
        group_size=group_size,
        smoothquant=_alpha(smoothquant),
        calib_data=calib_data,
        calib_size=calib_size,
        calib_length=calib_length,
        batch_size=batch_size,
        seed=seed,
        dtype=dtype,
        device=device,
        auto_bits=auto_bits,
        auto_recipes=tuple(one.strip() for one in auto_recipes.split(",")) if auto_recipes else (),
    )
    with BuildProgress(quiet=as_json) as progress:
        report = quantize_checkpoint(source, output, options, force=force, gate=bounds, report=progress)
    if as_json:
        print_json(report)
    else:
        _print_report(output, report)


def _alpha(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        return float(text)
    except ValueError:
        raise InvalidArgumentError(
            f"--smoothquant is {text!r}, it must be a number from 0 to 1, or auto"
        ) from None


def _print_report(output: Path, report: dict[str, Any]) -> None:
    counts = collections.Counter(one["recipe"] for one in report["layers"].values())
    layers = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    print(f"{output}: {size_text(report['bytes'])}, layers: {layers}; {len(report['left_out'])} left out")
    data = report["calibration"]
    if data is not None:
        print(
            f"calibrated with {data['samples']} samples of {data['length']} tokens ({data['data']}), "
            f"seed {report['seed']}"
        )
    if "smoothquant_alpha" in report:
        tried = report.get("smoothquant_search")
        why = "; KL of each tried: " + ", ".join(f"{a}: {kl:.4f}" for a, kl in tried.items()) if tried else ""
        print(f"SmoothQuant alpha {report['smoothquant_alpha']:g}{why}")
    if "effective_bits" in report:
        print(f"{report['effective_bits']:.2f} bits a weight in the quantized layers")
        _print_sensitive(report["layers"])
    if report["kv_cache"] != "none":
        print(f"KV cache: {report['kv_cache']}")
    print(f"{report['seconds']:.0f} s, peak memory {size_text(report['peak_memory_bytes'])}")
    for note in report["notes"]:
        print(f"note: {note}")
    print(f"next: plansmith build {output} -o ENGINE_DIR; plansmith eval ENGINE_DIR")


def _print_sensitive(layers: dict[str, Any], count: int = 5) -> None:
    """Say which layers the search found most sensitive, and what they got."""
    scored = {
        name: max(one["scores"].values(), default=0.0) for name, one in layers.items() if "scores" in one
    }
    for name in sorted(scored, key=lambda name: -scored[name])[:count]:
        print(f"  sensitive: {name} ({scored[name]:.2e}) -> {layers[name]['recipe']}")
