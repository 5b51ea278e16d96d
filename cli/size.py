"""`plansmith size`: what a model takes of each GPU's memory, and how fast it can be at most, before it is built."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._options import Json

if TYPE_CHECKING:
    from ..builder.scheme import KvFormat
    from ..runtime.manifest import Manifest
    from ..sizing.memory import Load
    from ..sizing.skus import Sku
    from ._size_model import Checkpoint
    from ._size_plans import Plan, Refused

_KV_TYPES = ("auto", "float16", "fp8", "int8")
_DEFAULT_CONTEXT = 4096


def size(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint, a directory with config.json alone or that file, a .gguf file, or an engine directory.",
        ),
    ],
    sku: Annotated[
        list[str] | None,
        typer.Option(
            "--sku",
            help="GPUs, with commas between or repeated, e.g. l40s,h100; cpu = this machine. Default: all GPUs.",
        ),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            "--precision",
            "-p",
            help="Recipes, of build's --precision and quantize's --recipe; default: fp16, int8, fp8, int4 and nvfp4 "
            "where a GPU takes them.",
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option("--kv-cache-dtype", help="What the KV cache holds: auto, float16, fp8 or int8.")
    ] = "auto",
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            min=2,
            help="Tokens of a sequence, prompt and output; default: the model's most, up to 4096.",
        ),
    ] = None,
    sequences: Annotated[
        int, typer.Option("--sequences", "--batch", min=1, help="Sequences that run at a time.")
    ] = 1,
    max_batch_size: Annotated[
        int | None, typer.Option("--max-batch-size", min=1, help="Limit of the plan; default 64, as build's.")
    ] = None,
    max_num_tokens: Annotated[
        int | None,
        typer.Option("--max-num-tokens", min=1, help="Limit of the plan; default 2048, as build's."),
    ] = None,
    tokens_per_block: Annotated[
        int | None,
        typer.Option("--tokens-per-block", help="Of the KV cache: 8, 16, 32, 64 or 128; default 32."),
    ] = None,
    efficiency: Annotated[
        float,
        typer.Option(
            "--efficiency",
            help="Share of a GPU's bandwidth and peaks that is reached, as measured; 1 = a bound.",
        ),
    ] = 1.0,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            "--memory-bytes",
            metavar="SIZE",
            help="Memory of the device, instead of the GPU's own: bytes, or a size such as 16GiB or 500MB.",
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option("--threads", min=0, max=1024, help="Of --sku cpu; 0 = one a core.")
    ] = 0,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw memory over --plot-over into this .svg or .png file.")
    ] = None,
    plot_over: Annotated[
        str, typer.Option("--plot-over", help="What --plot varies: sequences or context.")
    ] = "sequences",
    as_json: Json = False,
) -> None:
    """Predict memory and speed of a model on GPUs, from its shape alone.

    Memory is what the plan and its KV cache take for that many sequences of that length. Speeds are upper bounds: what
    has to be read and multiplied, by the datasheet's numbers. More in docs/sizing.md.
    """
    from ..fleet.budget import parse_bytes
    from ..runtime.manifest import Manifest
    from ..sizing.roofline import check_efficiency
    from . import _size_plot, _size_text
    from ._output import print_json
    from ._size_model import check_context, most_positions, open_model
    from ._size_plans import Refused
    from ._size_rows import size_row

    if plot is not None:
        _size_plot.check(plot, plot_over)
    check_efficiency(efficiency)
    memory_bytes = None if memory is None else parse_bytes(memory)
    kv = _kv_format(kv_cache_dtype)
    skus = _skus(sku)
    found = open_model(model, context)
    load = _load(found, context, sequences, max_batch_size, max_num_tokens, tokens_per_block)
    check_context(found, load.context)
    plans = _plans(found, skus, _names(precision), kv, load)
    _check_any(plans, kv_cache_dtype)
    rows = [
        size_row(one, load, efficiency=efficiency, memory_bytes=memory_bytes, threads=threads)
        for one in plans
    ]
    if plot is not None:
        drawn = [one for one in plans if not isinstance(one, Refused)]
        _size_plot.draw(drawn, load, plot, plot_over, most_positions(found), memory_bytes, threads)
        print(f"plansmith: the drawing is in {plot}", file=sys.stderr)
    if as_json:
        print_json(
            {
                "model": _size_text.model_facts(found),
                "load": dataclasses.asdict(load),
                "efficiency": efficiency,
                "note": "" if isinstance(found, Manifest) else found.note,
                "rows": [row.as_json() for row in rows],
            }
        )
        return
    _size_text.print_rows(found, load, rows, efficiency)


def _check_any(plans: Sequence[Plan | Refused], kv_cache_dtype: str) -> None:
    """Raise UnsupportedError where there is no plan at all, with the reason of the first that was named."""
    from ..runtime.errors import UnsupportedError
    from ._size_plans import Refused

    reasons = [one.reason for one in plans if isinstance(one, Refused)]
    if len(reasons) == len(plans):
        raise UnsupportedError(
            reasons[0]
            if reasons
            else f"none of these GPUs takes a recipe of the default list with --kv-cache-dtype {kv_cache_dtype}; name "
            "others in --sku or --precision"
        )


def _names(words: Sequence[str] | None) -> list[str] | None:
    """Return names that may have commas between; None = not given."""
    from ..runtime.errors import InvalidArgumentError

    if words is None:
        return None
    names = [name.strip() for word in words for name in word.split(",") if name.strip()]
    if not names:
        raise InvalidArgumentError("a list of names is empty; give one or more, or leave the option out")
    return list(dict.fromkeys(names))


def _skus(words: Sequence[str] | None) -> list[Sku | None] | None:
    """Return the GPUs that were named, each once, None for cpu; None where none was."""
    from ..sizing.skus import find_sku

    names = _names(words)
    if names is None:
        return None
    found = [None if name.lower() == "cpu" else find_sku(name) for name in names]
    return list({sku and sku.name: sku for sku in found}.values())


def _kv_format(name: str) -> KvFormat | None:
    from ..runtime.errors import InvalidArgumentError

    if name not in _KV_TYPES:
        raise InvalidArgumentError(
            f"--kv-cache-dtype {name!r} is not known; choose one of {', '.join(_KV_TYPES)}"
        )
    found: Any = name
    return None if name == "auto" else found


def _load(
    model: Checkpoint | Manifest,
    context: int | None,
    sequences: int,
    max_batch_size: int | None,
    max_num_tokens: int | None,
    tokens_per_block: int | None,
) -> Load:
    """Return what is to be served; limits that are not given grow with the sequences, an engine has its own."""
    from ..builder.limits import make_limits
    from ..runtime.errors import InvalidArgumentError
    from ..runtime.manifest import Manifest
    from ..sizing.memory import Load
    from ._size_model import check_context, most_positions

    positions = most_positions(model)
    wanted = context or (positions if isinstance(model, Manifest) else min(positions, _DEFAULT_CONTEXT))
    check_context(model, wanted)
    if isinstance(model, Manifest):
        if any(one is not None for one in (max_batch_size, max_num_tokens, tokens_per_block)):
            raise InvalidArgumentError(
                f"{model.root} is an engine, whose limits were fixed when it was built; leave --max-batch-size, "
                "--max-num-tokens and --tokens-per-block out, or give its checkpoint"
            )
        own = model.limits
        load = Load(
            wanted, sequences, own.max_batch_size, own.max_num_tokens, own.tokens_per_block, own.max_seq_len
        )
    else:
        batch = max_batch_size or max(64, sequences)
        tokens = max_num_tokens or max(2048, batch)
        load = Load(wanted, sequences, batch, tokens, tokens_per_block or 32)
        load.check()
        try:
            make_limits(
                positions,
                max_batch_size=batch,
                max_num_tokens=tokens,
                max_seq_len=wanted,
                tokens_per_block=load.tokens_per_block,
            )
        except InvalidArgumentError as error:  # which spells options as trtllm-build does
            text = re.sub(r"--[a-z_]+", lambda found: found[0].replace("_", "-"), str(error))
            raise InvalidArgumentError(text) from None
    load.check()
    return load


def _plans(
    model: Checkpoint | Manifest,
    skus: Sequence[Sku | None] | None,
    names: list[str] | None,
    kv: KvFormat | None,
    load: Load,
) -> list[Plan | Refused]:
    """Return the plans on the GPUs that were named; None = on all, and of an engine the cpu plan too."""
    from ..builder.limits import Limits
    from ..runtime.errors import InvalidArgumentError
    from ..runtime.manifest import Manifest
    from ..sizing.skus import SKUS
    from ._size_plans import Refused, checkpoint_plans, engine_plans

    if not isinstance(model, Manifest):
        limits = Limits(
            load.max_batch_size, load.max_num_tokens, load.context, load.context, 1, load.tokens_per_block
        )
        return list(checkpoint_plans(model, list(SKUS.values()) if skus is None else skus, names, kv, limits))
    if names is not None or kv is not None:
        raise InvalidArgumentError(
            f"{model.root} is an engine of precision {model.precision}; leave --precision and --kv-cache-dtype out, or "
            "give its checkpoint"
        )
    found = list(engine_plans(model, skus))
    if all(isinstance(one, Refused) for one in found):
        raise InvalidArgumentError(
            f"{model.root} has plans for {', '.join(model.targets)}, none of which runs on the GPUs of --sku; name "
            "others, or cpu"
        )
    return found
