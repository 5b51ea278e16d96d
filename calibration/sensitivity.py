"""Which layers cost most: the KL of a model in which one layer alone is quantized, or one alone is left in float.

A layer here is a decoder block, the head ("lm_head", with an embedding that shares its bits), or the KV cache of all
blocks ("kv_cache"). Each is measured with a cpu plan of its own on a few hundred tokens, scored at every position,
against the unquantized checkpoint. A block that is in float has the unquantized checkpoint's weights, norms included,
so factors that a recipe moved from one of its weights into another cannot be torn apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..builder.checkpoint import Checkpoint
from ..builder.limits import Limits, make_limits
from ..builder.precision import Precision, precision
from ..builder.progress import Progress, no_progress
from ..builder.scratch import scratch_directory
from ..builder.spec import DecoderSpec
from ..runtime.errors import InvalidArgumentError
from .eval_text import read_text, tokenizer_of, windows
from .mixture import Mixed, layer_bytes, mixed, quantized_layers
from .scoring import PlanRunner, TokenRun, compile_cpu, kl_divergence, log_softmax, row_slices

SENSITIVITY = "sensitivity"
WINDOW_TOKENS = 128

Mode = Literal["alone", "kept", "both"]


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """What quantizing one layer costs.

    kl_alone : mean KL, nats, with this layer alone quantized; None where that was not measured
    kl_kept : with all but this layer quantized; the gain of keeping it in float is Sensitivity.kl - kl_kept
    weight_bytes, float_bytes : of its weights as quantized, and in 16 bits
    """

    layer: str
    kl_alone: float | None
    kl_kept: float | None
    weight_bytes: int
    float_bytes: int


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """The layers of a model in its order, and the KL of all of them quantized."""

    precision: str
    tokens: int
    kl: float
    layers: tuple[LayerCost, ...]

    def costliest(self, count: int) -> list[LayerCost]:
        """Return the layers that cost most, the first the worst."""
        return sorted(self.layers, key=self.cost, reverse=True)[:count]

    def cost(self, row: LayerCost) -> float:
        """Return what a layer costs: its KL alone, else the gain of keeping it in float."""
        if row.kl_alone is not None:
            return row.kl_alone
        return 0.0 if row.kl_kept is None else self.kl - row.kl_kept

    def to_json(self) -> dict[str, Any]:
        """Return the measurement as JSON values; each layer has its "cost" besides."""
        result = dataclasses.asdict(self)
        for one, row in zip(result["layers"], self.layers, strict=True):
            one["cost"] = self.cost(row)
        return result


def measure_sensitivity(
    checkpoint: Checkpoint,
    recipe: Precision,
    against: Checkpoint,
    *,
    mode: Mode = "alone",
    text: pathlib.Path | None = None,
    num_tokens: int = 256,
    num_threads: int = 0,
    weights: str = "auto",
    progress: Progress | None = None,
) -> Sensitivity:
    """Return what each quantized layer costs; takes a compile and a run a layer.

    mode : "alone" quantizes one layer at a time, "kept" leaves one out; "both" takes twice the time
    num_tokens : of the text, in windows of WINDOW_TOKENS; float32 log-probabilities of all are held (tokens x V)
    num_threads, weights : as EvalOptions has them
    raises InvalidArgumentError when nothing is quantized, and as evaluate_plan
    """
    layers = layers_that_cost(checkpoint.spec, recipe)
    bench = _Bench(against, text, num_tokens, num_threads, weights)
    tell = progress or no_progress
    total = 2 + len(layers) * (2 if mode == "both" else 1)
    done = 0

    def measure(quantized: Sequence[str], what: str) -> float:
        nonlocal done
        tell(SENSITIVITY, what, done, total)
        done += 1
        return bench.kl(mixed(checkpoint, recipe, against, quantized))

    with bench.opened():
        tell(SENSITIVITY, "the original", done, total)
        bench.remember()
        done += 1
        everything = measure(layers, "all layers")
        rows = []
        for layer in layers:
            others = [one for one in layers if one != layer]
            sizes = layer_bytes(checkpoint.spec, recipe, layer)
            rows.append(
                LayerCost(
                    layer=layer,
                    kl_alone=None if mode == "kept" else measure([layer], f"{layer} alone"),
                    kl_kept=None if mode == "alone" else measure(others, f"all but {layer}"),
                    weight_bytes=sizes[0],
                    float_bytes=sizes[1],
                )
            )
    return Sensitivity(recipe.name, bench.num_tokens, everything, tuple(rows))


def layers_that_cost(spec: DecoderSpec, recipe: Precision) -> tuple[str, ...]:
    """Return the layers that a recipe quantizes, in the model's order; InvalidArgumentError where it is none."""
    layers = quantized_layers(spec, recipe)
    if not layers:
        raise InvalidArgumentError(
            f"{recipe.name} quantizes no layer, so none can cost anything; give a quantized recipe, or leave the "
            "sensitivities out"
        )
    return layers


