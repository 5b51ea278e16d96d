"""A whole decode step of Llama-3-8B's shape: our kernels and cuBLAS in one CUDA graph, beside transformers' fastest."""

from __future__ import annotations

import gc

import torch
from attention_problem import TORCH
from bench_device import Device
from finding import Findings
from llama_shape import LLAMA_3_8B, SMALL, Shape, Weights, decode_inputs, random_weights
from our_step import OurStep
from stages import GOALS
from transformers_peer import Peer, build_model

COMPILE_S = 60
"""Seconds that torch.compile may take for 32 layers (measured nowhere yet); it is left out where less time is left."""


def run(device: Device, findings: Findings) -> None:
    """Compare results at a small shape, then time the full one: every batch in bfloat16 and float16."""
    with torch.inference_mode():
        for dtype in dtypes(device):
            with findings.guarded(f"small shape {_name(dtype)}"):
                compare_small(device, findings, dtype)
        shape = device.pick(LLAMA_3_8B, SMALL)
        batches = device.pick((64, 8, 1), (2,))
        for dtype in dtypes(device):
            weights = random_weights(device, shape, dtype)
            for batch in batches:
                attempt(device, findings, shape, weights, dtype, batch, least_s=15)
            del weights
            _free(device)
        # Last, since compiling may take all the time that is left.
        dtype = dtypes(device)[0]
        weights = random_weights(device, shape, dtype)
        for batch in batches:
            attempt(device, findings, shape, weights, dtype, batch, least_s=COMPILE_S, compiled=True)


def attempt(
    device: Device,
    findings: Findings,
    shape: Shape,
    weights: Weights,
    dtype: torch.dtype,
    batch: int,
    least_s: float,
    compiled: bool = False,
) -> None:
    """Measure one batch where `least_s` seconds are left; what fails is wrong and the next one follows."""
    case = f"batch {batch} {_name(dtype)}" + (", torch.compile" if compiled else "")
    if findings.seconds_left() < least_s:
        findings.skip(case, "no time left")
        return
    with findings.guarded(case):
        measure(device, findings, case, shape, weights, dtype, batch, compiled)
    _free(device)


def dtypes(device: Device) -> list[torch.dtype]:
    """Return the types to run."""
    return [TORCH[name] for name in device.dtypes()]


def compare_small(device: Device, findings: Findings, dtype: torch.dtype) -> None:
    """Hold our step and transformers' against transformers in float64 over the same weights and cache.

    Both round at the same places, so ours may be at most twice as far from float64 as transformers is.
    """
    weights = random_weights(device, SMALL, dtype)
    inputs = decode_inputs(device, SMALL, batch=3, context=75)
    peer = Peer(device, SMALL, weights, inputs, dtype)
    ours = OurStep(device, SMALL, weights, inputs, dtype)
    for idx, layer in enumerate(peer.cache.layers):
        ours.fill(idx, layer.keys, layer.values)
    exact = float64_logits(device, peer, weights)
    peer.rewind()
    theirs = peer.logits().double()
    got = ours.logits().double()
    bound = max(2 * _distance(theirs, exact), torch.finfo(dtype).eps)
    case = f"small shape {_name(dtype)}: logits beside float64"
    findings.close(case, torch.tensor(_distance(got, exact)), torch.tensor(0.0), bound)
    findings.equal(
        f"small shape {_name(dtype)}: greedy tokens", ours.step().long(), ours.logits_out.argmax(dim=-1)
    )


def float64_logits(device: Device, peer: Peer, weights: Weights) -> torch.Tensor:
    """Return the logits of the peer's step in float64: its model and cache, widened."""
    wide = Peer.__new__(Peer)
    wide.__dict__.update(peer.__dict__)
    wide.model = build_model(device, SMALL, weights, torch.float64).double()
    wide.cache = type(peer.cache)(config=peer.model.config, max_cache_len=peer.inputs.context)
    wide.cache.early_initialization(
        peer.inputs.batch, SMALL.kv_num_heads, SMALL.head_dim, torch.float64, torch.device(device.name)
    )
    for layer, held in zip(wide.cache.layers, peer.cache.layers, strict=True):
        layer.keys.copy_(held.keys)
        layer.values.copy_(held.values)
    wide.rewind()
    return wide.logits()


def measure(
    device: Device,
    findings: Findings,
    case: str,
    shape: Shape,
    weights: Weights,
    dtype: torch.dtype,
    batch: int,
    compiled: bool,
) -> None:
    """Time one step of ours beside transformers', over equal caches, after their logits have been compared."""
    context = device.pick(4096, 48)
    inputs = decode_inputs(device, shape, batch, context)
    peer = Peer(device, shape, weights, inputs, dtype)
    ours = OurStep(device, shape, weights, inputs, dtype)
    for idx, layer in enumerate(peer.cache.layers):
        ours.fill(idx, layer.keys, layer.values)
    peer.rewind()
    theirs = peer.logits().double()
    # Two right answers part by the rounding of about 8 results a layer, which adds up as a random walk does.
    bound = 4 * (8 * shape.num_layers) ** 0.5 * torch.finfo(dtype).eps / 2
    findings.close(
        f"{case}: logits beside transformers'",
        torch.tensor(_distance(ours.logits().double(), theirs)),
        torch.tensor(0.0),
        bound,
    )
    theirs_step = peer.compiled(device.pick("inductor", "eager")) if compiled else peer.step
    times = device.times(
        {"ours": ours.step, "transformers": theirs_step},
        rounds=11,
        before={"transformers": peer.rewind},
        flush=False,
    )
    value, beside = times["ours"] * 1e3, times["transformers"] * 1e3
    findings.rate(case, value, "ms", "transformers", beside, GOALS["step"], less_is_better=True)


def _distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return |got - want| / |want| over all elements."""
    return float((got - want).norm() / want.norm())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _free(device: Device) -> None:
    """Give back what the last case held: two caches of 34 GB each do not fit beside two more."""
    torch._dynamo.reset()
    gc.collect()
    if not device.dry_run:
        torch.cuda.empty_cache()
