"""`plansmith build`: a checkpoint in, an engine directory out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._output import BuildProgress, print_json, size_text

if TYPE_CHECKING:
    from ..builder.build import BuildPlan, Judge
    from ..builder.build_report import BuildReport

_LIMITS = "Limits (trtllm-build's names)"


def build(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="A Hugging Face directory, a TensorRT-LLM checkpoint directory or a .gguf file.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", "--output-dir", help="The engine directory to write or add to.")
    ] = Path("engine_outputs"),
    target: Annotated[
        list[str] | None,
        typer.Option(
            "-t",
            "--target",
            help="What to build for, with commas between or repeated: cpu, sm80, sm86, sm89, sm120, rtx; on a "
            "machine that has the GPU sm90, sm100, sm103 (TensorRT 11) and sm80-tensorrt, sm86-tensorrt and so on",
        ),
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            "-p",
            "--precision",
            help="auto (the checkpoint's), fp32, fp16, bf16, int8, int4, or the recipe of a checkpoint that plansmith "
            "quantize made (fp8, fp8_per_channel, int8_sq, int8_wo, int4_awq, int4_wo, w4a8_awq, nvfp4, nvfp4_wo); see "
            "docs/quantization.md",
        ),
    ] = "auto",
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            help="Also the same model at this smaller precision, e.g. int4: it drafts for the first, whose tokens "
            "come faster and stay the same; in groups of its own default size. none = without. Default: as the "
            "directory has it.",
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size",
            help="Of --precision int8 and int4: the most columns of a weight that share a scale, 32, 64 or 128; on cpu "
            "of an input too. More are a little faster and smaller, and round more coarsely. Default: 32 on cpu; on "
            "GPUs int4 128, and int8 has one scale an output; also where the directory has other ones.",
        ),
    ] = None,
    weight_streaming: Annotated[
        bool,
        typer.Option(
            "--weight-streaming",
            help="Weights that do not fit on the GPU stay in host memory and come over in every step: slow, for models "
            "that do not fit otherwise. GPU targets only.",
        ),
    ] = False,
    max_batch_size: Annotated[
        int | None, typer.Option(help="Sequences in a step. Default 64.", rich_help_panel=_LIMITS)
    ] = None,
    max_num_tokens: Annotated[
        int | None, typer.Option(help="Packed tokens in a step. Default 2048.", rich_help_panel=_LIMITS)
    ] = None,
    max_input_len: Annotated[
        int | None, typer.Option(help="Tokens of a prompt. Default max_seq_len.", rich_help_panel=_LIMITS)
    ] = None,
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens of prompt and output. Default: the model's, at most 4096.", rich_help_panel=_LIMITS
        ),
    ] = None,
    max_beam_width: Annotated[
        int | None,
        typer.Option(
            help="Taken note of: any engine searches up to max_batch_size beams.", rich_help_panel=_LIMITS
        ),
    ] = None,
    tokens_per_block: Annotated[
        int | None, typer.Option(help="Positions in a KV block. Default 32.", rich_help_panel=_LIMITS)
    ] = None,
    kv_cache_type: Annotated[
        str | None, typer.Option(help="Only 'paged' in this version.", rich_help_panel=_LIMITS)
    ] = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            help="What KV pools of the cpu target hold: float16 (default but at fp32) or float32; fp8 and int8 are "
            "calibrated by plansmith quantize --kv-cache.",
            rich_help_panel=_LIMITS,
        ),
    ] = "auto",
    gate: Annotated[
        str | None,
        typer.Option(
            help="What the precision may cost against the unquantized model, e.g. 'kl<=0.05,top1>=0.95' (see "
            "plansmith eval); a build that costs more fails, and says which layers cost most."
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="With --gate: the unquantized checkpoint. Default: as CHECKPOINT records."),
    ] = None,
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity", help="With --gate: which layers cost most, in the report and on its page."
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Compile again, and replace an engine of another model.")
    ] = False,
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going",
            help="When a target fails or cannot be built here, still write the others, and fail in the end.",
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="GPU compilers side by side. Default: one a core, as memory allows."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, compile and write nothing.")
    ] = False,
    checkpoint_dir: Annotated[Path | None, typer.Option(help="The same as CHECKPOINT.")] = None,
    tokenizer_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where the tokenizer is, if not in the checkpoint: a TensorRT-LLM checkpoint has none."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Compile a checkpoint into an engine directory.

    Targets whose inputs have not changed are kept; new ones are added to an engine that is there.
    """
    from ..builder.build import build_engine, check_build, plan_build

    if (checkpoint is None) == (checkpoint_dir is None):
        raise typer.BadParameter("give one checkpoint, as CHECKPOINT or as --checkpoint-dir")
    limits = {
        "max_batch_size": max_batch_size,
        "max_num_tokens": max_num_tokens,
        "max_input_len": max_input_len,
        "max_seq_len": max_seq_len,
        "max_beam_width": max_beam_width,
        "tokens_per_block": tokens_per_block,
        "kv_cache_type": kv_cache_type,
    }
    source = checkpoint or checkpoint_dir
    assert source is not None
    plan = plan_build(
        source,
        target or ["cpu"],
        precision=precision,
        kv_cache_dtype=kv_cache_dtype,
        limits=limits,
        draft=draft,
        tokenizer=tokenizer_dir,
        weight_streaming=weight_streaming,
        group_size=group_size,
        keep_going=keep_going,
    )
    with BuildProgress(quiet=as_json) as progress:
        judge = _judge(plan, gate, against, sensitivity, progress)
        if dry_run:
            settled, needed_bytes = check_build(plan, output, force=force, progress=progress)
            _print_plan(settled, output, needed_bytes, as_json)
            return
        report = build_engine(
            plan,
            output,
            force=force,
            keep_going=keep_going,
            workers=workers,
            progress=progress,
            judge=judge,
        )
    if as_json:
        print_json(report.to_json())
    else:
        _print_report(report)


