"""What rounding costs each engine: KL to the float32 model over the same tokens, beside its bits a weight.

    python bench/peer_quality.py [--only plansmith,llama_cpp] [--tokens 2048] [--groups] [--store]

Reference: transformers in float32. Text: the one that comes with plansmith, in windows of 512 tokens, every position.
KL(reference || engine) of the next-token distributions, in nats; top-1: how often both find the same token likeliest.
Bits a weight: the weights that products read, scales included, over the number of weights. `--groups` measures
plansmith's int8 and int4 with other groups of columns too; `--store` writes docs/results/peer_quality.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import common
import numpy as np
import torch
from peer import ctranslate2, llama_cpp, openvino, ort_genai
from peer.environment import BENCH, child_command
from plansmith.builder.checkpoint import Checkpoint, open_checkpoint
from plansmith.builder.graph import build_graph
from plansmith.builder.limits import make_limits
from plansmith.builder.precision import Precision, precision
from plansmith.builder.targets.cpu import compile_plan, read_plan
from plansmith.calibration.eval_text import read_text, tokenizer_of
from plansmith.calibration.eval_text import windows as cut_windows
from plansmith.calibration.scoring import PlanRunner, TokenRun, kl_divergence, log_softmax, row_slices
from transformers import AutoModelForCausalLM

WINDOW = 512
SCRATCH = "/dev/shm" if Path("/dev/shm").is_dir() else None  # 100 MB of logits a window
Windows = list[tuple[int, ...]]
Rows = Iterator[np.ndarray]  # the logits (tokens, V) of each window

# The environment that has each peer's library; all variants that round something are measured.
PEERS: dict[str, tuple[ModuleType, str]] = {
    "llama_cpp": (llama_cpp, "venv-llama"),
    "openvino": (openvino, "venv-openvino"),
    "ort_genai": (ort_genai, "venv-ortgenai"),
    "ctranslate2": (ctranslate2, "venv-ctranslate2"),
}
OURS = ("bf16", "int8", "int4")


def other_groups() -> dict[str, Precision]:
    """Return plansmith's int8 and int4 with groups other than the cpu target's own."""
    return {f"{base} in {n}": precision(base).in_groups(n) for base in ("int8", "int4") for n in (64, 128)}


def text_windows(checkpoint: Checkpoint, tokens: int) -> Windows:
    """Return windows of the text that comes with plansmith."""
    text = read_text(None)
    prefix, ids = text.encode(tokenizer_of(checkpoint), tokens)
    return cut_windows(prefix, ids, WINDOW, text.name)


def reference_logits(checkpoint: Path, windows: Windows) -> np.ndarray:
    """Return transformers' logits (windows, tokens, V) in float32."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        return np.stack([model(torch.tensor([window])).logits[0].numpy() for window in windows])


def peer_logits(name: str, variant: str, model: Path, windows: Windows, work: Path, threads: int) -> Rows:
    """Yield a peer's logits, which a process in its environment writes."""
    _, environment = PEERS[name]
    python = work.resolve() / environment / "bin" / "python"
    quiet = {"OMP_NUM_THREADS": str(threads), "LLAMA_CPP_LIB_PATH": str(llama_cpp.libraries(work))}
    with tempfile.TemporaryDirectory(prefix="plansmith-logits-", dir=SCRATCH) as folder:
        given, out = Path(folder) / "windows.json", Path(folder) / "logits.npy"
        given.write_text(json.dumps(windows))
        command = child_command(python, "logits", name, model.resolve(), variant, str(threads), given, out)
        subprocess.run(command, check=True, cwd=BENCH, env={**os.environ, **quiet})
        yield from np.load(out, mmap_mode="r")


def own_plan(
    checkpoint: Checkpoint, recipe: Precision, folder: str, threads: int
) -> tuple[PlanRunner, float]:
    """Return a compiled plan of the checkpoint at `recipe`, and its bits a weight."""
    limits = make_limits(checkpoint.spec.max_position_embeddings, max_seq_len=WINDOW)
    plan = Path(folder) / "model.plan"
    model = build_graph(checkpoint.spec, checkpoint.weights, recipe.on_cpu(), limits)
    compile_plan(model, checkpoint.spec, limits, plan)
    matrices = [one for one in read_plan(plan).tensors if one.rows > 1 and one.cols > 1]
    size = sum(one.data.nbytes + one.scales.nbytes + one.zeros.nbytes for one in matrices)
    bits = 8 * size / sum(one.rows * one.cols for one in matrices)
    return PlanRunner(plan, limits, str(checkpoint.path), threads), bits


def own_logits(runner: PlanRunner, windows: Windows) -> Rows:
    """Yield our logits."""
    for window in windows:
        yield np.concatenate([piece.logits.copy() for piece in runner.run([TokenRun(window, 0)])])


