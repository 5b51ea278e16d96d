"""Every recipe on SmolLM2-135M-Instruct: what it costs, and whether the engine is what ModelOpt simulates.

    python bench/quantization.py [--recipes fp8,int4_awq] [--tokens 2048] [--no-layers]

Each recipe is calibrated with 64 samples of 256 tokens, written, and built for the cpu. Over windows of 512 tokens of
the text that comes with plansmith, all positions:

    engine      KL(float32 model || cpu engine), its 99th percentile, top-1 agreement, perplexity
    simulation  the same of ModelOpt's simulation of the same checkpoint, run by torch
    between     KL(simulation || engine)
    noise       KL(simulation || the simulation with its embeddings changed by 1e-7): how far two correct runs are apart
    one layer   KL(simulation || engine) of models of one decoder layer each: without depth there is little chaos, so
                this is where an error would show
    weights     KL and top-1 of the engine with every input and the KV cache as they are, in the stored results
    bytes       of the plan's quantized weights, scales included, a parameter of theirs
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from plansmith.builder.checkpoint import Checkpoint, open_checkpoint
from plansmith.builder.graph import build_graph
from plansmith.builder.limits import make_limits
from plansmith.builder.precision import Precision, precision
from plansmith.builder.scheme import Quantization, QuantizedInput, QuantizedWeight
from plansmith.builder.targets.cpu import compile_plan, read_plan
from plansmith.builder.targets.cpu.plan_file import DType
from plansmith.builder.targets.registry import choose_precision, find_targets
from plansmith.calibration.eval_text import read_text, tokenizer_of
from plansmith.calibration.options import QuantizeOptions, plan_quantization
from plansmith.calibration.quantize import quantize_model
from plansmith.calibration.scoring import PlanRunner, TokenRun, kl_divergence, log_softmax

WINDOW = 512
LAYER_TOKENS = 64
SCRATCH = "/dev/shm" if Path("/dev/shm").is_dir() else None  # plans are written and read once
CASES: dict[str, list[str]] = {
    "fp8": [],
    "fp8_per_channel": [],
    "int8_sq": [],
    "int8_sq, down_proj left out": ["--exclude", "*down_proj*"],
    "int8_wo": [],
    "int4_awq": [],
    "int4_awq, groups of 32": ["--group-size", "32"],
    "int4_wo": [],
    "int4_wo, groups of 32": ["--group-size", "32"],
    "w4a8_awq": [],
    "nvfp4": [],
    "nvfp4_wo": [],
    "fp8, KV fp8": ["--kv-cache", "fp8"],
    "fp8, KV int8": ["--kv-cache", "int8"],
    "int8_wo, KV fp8": ["--kv-cache", "fp8"],
    "int8_wo, KV int8": ["--kv-cache", "int8"],
}
Logits = np.ndarray


def main() -> None:
    """Measure the cases that are asked for, print the table, store it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", help="names of cases with ';' between; default all")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--no-layers", action="store_true")
    parser.add_argument("--show", action="store_true", help="print what is stored, measure nothing")
    arguments = parser.parse_args()
    stored = common.RESULTS / "quantization.json"
    if arguments.show:
        show(json.loads(stored.read_text())["cases"])
        return
    chosen = arguments.recipes.split(";") if arguments.recipes else list(CASES)
    source = open_checkpoint(common.demo_checkpoint())
    windows = text_windows(source, arguments.tokens)
    reference = run_plan(source, precision("fp32"), windows)
    results: dict[str, Any] = {"tokens": len(windows) * WINDOW, "window": WINDOW, "cases": {}}
    if arguments.recipes and stored.is_file():  # the others as they were measured
        results = json.loads(stored.read_text())
    results["float32_ppl"] = quality(reference, reference, windows)["ppl"]
    for name in chosen:
        print(f"== {name}", file=sys.stderr, flush=True)
        case = measure(name, CASES[name], source, windows, reference, layers=not arguments.no_layers)
        print(json.dumps(case), file=sys.stderr, flush=True)
        results["cases"][name] = case
        results["cases"] = {one: results["cases"][one] for one in CASES if one in results["cases"]}
        common.store("quantization", results)
    if not arguments.recipes:
        results["fp8_calibration"] = calibration(source)
        common.store("quantization", results)
    show(results["cases"])