def _judge(
    plan: BuildPlan, gate: str | None, against: Path | None, sensitivity: bool, progress: BuildProgress
) -> Judge | None:
    """Return what holds a build to a gate; None without one. What is wrong with it is found here, before any work."""
    if gate is None:
        for flag, given in (("--against", against is not None), ("--sensitivity", sensitivity)):
            if given:
                raise typer.BadParameter("goes with --gate; give both", param_hint=flag)
        return None
    from ..builder.checkpoint import open_checkpoint
    from ..calibration.eval_subject import original_of
    from ..calibration.evaluate import check_comparable
    from ..calibration.gate import Gate, gate_build
    from ..calibration.sensitivity import measure_sensitivity

    bounds = Gate.parse(gate)
    longest = plan.limits.max_seq_len
    if against is None:
        original = original_of(plan.checkpoint, plan.recipe, longest)
    else:
        original = open_checkpoint(against, longest)
    check_comparable(plan.checkpoint, original)

    def judge(built: BuildPlan, cpu_plan: Path | None) -> dict[str, Any]:
        recipe = built.recipe if cpu_plan is None else built.recipe.on_cpu()
        report = gate_build(
            bounds,
            built.checkpoint,
            recipe,
            built.limits,
            plan_path=cpu_plan,
            against=original,
            progress=progress,
        )
        if sensitivity:
            costs = measure_sensitivity(built.checkpoint, recipe, original, progress=progress)
            report = dataclasses.replace(report, sensitivity=costs.to_json())
        return report.to_json()

    return judge


def _print_plan(plan: BuildPlan, output: Path, needed_bytes: int, as_json: bool) -> None:
    """Say what a build would do."""
    facts: dict[str, Any] = {
        "engine_dir": str(output),
        "checkpoint": str(plan.checkpoint.path),
        "model": plan.checkpoint.describe(),
        "precision": plan.recipe.name,
        **({} if plan.recipe.group_size is None else {"group_size": plan.recipe.group_size}),
        "draft": "none" if plan.draft is None else plan.draft.name,
        "limits": dataclasses.asdict(plan.limits),
        "targets": [one.name for one in plan.targets],
        **({"refused": {name: str(error) for name, error in plan.refused.items()}} if plan.refused else {}),
        "weight_streaming": plan.weight_streaming,
        "needed_disk_bytes": needed_bytes,
    }
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        shown = ", ".join(shown) if isinstance(shown, list) else shown
        print(f"{name.replace('_', ' ')}: {shown}")


def _print_report(report: BuildReport) -> None:
    from rich.console import Console
    from rich.table import Table

    precisions = report.precision + (f", draft {report.draft}" if report.draft else "")
    table = Table(title=f"{report.engine_dir}  ({precisions}, {report.seconds:.1f} s)", title_justify="left")
    for column in ("target", "status", "time", "plan", "peak memory", "compiler"):
        table.add_column(column, justify="right" if column in ("time", "plan", "peak memory") else "left")
    for name, one in report.targets.items():
        table.add_row(
            name,
            one.status,
            f"{one.seconds:.1f} s",
            size_text(one.plan_bytes),
            size_text(one.peak_rss_bytes),
            f"{one.compiler} {one.compiler_version}",
        )
    Console().print(table)
    for name, one in report.targets.items():
        facts = (("group size", one.group_size), ("KV pools", one.kv_dtype))
        if told := ", ".join(f"{fact} {value}" for fact, value in facts if value):
            print(f"{name}: {told}")
        for note in one.notes:
            print(f"{name}: {note}")
