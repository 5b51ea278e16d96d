"""Flags that generate and bench share, and how they open an engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..runtime.async_engine import AsyncEngine
from ..runtime.engine import Engine
from ..runtime.engine_options import DEFAULT_FRACTION as DEFAULT_FRACTION
from ..runtime.errors import InvalidArgumentError, UnsupportedError
from ..runtime.executor import check_weights
from ..runtime.executors.opening import usable_target
from ..runtime.executors.options import AUTO, CPU
from ..runtime.manifest import load_manifest

EngineDir = Annotated[
    Path, typer.Argument(metavar="ENGINE_DIR", help="An engine directory, made by plansmith build.")
]
Target = Annotated[
    str,
    typer.Option(
        "--target",
        help="The target of the engine directory to run; auto = the first that a GPU here runs, else cpu.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="GPU",
        help="The GPU of a GPU target: its index or UUID (nvidia-smi -L); default: the first that runs the plan. "
        "More in docs/serving.md, On a GPU.",
    ),
]
CudaGraphs = Annotated[
    str,
    typer.Option(
        "--cuda-graphs",
        metavar="WHO",
        help="Who captures a GPU target's decode steps: auto, own (always this program) or off; see docs/serving.md, "
        "On a GPU.",
    ),
]
KvCacheFraction = Annotated[
    float,
    typer.Option(
        "--kv-cache-free-gpu-mem-fraction",
        "--kv-cache-free-gpu-memory-fraction",  # trtllm-serve's name
        min=0.0,
        max=1.0,
        metavar="SHARE",
        help="Share of a GPU's free memory for the KV pools, where --kv-cache-bytes is 0.",
    ),
]
Threads = Annotated[
    int,
    typer.Option(
        "--threads", min=0, max=1024, help="Threads of the cpu target; 0 = one a core that may be used."
    ),
]


def _checked_weights(value: str) -> str:
    check_weights(value)  # now, and not behind what comes before an engine is opened
    return value


Weights = Annotated[
    str,
    typer.Option(
        "--weights",
        metavar="WHERE",
        callback=_checked_weights,
        help="Where the cpu target's weights lie: mapped (from the file, shared by processes), huge_pages (this "
        "process's own, read before it is open), or auto (mapped at once, moved into huge pages meanwhile).",
    ),
]
MaxBatchSize = Annotated[
    int,
    typer.Option(
        "--max-batch-size",
        min=0,
        help="Most requests in a step; 0 = the engine's limit. Fewer need a smaller KV cache.",
    ),
]
MaxNumTokens = Annotated[
    int,
    typer.Option(
        "--max-num-tokens",
        min=0,
        help="Most tokens in a step; 0 = the engine's limit, on the cpu target at most 512. Fewer take less memory for "
        "activations and logits there; a GPU plan takes what it was built for.",
    ),
]
KvCacheBytes = Annotated[
    int,
    typer.Option(
        "--kv-cache-bytes",
        min=0,
        help="Cap of the KV pools; 0 = what a full batch needs, at most 1 GiB and less where memory is short, or a "
        "share of a GPU's free memory.",
    ),
]
SchedulerPolicy = Annotated[
    str,
    typer.Option(
        "--scheduler-policy", help="guaranteed_no_evict, or max_utilization, which may pause requests."
    ),
]
QueueOrder = Annotated[
    str,
    typer.Option(
        "--queue-order",
        help="Who starts next of those that wait: arrival, or shortest, the prompt with the fewest tokens to compute.",
    ),
]
Isa = Annotated[
    str | None,
    typer.Option(
        "--isa",
        help="Kernels of the cpu target: portable, avx2, avx512vnni, avx512bf16, amx or neon; default: the best here.",
    ),
]
HostCacheBytes = Annotated[
    int, typer.Option("--host-cache-bytes", min=0, help="Host memory for KV blocks that the pools evict.")
]
Draft = Annotated[
    Path | None,
    typer.Option("--draft", help="An engine of a smaller model with the same vocabulary, to draft tokens."),
]
Speculation = Annotated[
    str,
    typer.Option(
        "--speculation",
        help="auto (--draft, or the engine's own draft if it has one), model, ngram (lookup in the text) or off. "
        "The tokens stay the same.",
    ),
]
MaxDraftLen = Annotated[
    int, typer.Option("--max-draft-len", min=0, help="Most draft tokens in a step; 0 = 8.")
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the random numbers.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text for people.")]


def open_engine(
    engine_dir: Path,
    target: str,
    threads: int,
    **options: Any,
) -> Engine:
    """Open the engine as the flags say, and tell what "auto" chose.

    options : further arguments of Engine.open
    raises InvalidArgumentError and UnsupportedError as check_device does, and what Engine.open raises
    """
    check_device(engine_dir, target, options.get("device"), options.get("cuda_graphs", "auto"))
    engine = Engine.open(engine_dir, target, num_threads=threads, **options)
    tell_target(engine, target)
    return engine


def check_device(engine_dir: Path, target: str, device: str | None, cuda_graphs: str) -> None:
    """Refuse what is asked of a GPU where none would be used.

    raises InvalidArgumentError for the cpu target; UnsupportedError where "auto" cannot use the device that is named:
    how a GPU is used (cuda_graphs) is not asked for where "auto" finds none
    """
    given = [
        f"{flag} {value}"
        for flag, value in (
            ("--device", device),
            ("--cuda-graphs", None if cuda_graphs == "auto" else cuda_graphs),
        )
        if value is not None
    ]
    if target == CPU and given:
        raise InvalidArgumentError(
            f"{' and '.join(given)} {'are' if len(given) > 1 else 'is'} of GPU targets, and the target is cpu; give "
            "--target auto or a GPU target of the engine, or leave it out"
        )
    if target != AUTO or device is None:
        return
    manifest = load_manifest(engine_dir)
    if usable_target(manifest, device=device) == CPU:
        gpu = [name for name, one in manifest.targets.items() if one.sm]
        why = f"give --target {gpu[0]} to be told why" if gpu else "it has the cpu target alone"
        raise UnsupportedError(
            f"--device {device} is asked for, and no GPU target of {engine_dir} can run on it here; {why}, or leave "
            "--device out"
        )


def tell_target(engine: Engine | AsyncEngine, asked: str) -> None:
    """Say on standard error, in one line, what "auto" chose."""
    if asked != AUTO:
        return
    use = engine.device_use()
    where = "" if use is None else f", on {use.name}"
    print(f"plansmith: target auto is {engine.target}{where}", file=sys.stderr, flush=True)