def measure(
    name: str,
    flags: Sequence[str],
    source: Checkpoint,
    windows: list[list[int]],
    reference: Logits,
    *,
    layers: bool,
) -> dict[str, Any]:
    """Return the row of one case."""
    recipe = name.partition(",")[0]
    start = time.monotonic()
    simulated = quantize_model(plan_quantization(source.path, options_of(recipe, flags)))
    row: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1)}
    simulation = simulate(simulated, windows)
    few = windows[0][:LAYER_TOKENS]
    single = one_layer_simulations(simulated, few) if layers else []
    table = simulated.model.get_input_embeddings().weight
    kept = table.detach().clone()
    with torch.no_grad():
        table.mul_(1 + 1e-7 * torch.randn(table.shape, generator=torch.Generator().manual_seed(0)))
        row["kl_noise"] = mean_kl(simulation, simulate(simulated, windows))
        table.copy_(kept)
    out = common.WORK / "quantized" / name.replace(", ", "_").replace(" ", "_")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    simulated.save(out)
    quantized = open_checkpoint(out)
    engine = run_plan(quantized, choose_precision("auto", quantized, find_targets(["cpu"])), windows)
    row["bytes_per_quantized_parameter"] = bytes_per_parameter(quantized)
    row["engine"] = quality(reference, engine, windows)
    if row["kl_noise"] > 1e-6:  # something is rounded that depends on the input: what the weights alone cost
        plain = choose_precision("auto", quantized, find_targets(["cpu"])).without_rounding()
        row["weights_alone"] = quality(reference, run_plan(quantized, plain, windows), windows)
    row["simulation"] = quality(reference, simulation, windows)
    row["kl_between"] = mean_kl(simulation, engine)
    if layers:
        engines = one_layer_engines(quantized, few)
        row["kl_one_layer"] = [mean_kl(one, two) for one, two in zip(single, engines, strict=True)]
    return row


def calibration(source: Checkpoint) -> dict[str, Any]:
    """Return what `plansmith quantize --recipe fp8` takes with 64 samples of 256 tokens, in a process of its own."""
    out = common.WORK / "quantized" / "calibration"
    command = [
        *common.PLANSMITH,
        "quantize",
        str(source.path),
        "-o",
        str(out),
        "--recipe",
        "fp8",
        "--force",
        "--json",
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    report = json.loads(done.stdout)
    return {"seconds": report["seconds"], "peak_memory_mib": round(report["peak_memory_bytes"] / 2**20)}


def options_of(recipe: str, flags: Sequence[str]) -> QuantizeOptions:
    """Return what the command line of a case means."""
    options: dict[str, Any] = {"recipe": recipe}
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        known = {"--exclude": ("exclude", (value,)), "--kv-cache": ("kv_cache", value)}
        key, parsed = known.get(flag) or ("group_size", int(value))
        options[key] = parsed
    return QuantizeOptions(**options)


def text_windows(checkpoint: Checkpoint, tokens: int) -> list[list[int]]:
    """Return windows of the text that comes with plansmith."""
    prefix, ids = read_text(None).encode(tokenizer_of(checkpoint), tokens)
    ids = [*prefix, *ids]
    return [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)]


def run_plan(checkpoint: Checkpoint, recipe: Precision, windows: list[list[int]]) -> Logits:
    """Return the logits (tokens, V) of a checkpoint's cpu plan."""
    limits = make_limits(checkpoint.spec.max_position_embeddings, max_seq_len=WINDOW)
    with tempfile.TemporaryDirectory(prefix="plansmith-bench-", dir=SCRATCH) as folder:
        plan = Path(folder) / "model.plan"
        model = build_graph(checkpoint.spec, checkpoint.weights, recipe.on_cpu(), limits)
        compile_plan(model, checkpoint.spec, limits, plan)
        pieces = PlanRunner(plan, limits, str(checkpoint.path)).run([TokenRun(tuple(w), 0) for w in windows])
        return np.concatenate([piece.logits.copy() for piece in pieces])


def simulate(simulated: Any, windows: list[list[int]]) -> Logits:
    """Return the logits (tokens, V) of ModelOpt's simulation."""
    return np.concatenate([simulated.logits(window) for window in windows])


def quality(reference: Logits, subject: Logits, windows: list[list[int]]) -> dict[str, float]:
    """Return KL, top-1 and perplexity of a model against the float32 one."""
    kl, agree, loss, count = [], 0, 0.0, 0
    for begin, window in zip(range(0, len(reference), WINDOW), windows, strict=True):
        rows = slice(begin, begin + WINDOW)
        p, q = log_softmax(reference[rows]), log_softmax(subject[rows])
        kl.append(kl_divergence(p, q))
        agree += int((p.argmax(1) == q.argmax(1)).sum())
        loss -= float(q[np.arange(WINDOW - 1), window[1:]].sum())
        count += WINDOW - 1
    every = np.concatenate(kl)
    return {
        "kl": float(every.mean()),
        "kl_error": float(every.std() / len(every) ** 0.5),
        "kl_p99": float(np.quantile(every, 0.99)),
        "top1": agree / len(every),
        "ppl": float(np.exp(loss / count)),
    }


def mean_kl(p: Logits, q: Logits) -> float:
    """Return the mean KL(p || q) of next-token distributions, in nats."""
    parts = [
        kl_divergence(log_softmax(p[i : i + WINDOW]), log_softmax(q[i : i + WINDOW]))
        for i in range(0, len(p), WINDOW)
    ]
    return float(np.concatenate(parts).mean())


