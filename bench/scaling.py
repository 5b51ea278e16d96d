"""How the time of a decode step grows with the batch and with the context, beside the machine's roofline.

    python bench/scaling.py [--precisions int8,int4,fp32] [--threads 2] [--quick] [--store] [--plot FILE.svg]

Steps of the cpu executor itself, without the engine around it: every sequence has one new token behind `context` - 1
cached positions in blocks of its own, scattered over the pool, and its row of logits. A point is the median of many
steps. The roofline is what the bytes and operations of each op take at this machine's peaks (measured in the same run,
before each series, the best taken), summed over the ops: below it no step can be. 150 ops follow each other, and at
each all threads meet, so a small model does not reach it.

Cached positions hold the keys and values of one block of real tokens, copied to all others: how long a step takes does
not depend on them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
import numpy.typing as npt
from plansmith.cli._roofline_plot import pyplot, save
from plansmith.runtime._native import native
from plansmith.runtime.batch import BlockCopy
from plansmith.runtime.executor import Executor, cpu_executor
from plansmith.runtime.profile import CpuPeaks, OpProfile, best_peaks, measure_peaks, since

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
# Of `plansmith build --target cpu`.
PRECISIONS = ("fp32", "bf16", "int8", "int4")
LIMITS = ("--max-batch-size", "256", "--max-seq-len", "8192")
_COPIES_A_CALL = 4096


@dataclasses.dataclass(frozen=True)
class Point:
    """Decode steps of `batch` sequences that hold `context` positions each, the new one included."""

    batch: int
    context: int


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure a point: at least so many steps, and then until the time or the most steps are reached."""

    least_steps: int
    most_steps: int
    seconds: float


