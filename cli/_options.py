"""Flags that generate and bench share, and how they open an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..runtime.engine import Engine
from ..runtime.engine_options import DEFAULT_FRACTION as DEFAULT_FRACTION

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
        "--device", help="The GPU of a GPU target: its index or UUID; default: the first that runs the plan."
    ),
]
CudaGraphs = Annotated[
    str,
    typer.Option(
        "--cuda-graphs",
        help="Who captures a GPU target's decode steps: auto, own (always this program) or off.",
    ),
]
KvCacheFraction = Annotated[
    float,
    typer.Option(
        "--kv-cache-free-gpu-mem-fraction",
        "--kv-cache-free-gpu-memory-fraction",  # trtllm-serve's name
        min=0.0,
        max=1.0,
        help="Share of a GPU's free memory for the KV pools, where --kv-cache-bytes is 0.",
    ),
]
Threads = Annotated[
    int, typer.Option("--threads", min=0, max=1024, help="Threads of the cpu target; 0 = one a core.")
]
MaxBatchSize = Annotated[
    int, typer.Option("--max-batch-size", min=0, help="Most requests in a step; 0 = the engine's limit.")
]
MaxNumTokens = Annotated[
    int,
    typer.Option(
        "--max-num-tokens",
        min=0,
        help="Most tokens in a step; 0 = the engine's limit, on the cpu target at most 512.",
    ),
]
KvCacheBytes = Annotated[
    int,
    typer.Option(
        "--kv-cache-bytes",
        min=0,
        help="Cap of the KV pools; 0 = what a full batch needs, at most 1 GiB, or a share of a GPU's free memory.",
    ),
]
SchedulerPolicy = Annotated[
    str,
    typer.Option(
        "--scheduler-policy", help="guaranteed_no_evict, or max_utilization, which may pause requests."
    ),
]
Isa = Annotated[
    str | None,
    typer.Option(
        "--isa", help="Kernels of the cpu target: portable, avx2 or avx512vnni; default: the best here."
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
    """Open the engine as the flags say.

    options : further arguments of Engine.open
    """
    return Engine.open(engine_dir, target, num_threads=threads, **options)
