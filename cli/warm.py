"""plansmith warm: a node that is ready before the server comes."""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ..runtime.warm_up import warm_up
from . import _options as options
from ._output import print_json, size_text
from ._warming import Readied, Warming, open_files

_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOOK_SECONDS = 0.2  # a signal that comes to another thread wakes nobody


def warm(
    engine_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="ENGINE_DIR...", help="Engine directories, made by plansmith build."),
    ],
    target: options.Target = "cpu",
    draft: options.Draft = None,
    check_hashes: Annotated[
        bool, typer.Option("--check-hashes", help="Also compare the files' contents with the manifest.")
    ] = False,
    lock: Annotated[
        bool, typer.Option("--lock", help="Keep them in memory until SIGTERM; one process serves all others.")
    ] = False,
    run: Annotated[
        bool,
        typer.Option("--run", help="Open each engine and run a warm-up, which fills a GPU's kernel cache."),
    ] = False,
    max_batch_size: Annotated[
        int, typer.Option("--max-batch-size", min=0, help="Of --run: most requests; 0 = the engine's limit.")
    ] = 0,
    device: options.Device = None,
    threads: options.Threads = 0,
    as_json: options.Json = False,
) -> None:
    """Check the files of engines and read them into the page cache, so that servers here start at once.

    Tokenizer, plan, kernels and draft of one target, in the order in which an engine uses them. An init container runs
    it once; a DaemonSet with --lock, which counts against that container's memory instead of the servers'.
    """
    with open_files(engine_dirs, target, draft, device, check_hashes=check_hashes) as warming:
        warming.check_memory()
        readied = [warming.read_in(one) for one in warming.engines]
        if lock:
            warming.lock()
        runs = [_run(one.root, one.target, draft, device, threads, max_batch_size) for one in readied if run]
        ended = threading.Event()
        for number in _ENDS if lock else ():
            signal.signal(number, lambda *_: ended.set())
        _tell(readied, runs, warming, lock, as_json)
        while lock and not ended.wait(_LOOK_SECONDS):
            pass


def _run(
    root: Path, target: str, draft: Path | None, device: str | None, threads: int, max_batch_size: int
) -> dict[str, Any]:
    """Return how long an engine takes to open, and its warm-up."""
    begin = time.perf_counter()
    with options.open_engine(root, target, threads, device=device, draft=draft) as engine:
        opened = time.perf_counter()
        took = warm_up(engine, max_batch_size)
    return {"open_s": opened - begin, **dataclasses.asdict(took)}


def _tell(
    readied: list[Readied], runs: list[dict[str, Any]], warming: Warming, is_locked: bool, as_json: bool
) -> None:
    if as_json:
        engines = [{**one.to_json(), **({"run": runs[i]} if runs else {})} for i, one in enumerate(readied)]
        print_json({"engines": engines, "bytes": warming.num_bytes, "locked": is_locked}, indent=None)
    else:
        for i, one in enumerate(readied):
            print(one.text())
            if runs:
                print(_run_text(runs[i]))
        if is_locked:
            print(f"{size_text(warming.num_bytes)} locked in memory until SIGTERM")
    sys.stdout.flush()


def _run_text(run: dict[str, Any]) -> str:
    sizes = ", ".join(map(str, run["batch_sizes"]))
    return (
        f"  opened in {run['open_s']:.2f} s; {run['num_requests']} requests at batch sizes {sizes} in "
        f"{run['seconds']:.2f} s"
    )
