"""Flags that generate and bench share, and how they open an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..runtime.engine import Engine

EngineDir = Annotated[
    Path, typer.Argument(metavar="ENGINE_DIR", help="An engine directory, made by plansmith build.")
]
Target = Annotated[str, typer.Option("--target", help="The target of the engine directory to run.")]
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
        help="Most tokens in a step; 0 = 512, or the engine's limit if that is less.",
    ),
]
KvCacheBytes = Annotated[
    int,
    typer.Option(
        "--kv-cache-bytes", min=0, help="Cap of the KV pools; 0 = what a full batch needs, at most 1 GiB."
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
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the random numbers.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text for people.")]


def open_engine(
    engine_dir: Path,
    target: str,
    threads: int,
    max_batch_size: int,
    max_num_tokens: int,
    kv_cache_bytes: int,
    scheduler_policy: str,
    *,
    isa: str | None = None,
    verify_hashes: bool = False,
    iter_stats_max_iterations: int = 1000,
) -> Engine:
    """Open the engine as the flags say."""
    return Engine.open(
        engine_dir,
        target,
        num_threads=threads,
        isa=isa,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        kv_cache_bytes=kv_cache_bytes,
        scheduler_policy=scheduler_policy,
        verify_hashes=verify_hashes,
        iter_stats_max_iterations=iter_stats_max_iterations,
    )
