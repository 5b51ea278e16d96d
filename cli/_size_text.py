"""What `plansmith size` prints for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..builder.weight_sizes import shape_of
from ..runtime.manifest import Manifest
from ..sizing.memory import Load
from ._output import size_text
from ._size_model import Checkpoint
from ._size_rows import Row

_WIDEST = 1000
_FACTS = (
    "family",
    "num_parameters",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
)
_COLUMNS = (
    "GPU",
    "precision",
    "plan file",
    "weights",
    "KV cache",
    "activations",
    "reserve",
    "total",
    "of",
    "fits",
    "sequences",
    "prefill",
    "decode",
    "decode, all",
)


def model_facts(model: Checkpoint | Manifest) -> dict[str, Any]:
    """Return a model's shape as plain values."""
    if isinstance(model, Manifest):
        numbers, path = dataclasses.asdict(model.model), model.root
    else:
        numbers, path = dataclasses.asdict(shape_of(model.spec)), model.path
        numbers |= {"family": model.spec.family, "num_parameters": model.num_parameters}
    return {"path": str(path), **{name: numbers[name] for name in _FACTS}}


def print_rows(model: Checkpoint | Manifest, load: Load, rows: Sequence[Row], efficiency: float) -> None:
    """Print the model, the load, a row a device and recipe, and what has to be known to read them."""
    from rich.console import Console
    from rich.table import Table

    facts = model_facts(model)
    print(
        f"{facts['path']}: {facts['family']}, {facts['num_parameters'] / 1e9:.2f} billion parameters, "
        f"{facts['num_layers']} layers, {facts['num_heads']} heads ({facts['num_kv_heads']} KV) of {facts['head_dim']}"
    )
    print(
        f"{load.sequences} sequence{'s' * (load.sequences > 1)} of {load.context} tokens; max_batch_size "
        f"{load.max_batch_size}, max_num_tokens {load.max_num_tokens}, tokens_per_block {load.tokens_per_block}"
    )
    table = Table()
    for number, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if number < 2 else "right", no_wrap=True)
    sized = [row for row in rows if not row.reason]
    for row in sized:
        table.add_row(*_cells(row))
    if sized:
        # Lines that a narrow terminal breaks are better than numbers that are cut off.
        needed = Console(width=_WIDEST).measure(table).maximum
        Console(width=max(Console().width, needed)).print(table)
    for line in _notes(model, rows, efficiency):
        print(line)


def _cells(row: Row) -> list[str]:
    use = row.use
    assert use is not None
    return [
        row.device,
        row.precision,
        "-" if row.plan_file_bytes is None else size_text(row.plan_file_bytes),
        size_text(use.weights),
        size_text(use.kv),
        size_text(use.activations + use.logits),
        size_text(use.reserve),
        size_text(use.total),
        size_text(row.memory_bytes),
        "yes" if row.fits else f"on {row.devices}" if row.devices else "no",
        str(row.max_sequences),
        *(_speed(one) for one in (row.prefill_tokens_s, row.decode_tokens_s, row.decode_batch_tokens_s)),
    ]


def _speed(tokens_s: float | None) -> str:
    """Return tokens a second, three digits of it: no prediction is better."""
    if tokens_s is None:
        return "-"
    return f"{tokens_s:,.0f}" if tokens_s >= 100 else f"{tokens_s:.1f}"


def _notes(model: Checkpoint | Manifest, rows: Sequence[Row], efficiency: float) -> list[str]:
    lines = [
        "activations: with logits; on GPUs an estimate. sequences: of that length that fit at a time, at most "
        "max_batch_size.",
        "prefill, decode (one sequence), decode, all (as many as fit): tokens a second, "
        + (
            "an upper bound by the datasheet (efficiency 1)."
            if efficiency == 1
            else f"{efficiency:g} of what the datasheet bounds."
        ),
    ]
    if isinstance(model, Checkpoint) and model.note:
        lines.append(f"note: {model.note}.")
    many = [row for row in rows if row.split and not row.reason]
    lines += [f"{row.device} {row.precision}: {row.split}" for row in many]
    if many:
        lines.append(
            "This version runs a model on one device: `on N` is the arithmetic of tensor parallelism alone."
        )
    lines += [f"{row.device} {row.precision}: {row.reason}" for row in rows if row.reason]
    return lines
