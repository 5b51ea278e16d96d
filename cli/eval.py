"""`plansmith eval`: what an engine's precision costs in quality."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._files import check_output, whole_file
from ._options import Weights
from ._output import BuildProgress, print_json

if TYPE_CHECKING:
    from ..calibration.evaluate import EvalReport


def evaluate(
    path: Annotated[
        Path, typer.Argument(help="An engine directory, a checkpoint directory or a .gguf file.")
    ],
    against: Annotated[
        Path | None,
        typer.Option(help="The unquantized checkpoint. Default: what PATH was made from, as it records."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Where an engine's checkpoint is now, if it was moved.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option("-p", "--precision", help="Of a checkpoint: what to compile it in.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help='A .txt file, or .jsonl with "text" a line. Default: one of our own.')
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of the text at most.")] = 4096,
    contexts: Annotated[
        str | None,
        typer.Option(
            help="Lengths of windows in tokens, with commas between. Default 128,1024 where they fit."
        ),
    ] = None,
    tasks: Annotated[bool, typer.Option("--tasks", help="Also a small set of tasks.")] = False,
    gate: Annotated[
        str | None,
        typer.Option(help="Bounds to keep, e.g. 'kl<=0.05,top1@long>=0.95'; exit code 1 if they are not."),
    ] = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Also which layers cost most: a compile and a run a layer.")
    ] = False,
    sensitivity_mode: Annotated[
        str, typer.Option(help="alone (one layer quantized), kept (all but one), or both.")
    ] = "alone",
    sensitivity_tokens: Annotated[
        int, typer.Option(min=8, help="Tokens of the text that each layer is measured on.")
    ] = 256,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 = one a core that may be used.")] = 0,
    weights: Weights = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write a page for people to this file.")] = None,
) -> None:
    """Compare an engine with the unquantized model in float32: perplexity, KL, agreement, on short and long contexts.

    Ends with exit code 1 when a --gate is given and not kept.
    """
    from ..builder.checkpoint import open_checkpoint
    from ..calibration.eval_subject import open_eval_subject, original_of
    from ..calibration.evaluate import EVAL, EvalOptions, evaluate_plan
    from ..calibration.gate import Gate
    from ..calibration.sensitivity import layers_that_cost, measure_sensitivity

    bounds = None if gate is None else Gate.parse(gate)
    if sensitivity_mode not in ("alone", "kept", "both"):
        raise typer.BadParameter("it must be one of alone, kept, both", param_hint="--sensitivity-mode")
    if html is not None:
        check_output("--html", html)
    options = EvalOptions(
        text=text,
        length=length,
        contexts=_lengths(contexts),
        tasks=tasks,
        num_threads=threads,
        weights=weights,
    )
    options = options if bounds is None else bounds.options(options)
    with BuildProgress(quiet=as_json) as progress:
        progress(EVAL, "opening", 0, 0)
        with open_eval_subject(path, checkpoint, precision) as subject:
            max_seq_len = subject.limits.max_seq_len
            if sensitivity:
                layers_that_cost(subject.checkpoint.spec, subject.recipe)  # refused before any work
            original = (
                original_of(subject.checkpoint, subject.recipe, max_seq_len)
                if against is None
                else open_checkpoint(against, max_seq_len)
            )
            report = evaluate_plan(
                subject.plan, subject.checkpoint, subject.recipe, subject.limits, original, options, progress
            )
            report = dataclasses.replace(report, notes=(*subject.notes, *report.notes))
            if sensitivity:
                costs = measure_sensitivity(
                    subject.checkpoint,
                    subject.recipe,
                    original,
                    mode=sensitivity_mode,  # type: ignore[arg-type]
                    text=text,
                    num_tokens=sensitivity_tokens,
                    num_threads=threads,
                    weights=weights,
                    progress=progress,
                )
                report = dataclasses.replace(report, sensitivity=costs.to_json())
    failures = [] if bounds is None else bounds.check(report)
    if bounds is not None:
        report = dataclasses.replace(report, gate=bounds.verdict(report))
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    if html is not None:
        _write_html(html, path, report)
    for failure in failures:
        print(f"plansmith: gate: {failure}", file=sys.stderr)
    if failures:
        sys.exit(1)


def _lengths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} must be whole numbers with commas between, e.g. 128,1024", param_hint="--contexts"
        ) from None


def _write_html(page: Path, path: Path, report: EvalReport) -> None:
    """Write the page: of an engine with how it was built, of a checkpoint the evaluation alone."""
    from ..builder.build_report import REPORT_NAME
    from ..builder.report_html import render
    from ..runtime.file_kind import no_file

    built: dict[str, Any] | None = None
    try:
        if no_file(path / REPORT_NAME) is None:  # a pipe would never end
            built = json.loads((path / REPORT_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        built = None
    with whole_file(page) as out:
        out.write(render(built, report.to_json()).encode())


def _print(report: EvalReport) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"{report.precision} against {report.against} in float32", title_justify="left")
    table.add_column("context", no_wrap=True)
    for column in ("tokens", "perplexity", "original", "KL", "KL 99 %", "same best"):
        table.add_column(column, justify="right")
    rows = [*report.contexts, report.overall] if len(report.contexts) > 1 else report.contexts
    for one in rows:
        table.add_row(
            str(one.context or "all"),
            str(one.tokens),
            f"{one.ppl:.4g}",
            f"{one.ppl_reference:.4g}",
            f"{one.kl:.2e}",
            f"{one.kl_p99:.2e}",
            f"{100 * one.top1:.1f} %",
        )
    console.print(table)
    if report.greedy is not None and report.greedy.lengths:
        console.print(
            f"greedy outputs agree for {report.greedy.mean:.1f} tokens of {report.greedy.most}",
            highlight=False,
        )
    if report.tasks is not None:
        console.print(_tasks_table(report))
    if report.sensitivity is not None:
        console.print(_layers_table(report.sensitivity))
    if report.gate is not None:
        for one in report.gate["bounds"]:
            got = "not a number" if one["got"] is None else f"{one['got']:.4g}"
            word = "pass" if one["passed"] else "FAIL"
            console.print(
                f"gate: {one['metric']} {one['compare']} {one['wanted']:g}: {got}, {word}", highlight=False
            )
    console.print(
        "KL: of the original and the engine, nats a token; each scored token has half a window before it",
        highlight=False,
    )
    for note in report.notes:
        console.print(f"note: {note}", highlight=False)


def _tasks_table(report: EvalReport) -> Any:
    from rich.table import Table

    assert report.tasks is not None
    table = Table("task")
    for column in ("items", "right", "original", "same choice"):
        table.add_column(column, justify="right")
    for one in (*report.tasks.tasks, report.tasks.overall):
        shares = (one.accuracy, one.accuracy_reference, one.agreement)
        table.add_row(one.task, str(one.items), *(f"{100 * share:.1f} %" for share in shares))
    return table


def _layers_table(found: dict[str, Any], count: int = 10) -> Any:
    from rich.table import Table

    layers = sorted(found["layers"], key=lambda one: one["cost"], reverse=True)[:count]
    table = Table(
        title=f"the {len(layers)} layers that cost most, of {len(found['layers'])}; all together: KL {found['kl']:.2e}",
        title_justify="left",
    )
    table.add_column("layer")
    for column in ("KL alone", "KL without it", "bytes", "in 16 bits"):
        table.add_column(column, justify="right")
    for one in layers:
        shown = ["" if one[key] is None else f"{one[key]:.2e}" for key in ("kl_alone", "kl_kept")]
        table.add_row(one["layer"], *shown, f"{one['weight_bytes']:,}", f"{one['float_bytes']:,}")
    return table