def bits_table(
    candidates: Mapping[str, tuple[Checkpoint, Precision]],
    against: Checkpoint,
    *,
    text: pathlib.Path | None = None,
    num_tokens: int = 256,
    num_threads: int = 0,
    progress: Progress | None = None,
) -> dict[str, Sensitivity]:
    """Return each candidate's costs by its name: what a layer costs and weighs in this format or that.

    candidates : e.g. {"int8": (checkpoint, int8), "int4": (checkpoint, int4)}, or checkpoints quantized from `against`
    """
    return {
        name: measure_sensitivity(
            checkpoint,
            recipe,
            against,
            text=text,
            num_tokens=num_tokens,
            num_threads=num_threads,
            progress=progress,
        )
        for name, (checkpoint, recipe) in candidates.items()
    }


class _Bench:
    """The text and what the original says of it, against which every mixture is held."""

    def __init__(
        self,
        against: Checkpoint,
        text: pathlib.Path | None,
        num_tokens: int,
        num_threads: int,
        weights: str,
    ) -> None:
        self._against, self._num_threads, self._weights = against, num_threads, weights
        self._limits = _limits(against.spec)
        self._folder: pathlib.Path | None = None
        prefix, ids = read_text(text).encode(tokenizer_of(against), num_tokens)
        length = min(WINDOW_TOKENS, self._limits.max_seq_len, len(prefix) + len(ids))
        rows = windows(prefix, ids, length, "the text")
        self._runs = [TokenRun(row, len(prefix)) for row in rows]
        self.num_tokens = sum(len(run.tokens) - run.first for run in self._runs)
        self._reference: list[npt.NDArray[np.float32]] = []

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Have a directory for plans, one at a time."""
        with scratch_directory("sensitivity") as folder:
            self._folder = folder
            yield

    def remember(self) -> None:
        """Run the original."""
        model = Mixed(self._against.spec, self._against.weights, precision("fp32"))
        self._reference = [
            np.concatenate([log_softmax(logits[part]).astype(np.float32) for part in row_slices(logits)])
            for logits in self._logits(model, "the original")
        ]

    def kl(self, model: Mixed) -> float:
        """Return the mean KL of a mixture, nats."""
        total = 0.0
        for logits, wanted in zip(self._logits(model, "the engine"), self._reference, strict=True):
            for part in row_slices(logits):
                total += float(
                    kl_divergence(wanted[part].astype(np.float64), log_softmax(logits[part])).sum()
                )
        return total / self.num_tokens

    def _logits(self, model: Mixed, label: str) -> Iterator[npt.NDArray[np.float32]]:
        assert self._folder is not None, "measured inside of opened()"
        plan = self._folder / "model.plan"
        plan.unlink(missing_ok=True)
        compile_cpu(model.spec, model.weights, model.recipe, self._limits, plan)
        runner = PlanRunner(plan, self._limits, label, self._num_threads, self._weights)
        for piece in runner.run(self._runs):
            yield piece.logits


def _limits(spec: DecoderSpec) -> Limits:
    return make_limits(
        spec.max_position_embeddings, max_seq_len=min(WINDOW_TOKENS, spec.max_position_embeddings)
    )
