"""Runs ModelOpt over a model: finds scales from samples, and refuses what the samples cannot tell."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..runtime.errors import CheckpointError, InvalidArgumentError
from .layers import LM_HEAD
from .progress import Progress

ForwardLoop = Callable[[Any], None]


def batches(ids: npt.NDArray[np.int64], batch_size: int, device: torch.device) -> list[torch.Tensor]:
    """Return windows (N, L) as batches (<= batch_size, L), in order."""
    return [
        torch.from_numpy(ids[n : n + batch_size].copy()).to(device) for n in range(0, len(ids), batch_size)
    ]


def forward_loop(
    data: Sequence[torch.Tensor],
    watch: ActivationWatch,
    progress: Progress,
    search: Sequence[torch.Tensor] | None = None,
) -> ForwardLoop:
    """Return what ModelOpt calls once for every pass over the samples; it looks at every input on the way.

    search : batches of the second pass and later ones; None = the same
    The logits are not computed unless the output layer is calibrated too: they can be half the work.
    """
    first = True

    def loop(model: Any) -> None:
        nonlocal first
        taken = data if first or search is None else search
        first = False
        body = model if watch.has_head else model.model
        steps = progress.counter(len(taken) * watch.num_layers)
        with torch.no_grad(), watch.watching(model, steps):
            for batch in taken:
                with watch.explaining():
                    body(input_ids=batch, use_cache=False)
                watch.check_finite()
        watch.check_reached()

    return loop


class ActivationWatch:
    """Looks at the inputs of linear layers while samples run through them.

    layers : names of modules
    """

    def __init__(self, layers: Sequence[str]) -> None:
        self._largest: dict[str, float] = dict.fromkeys(layers, -1.0)  # -1 = not reached
        self._infinite: list[str] = []
        self.has_head = LM_HEAD in self._largest
        self.num_layers = len(self._largest)

    @contextlib.contextmanager
    def watching(self, model: Any, on_layer: Callable[[], None]) -> Iterator[None]:
        """Look at the layers of a model inside the block, and call on_layer for each that is reached."""
        handles = [
            model.get_submodule(name).register_forward_pre_hook(self._hook(name, on_layer), prepend=True)
            for name in self._largest
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str, on_layer: Callable[[], None]) -> Callable[..., None]:
        def look(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
            on_layer()
            largest = float(arguments[0].detach().abs().amax()) if arguments[0].numel() else 0.0
            if not np.isfinite(largest):
                self._infinite.append(name)
            else:
                self._largest[name] = max(self._largest[name], largest)

        return look

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn an error of ModelOpt's inside the block into ours when an input was not finite."""
        try:
            yield
        except Exception:
            self.check_finite()
            raise

    def check_finite(self) -> None:
        """Raise CheckpointError naming the layers whose input was NaN or infinite."""
        if self._infinite:
            raise CheckpointError(
                f"calibration: the input of {_listed(self._infinite)} is NaN or infinite; the weights before it are "
                "damaged, or the model overflows; check that the unquantized checkpoint generates text"
            )

    def check_reached(self) -> None:
        """Raise CheckpointError naming layers that no sample reached, or whose inputs were all 0."""
        missed = [name for name, largest in self._largest.items() if largest < 0]
        if missed:
            raise CheckpointError(
                f"calibration: no sample reached {_listed(missed)}; leave such layers out with --exclude"
            )
        zero = [name for name, largest in self._largest.items() if largest == 0]
        if zero:
            raise CheckpointError(
                f"calibration: the input of {_listed(zero)} was 0 for all samples, so there is no scale for it; leave "
                "such layers out with --exclude, or calibrate with other texts"
            )

    def largest(self) -> dict[str, float]:
        """Return the largest magnitude of each layer's input so far."""
        return dict(self._largest)


def _listed(names: Sequence[str]) -> str:
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:3]) + (f" and {len(unique) - 3} more layers" if len(unique) > 3 else "")


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits (B, L, V) of windows (B, L), float32."""
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=ids, use_cache=False).logits.float()
    return result


def mean_kl(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Return the mean Kullback-Leibler divergence of next-token distributions, in nats."""
    p, q = torch.log_softmax(reference, -1), torch.log_softmax(other, -1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def mean_loss(scores: torch.Tensor, ids: torch.Tensor) -> float:
    """Return the mean negative log-probability of the tokens that follow, in nats."""
    flat = scores[:, :-1].flatten(0, 1)
    return float(torch.nn.functional.cross_entropy(flat, ids[:, 1:].flatten()))


def judge_samples(model: Any, batch: torch.Tensor, vocab_size: int, facts: dict[str, Any]) -> None:
    """Note where the model predicts texts (B, L) no better than chance: the tokenizer may be another model's.

    facts : gets "calibration_loss", and the note in "notes"
    """
    if batch.shape[1] < 2:
        return
    loss, chance = mean_loss(logits(model, batch), batch), math.log(vocab_size)
    facts["calibration_loss"] = loss
    if loss > chance:
        facts["notes"].append(
            f"the unquantized model predicts the calibration texts no better than chance (loss {loss:.1f} nats a "
            f"token, chance is {chance:.1f}): is the tokenizer this model's own?"
        )


def check_weights(model: Any, layers: Sequence[str]) -> None:
    """Raise CheckpointError naming weights of the model that hold NaN or infinity, and layers that are all zeros."""
    broken = [
        name.removesuffix(".weight")
        for name, weight in model.named_parameters()
        if not bool(weight.detach().isfinite().all())
    ]
    empty: list[str] = []
    for name in layers:
        if float(model.get_submodule(name).weight.abs().amax()) == 0:
            empty.append(name)
    if broken:
        raise CheckpointError(
            f"the weight of {_listed(broken)} holds NaN or infinity; the checkpoint is damaged"
        )
    if empty:
        raise CheckpointError(
            f"the weight of {_listed(empty)} is 0 throughout, so there is no scale for it; leave such layers out "
            "with --exclude"
        )


def check_scales(model: Any, layers: Sequence[str]) -> None:
    """Raise InvalidArgumentError naming layers that came out of calibration without a usable scale."""
    bad = []
    for name in layers:
        module = model.get_submodule(name)
        factors = getattr(module.input_quantizer, "pre_quant_scale", None)
        if factors is not None and not bool(factors.isfinite().all()):
            bad.append(name)
        for one in ("weight_quantizer", "input_quantizer"):
            bad += [
                name
                for amax in _amaxes(getattr(module, one))
                if not bool((amax > 0).any() & amax.isfinite().all())
            ]
    if bad:
        raise InvalidArgumentError(
            f"calibration found no scale for {_listed(bad)}; leave them out with --exclude, or give more samples"
        )


def _amaxes(quantizer: Any) -> Iterator[torch.Tensor]:
    for one in quantizer if isinstance(quantizer, torch.nn.Sequential) else [quantizer]:
        if one.is_enabled and one.amax is not None:
            yield one.amax