def quality(reference: np.ndarray, subject: Rows) -> dict[str, float]:
    """Return KL and top-1 agreement over all positions."""
    kl, same = [], []
    for expected, got in zip(reference, subject, strict=True):
        for rows in row_slices(expected):
            kl.append(kl_divergence(log_softmax(expected[rows]), log_softmax(np.asarray(got[rows]))))
        same.append(expected.argmax(axis=1) == np.asarray(got).argmax(axis=1))
    every = np.concatenate(kl)
    return {
        "kl": float(every.mean()),
        "kl_error": float(every.std() / len(every) ** 0.5),
        "kl_median": float(np.median(every)),
        "kl_p99": float(np.quantile(every, 0.99)),
        "top1": float(np.concatenate(same).mean()),
    }


def measure(
    checkpoint: Path, wanted: Callable[[str], bool], tokens: int, groups: bool, work: Path, threads: int
) -> dict[str, Any]:
    """Return the row of each engine and variant, printed as it comes."""
    torch.set_num_threads(threads)
    source = open_checkpoint(checkpoint)
    windows = text_windows(source, tokens)
    reference = reference_logits(checkpoint, windows)
    weights = sum(int(np.prod(source.weights.shape(name))) for name in source.weights.names())
    results: dict[str, Any] = {"tokens": len(windows) * WINDOW, "window": WINDOW, "weights": weights}
    rows: dict[str, Any] = {}

    def add(label: str, bits: float, subject: Rows) -> None:
        rows[label] = {"bits": bits, **quality(reference, subject)}
        print(label, json.dumps(rows[label]), file=sys.stderr, flush=True)

    recipes = {name: precision(name) for name in OURS} | (other_groups() if groups else {})
    for label, recipe in recipes.items():
        if wanted("plansmith"):
            with tempfile.TemporaryDirectory(prefix="plansmith-bench-", dir=SCRATCH) as folder:
                runner, bits = own_plan(source, recipe, folder, threads)
                add(f"plansmith {label}", bits, own_logits(runner, windows))
    for name, (module, _) in PEERS.items():
        for variant in module.VARIANTS if wanted(name) else ():
            log = work / "logs" / "quality.log"
            module.install(work, log)
            if module is llama_cpp:
                llama_cpp.install_bindings(work, log)
            model = module.convert(checkpoint, work, variant)
            bits = 8 * module.weight_bytes(model, variant) / weights
            subject = peer_logits(name, variant, model, windows, work, threads)
            add(f"{module.NAME} {variant}", bits, subject)
    return {**results, "engines": rows}


def show(rows: dict[str, Any]) -> None:
    """Print the table of docs/benchmarks.md, fewest bits last."""
    header = ["engine", "bits a weight", "KL mean", "KL median", "KL p99", "top-1"]
    order = sorted(rows.items(), key=lambda item: (-round(item[1]["bits"]), item[1]["kl"]))
    print(
        common.table(
            header,
            [
                [
                    label,
                    f"{row['bits']:.2f}",
                    f"{row['kl']:.2e} ± {row['kl_error']:.0e}",
                    f"{row['kl_median']:.2e}",
                    f"{row['kl_p99']:.2e}",
                    f"{row['top1']:.4f}",
                ]
                for label, row in order
            ],
        )
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the command line; `names` are the engines chosen."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="plansmith and names of peers, comma-separated; all by default")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--groups", action="store_true", help="plansmith with other groups of columns too")
    parser.add_argument("--threads", type=int, default=min(2, cores))
    parser.add_argument("--work", type=Path, default=common.ROOT / "build" / "peers")
    parser.add_argument("--store", action="store_true")
    args = parser.parse_args(argv)
    there = ("plansmith", *PEERS)
    args.names = there if args.only is None else tuple(n.strip() for n in args.only.split(",") if n.strip())
    unknown = [name for name in args.names if name not in there]
    if unknown or not args.names:
        parser.error(f"--only {','.join(unknown) or repr(args.only)}: there are {', '.join(there)}")
    if args.tokens < WINDOW:
        parser.error(f"--tokens {args.tokens}: at least a window of {WINDOW}")
    if not 1 <= args.threads <= cores:
        parser.error(f"--threads {args.threads}: from 1 to the {cores} cores that this process may use")
    return args


def main() -> None:
    """Measure what the command line names, and print it."""
    args = parse()
    results = measure(
        common.demo_checkpoint(),
        lambda name: name in args.names,
        args.tokens,
        args.groups,
        args.work,
        args.threads,
    )
    show(results["engines"])
    if args.store:
        common.store("peer_quality", results)


if __name__ == "__main__":
    main()
