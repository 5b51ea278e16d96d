"""`plansmith verify`: are the engine's logits those of its references?"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._output import BuildProgress, print_json

if TYPE_CHECKING:
    from ..builder.verify import VerifyReport


_LEGEND = {
    "cpu": "cpu: the compiled plan",
    "reference": "reference: the same graph in ONNX Runtime",
    "unrounded": "unrounded: that without rounding of activations, the yardstick for the bound of cpu",
    "transformers": "transformers: the checkpoint in float32",
}


def verify(
    path: Annotated[
        Path, typer.Argument(help="An engine directory, a checkpoint directory or a .gguf file.")
    ],
    against: Annotated[
        str,
        typer.Option(
            help="reference (the graph in ONNX Runtime), transformers (the checkpoint in float32), or all"
        ),
    ] = "reference",
    checkpoint: Annotated[
        Path | None, typer.Option(help="Where an engine's checkpoint is now, if it was moved.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option("-p", "--precision", help="Of a checkpoint: what to compile it in.")
    ] = None,
    tokenizer_dir: Annotated[
        Path | None, typer.Option(help="Of a checkpoint that has no tokenizer (TensorRT-LLM's): where it is.")
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, max=1000, help="How many sequences.")] = 6,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence at most.")] = 96,
    seed: Annotated[int, typer.Option(min=0, help="Of the random sequences and the plan of steps.")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 = one a core that may be used.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Compare the cpu plan's logits with the reference, on mixed steps of prefill chunks and decode tokens.

    Of an engine's GPU targets it checks the files alone, and says so: their plans are not run.
    Ends with exit code 1 when a comparison fails its threshold.
    """
    from ..builder.verify import REFEREES, VERIFY, has_transformers
    from ..builder.verify import verify as run
    from ..builder.verify_subject import open_subject

    if against not in (*REFEREES, "all"):
        raise typer.BadParameter(f"it must be one of {', '.join(REFEREES)}, all", param_hint="--against")
    chosen = [against] if against != "all" else list(REFEREES)
    if against == "all" and not has_transformers():
        print("plansmith: note: transformers is not installed, so it is left out", file=sys.stderr)
        chosen = ["reference"]
    with BuildProgress(quiet=as_json) as progress:
        progress(VERIFY, "opening", 0, 0)
        with open_subject(path, checkpoint, precision, tokenizer_dir) as subject:
            report = run(
                subject,
                chosen,
                num_sequences=sequences,
                max_length=length,
                seed=seed,
                num_threads=threads,
                progress=progress,
            )
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    if not report.passed:
        sys.exit(1)


def _print(report: VerifyReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{report.precision}: {report.sequences} sequences in {report.steps} mixed steps",
        title_justify="left",
    )
    table.add_column("compared", no_wrap=True)
    for column in ("max |diff|", "mean KL", "max KL", "same best"):
        table.add_column(column, justify="right")
    table.add_column("")
    for one in report.comparisons:
        limit = one.threshold
        bounded = limit.top1 > 0 or math.isfinite(limit.max_diff) or math.isfinite(limit.mean_kl)
        table.add_row(
            f"{one.subject}, {one.referee}",
            _with_limit(f"{one.max_diff:.1e}", limit.max_diff),
            _with_limit(f"{one.mean_kl:.1e}", limit.mean_kl),
            f"{one.max_kl:.1e}",
            f"{100 * one.top1:.1f} %" + (f"\n>= {100 * limit.top1:.1f}" if limit.top1 else ""),
            ("pass" if one.passed else "FAIL") if bounded else "",
        )
    console = Console()
    console.print(table)
    names = {name for one in report.comparisons for name in (one.subject, one.referee)}
    console.print("; ".join(text for name, text in _LEGEND.items() if name in names), highlight=False)
    for note in report.notes:
        console.print(f"note: {note}", highlight=False)


def _with_limit(text: str, limit: float) -> str:
    return text + (f"\n<= {limit:.1e}" if math.isfinite(limit) else "")