class Stepper:
    """A cpu executor with filled blocks; use it as a context manager."""

    def __init__(self, plan: Path, threads: int, points: Sequence[Point]) -> None:
        """Open the plan with blocks for the largest of `points`, every block with values in it."""
        self._executor: Executor = cpu_executor(plan, num_threads=threads, profile=True)
        info = self._executor.describe()
        self._block = info.tokens_per_block
        self._kv_bytes = info.kv_bytes_per_block
        self._vocab_size = info.vocab_size
        self._num_blocks = max(point.batch * self._blocks_of(point) for point in points)
        self._random = np.random.default_rng(1)
        self._executor.open(self._num_blocks)
        self._fill()

    def _blocks_of(self, point: Point) -> int:
        return -(-point.context // self._block)

    def _fill(self) -> None:
        """Compute one block of tokens and copy it to all others: pages that nobody wrote are all one page of zeros."""
        self._run(
            self._batch(Point(1, self._block), query_len=self._block, blocks=np.zeros((1, 1), np.int32))
        )
        copies = [BlockCopy("device", 0, block, self._block) for block in range(1, self._num_blocks)]
        for i in range(0, len(copies), _COPIES_A_CALL):
            self._executor.copy_blocks(copies[i : i + _COPIES_A_CALL])

    def _batch(self, point: Point, query_len: int, blocks: npt.NDArray[np.int32]) -> tuple[Any, list[Any]]:
        """Return a psm_batch, and what must live as long as it."""
        first = point.context - query_len
        ids = self._random.integers(0, self._vocab_size, point.batch * query_len, dtype=np.int32)
        arrays = {
            "input_ids": ids,
            "position_ids": np.tile(np.arange(first, point.context, dtype=np.int32), point.batch),
            "query_lens": np.full(point.batch, query_len, np.int32),
            "kv_lens": np.full(point.batch, point.context, np.int32),
            "cu_query_lens": np.arange(point.batch + 1, dtype=np.int32) * np.int32(query_len),
            "block_table": np.ascontiguousarray(blocks),
            "logits_rows": np.arange(1, point.batch + 1, dtype=np.int32) * np.int32(query_len) - np.int32(1),
        }
        core = native()
        struct = core.new("psm_batch")
        struct.num_tokens, struct.num_seqs = ids.size, point.batch
        struct.num_logits_rows, struct.block_table_stride = point.batch, blocks.shape[1]
        buffers = [core.ffi.from_buffer("int32_t[]", array) for array in arrays.values()]
        for name, buffer in zip(arrays, buffers, strict=True):
            setattr(struct, name, buffer)
        return struct, [arrays, buffers]

    def _run(self, batch: tuple[Any, list[Any]]) -> None:
        out = native().ffi.new("const float**")
        table = self._executor.struct  # its step: Executor.step would also copy the logits
        if table.step(table.self, batch[0], out) != 0:
            raise SystemExit(native().text(table.last_error(table.self)))

    def measure(self, point: Point, effort: Effort) -> tuple[list[float], list[OpProfile]]:
        """Return the seconds of each step, and what all of them took by arithmetic."""
        num = self._blocks_of(point)
        blocks = self._random.permutation(self._num_blocks)[: point.batch * num].astype(np.int32)
        batch = self._batch(point, 1, blocks.reshape(point.batch, num))
        self._run(batch)
        before = self._executor.profile()
        seconds: list[float] = []
        begin = time.perf_counter()
        while len(seconds) < effort.least_steps or (
            len(seconds) < effort.most_steps and time.perf_counter() - begin < effort.seconds
        ):
            start = time.perf_counter()
            self._run(batch)
            seconds.append(time.perf_counter() - start)
        return seconds, since(self._executor.profile(), before)

    def __enter__(self) -> Stepper:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.close()


def series_of(quick: bool) -> dict[str, list[Point]]:
    """Return the points of each plot's lines."""
    batches = (1, 4, 16) if quick else BATCHES
    contexts = (128, 512) if quick else CONTEXTS
    return {
        "batch": [Point(batch, 128) for batch in batches],
        "context, batch 1": [Point(1, context) for context in contexts],
        "context, batch 16": [Point(16, context) for context in contexts],
    }


def _fits(points: Sequence[Point], plan: Path, most_bytes: float) -> list[Point]:
    """Return the points whose blocks fit, and say which do not."""
    executor = cpu_executor(plan, num_threads=1)
    info = executor.describe()
    executor.close()
    fitting = []
    for point in points:
        blocks = point.batch * -(-point.context // info.tokens_per_block)
        if blocks * info.kv_bytes_per_block <= most_bytes:
            fitting.append(point)
        else:
            print(f"left out: {point}, whose blocks take {blocks * info.kv_bytes_per_block / 2**30:.1f} GiB")
    return fitting


def run(precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return all series of one precision of the demo model."""
    plan = common.engine(precision, *LIMITS, name=f"scaling-{precision}") / "targets" / "cpu" / "model.plan"
    series = {
        name: _fits(points, plan, options.max_kv_gib * 2**30)
        for name, points in series_of(options.quick).items()
    }
    effort = Effort(3, 20, 0.2) if options.quick else Effort(5, 400, 2.0)
    return run_plan(precision, plan, options.threads, series, effort)


def run_plan(
    precision: str, plan: Path, threads: int, series: dict[str, list[Point]], effort: Effort
) -> dict[str, Any]:
    """Return the times of a plan's steps and their rooflines."""
    peaks, measured = [], []
    with Stepper(plan, threads, [point for points in series.values() for point in points]) as stepper:
        for name, points in series.items():
            peaks.append(measure_peaks(threads))
            for point in points:
                seconds, records = stepper.measure(point, effort)
                median_ms = 1e3 * statistics.median(seconds)
                print(f"{precision}, {name}: {point}: {median_ms:.2f} ms of {len(seconds)} steps", flush=True)
                measured.append((name, point, seconds, records))
    top = best_peaks(peaks)
    found = [_result(*one, top) for one in measured]
    return {"precision": precision, "peaks": dataclasses.asdict(top), "points": found}


def _result(
    name: str, point: Point, seconds: list[float], records: list[OpProfile], peaks: CpuPeaks
) -> dict[str, Any]:
    steps = len(seconds)
    whole = next(record for record in records if record.is_step)
    least_s = sum(peaks.least_s(record) for record in records if not record.is_step) / steps
    median = statistics.median(seconds)
    return {
        "series": name,
        **dataclasses.asdict(point),
        "steps": steps,
        "median_ms": 1e3 * median,
        "best_ms": 1e3 * min(seconds),
        "roofline_ms": 1e3 * least_s,
        "roofline_share": least_s / median,
        "tokens_per_s": point.batch / median,
        "bytes": whole.bytes / steps,
        "operations": whole.operations / steps,
    }


def tables(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a markdown table for each series and precision together."""
    for name in dict.fromkeys(point["series"] for result in results for point in result["points"]):
        header = [
            "precision",
            "batch",
            "context",
            "step, ms (best)",
            "tokens/s",
            "roofline, ms",
            "of it reached",
        ]
        rows = [
            (
                result["precision"],
                point["batch"],
                point["context"],
                f"{point['median_ms']:.2f} ({point['best_ms']:.2f})",
                f"{point['tokens_per_s']:.0f}",
                f"{point['roofline_ms']:.2f}",
                f"{point['roofline_share']:.0%}",
            )
            for result in results
            for point in result["points"]
            if point["series"] == name
        ]
        yield f"\n{name}:\n\n{common.table(header, rows)}"


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw each series: a line a precision, and its roofline dashed in the same color."""
    plt = pyplot()
    names = list(dict.fromkeys(point["series"] for result in results for point in result["points"]))
    figure, axes = plt.subplots(1, len(names), figsize=(6 * len(names), 5), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        along = "batch" if name == "batch" else "context"
        for color, result in enumerate(results):
            points = [point for point in result["points"] if point["series"] == name]
            x = [point[along] for point in points]
            style: dict[str, Any] = {"color": f"C{color}"}
            axis.plot(
                x, [point["median_ms"] for point in points], marker="o", label=result["precision"], **style
            )
            axis.plot(x, [point["roofline_ms"] for point in points], linestyle="--", **style)
        axis.plot([], [], color="black", linestyle="--", label="roofline")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("sequences" if along == "batch" else "positions of each sequence")
        axis.set_ylabel("ms of a decode step")
        axis.set_title("context 128" if along == "batch" else name)
        axis.grid(True, which="both", alpha=0.2)
        axis.legend()
    figure.tight_layout()
    save(figure, path)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the command line; `precisions` are those named, each once."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precisions", default="int8,int4,fp32")
    parser.add_argument("--threads", type=int, default=min(2, cores))
    parser.add_argument("--max-kv-gib", type=float, default=8.0, help="leave out points that need more")
    parser.add_argument("--quick", action="store_true", help="few small points: to see that it works")
    parser.add_argument("--plot", type=Path, help="draw into this file, by its ending")
    parser.add_argument("--store", action="store_true", help="write docs/results/scaling.{json,svg}")
    options = parser.parse_args(argv)
    named = [name.strip() for name in options.precisions.split(",") if name.strip()]
    if not named:
        parser.error(f"--precisions {options.precisions!r} names none; there are {', '.join(PRECISIONS)}")
    for name in named:
        if name not in PRECISIONS:
            parser.error(f"--precisions: no {name!r}; there are {', '.join(PRECISIONS)}")
    options.precisions = list(dict.fromkeys(named))
    if not 1 <= options.threads <= cores:
        parser.error(f"--threads {options.threads}: from 1 to the {cores} cores that this process may use")
    if not options.max_kv_gib > 0:
        parser.error(f"--max-kv-gib {options.max_kv_gib}: more than 0")
    return options


def main() -> None:
    """Measure all precisions, print the tables, and draw and store what was asked for."""
    options = parse()
    if options.plot is not None or options.store:
        pyplot()  # before hours of measuring: it may be missing
    results = [run(precision, options) for precision in options.precisions]
    print("\n".join(tables(results)))
    if options.plot is not None:
        draw(results, options.plot)
    if options.store:
        common.store("scaling", {"threads": options.threads, "results": results})
        draw(results, common.RESULTS / "scaling.svg")


if __name__ == "__main__":
    main()