def bytes_per_parameter(checkpoint: Checkpoint) -> float:
    """Return the bytes of the plan's quantized weights, scales and zero points included, a parameter of theirs."""
    assert checkpoint.quantization is not None
    limits = make_limits(checkpoint.spec.max_position_embeddings, max_seq_len=WINDOW)
    with tempfile.TemporaryDirectory(prefix="plansmith-bench-", dir=SCRATCH) as folder:
        plan = Path(folder) / "model.plan"
        recipe = choose_precision("auto", checkpoint, find_targets(["cpu"]))
        compile_plan(
            build_graph(checkpoint.spec, checkpoint.weights, recipe, limits), checkpoint.spec, limits, plan
        )
        held = [t for t in read_plan(plan).tensors if t.dtype in (DType.I8, DType.I4, DType.F8, DType.F4)]
        size = sum(t.data.nbytes + t.scales.nbytes + t.zeros.nbytes for t in held)
        return size / sum(t.rows * t.cols for t in held)


class OneLayer:
    """The weights of a model that has one of a quantized checkpoint's layers; see builder/scheme.py."""

    def __init__(self, weights: Any, layer: int) -> None:
        self._weights, self._layer = weights, layer

    def _own(self, name: str) -> str:
        return name.replace("layers.0.", f"layers.{self._layer}.")

    def names(self) -> tuple[str, ...]:
        return tuple(
            name.replace(f"layers.{self._layer}.", "layers.0.")
            for name in self._weights.names()
            if not name.startswith("layers.") or name.startswith(f"layers.{self._layer}.")
        )

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(self._own(name))

    def get(self, name: str) -> np.ndarray:
        return self._weights.get(self._own(name))

    def quantized(self, name: str) -> QuantizedWeight:
        return self._weights.quantized(self._own(name))

    def quantized_input(self, name: str) -> QuantizedInput:
        return self._weights.quantized_input(self._own(name))

    def kv_scales(self, layer: int) -> tuple[float, float]:
        return self._weights.kv_scales(self._layer)


def one_layer_simulations(simulated: Any, tokens: list[int]) -> list[Logits]:
    """Return the logits of the simulated models that have one of the layers each."""
    inner = simulated.model.model
    every = inner.layers
    found = []
    try:
        for layer in every:
            inner.layers = torch.nn.ModuleList([layer])
            found.append(simulated.logits(tokens))
    finally:
        inner.layers = every
    return found


def one_layer_engines(checkpoint: Checkpoint, tokens: list[int]) -> Iterator[Logits]:
    """Yield the logits of the engines that have one of the layers each."""
    spec, quantization = checkpoint.spec, checkpoint.quantization
    assert quantization is not None
    recipe = choose_precision("auto", checkpoint, find_targets(["cpu"]))
    for n in range(spec.num_layers):
        cut = dataclasses.replace(
            recipe, quantization=dataclasses.replace(quantization, schemes=schemes_of(quantization, n))
        )
        view = _View(
            checkpoint.path,
            dataclasses.replace(spec, num_layers=1, layers=spec.layers[n : n + 1]),
            OneLayer(checkpoint.weights, n),
        )
        yield run_plan(view, cut, [tokens])  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class _View:
    """What run_plan needs of a checkpoint."""

    path: Path
    spec: Any
    weights: OneLayer


def schemes_of(quantization: Quantization, layer: int) -> tuple[Any, ...]:
    """Return the schemes of one layer, called layer 0."""
    prefix = f"layers.{layer}."
    return tuple(
        (name.replace(prefix, "layers.0."), scheme)
        for name, scheme in quantization.schemes
        if name.startswith(prefix) or not name.startswith("layers.")
    )


def layers_text(kl: list[float] | None) -> str:
    """Return the median of the models of one layer, and how many of them are below 1e-3."""
    if not kl:
        return "-"
    return f"{statistics.median(kl):.0e}, {sum(x < 1e-3 for x in kl)} of {len(kl)}"


def show(cases: dict[str, Any]) -> None:
    """Print the table of docs/quantization.md."""
    header = [
        "recipe", "KL", "simulation's KL", "p99", "top-1", "perplexity", "engine to simulation", "noise",
        "one layer: median, below 1e-3", "bytes a weight",
    ]  # fmt: skip
    rows = [
        [
            name,
            f"{one['engine']['kl']:.4f}",
            f"{one['simulation']['kl']:.4f}",
            f"{one['engine']['kl_p99']:.3f}",
            f"{one['engine']['top1']:.3f}",
            f"{one['engine']['ppl']:.2f}",
            f"{one['kl_between']:.1e}",
            f"{one['kl_noise']:.1e}",
            layers_text(one.get("kl_one_layer")),
            f"{one['bytes_per_quantized_parameter']:.3f}",
        ]
        for name, one in cases.items()
    ]
    print(common.table(header, rows))


if __name__ == "__main__":
    main()
