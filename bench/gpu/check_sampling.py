"""Sampling on the device against the rule in numpy: the same tokens, bit for bit."""

from __future__ import annotations

import torch
from bench_device import Device
from finding import Findings
from sampling_problem import KINDS, SamplingProblem


def run(device: Device, findings: Findings) -> None:
    """Draw rows of every kind over several vocabularies, then from logits that have NaN."""
    sizes = device.pick((128256, 32000, 50257, 1000), (2100,))
    copies = device.pick(8, 1)
    for i, vocab_size in enumerate(sizes):
        if i % device.num_shards != device.shard:
            continue
        kinds = list(KINDS) * copies
        with findings.guarded(f"sampling, {vocab_size} tokens"):
            problem = SamplingProblem(device, kinds, vocab_size, device.seed + i)
            draw(findings, problem, f"sampling, {vocab_size} tokens, {len(kinds)} rows of every kind")
            problem.logits[0, 3] = float("nan")
            problem.logits[1, vocab_size - 1] = float("inf")
            got, want = problem.sample()[:2, 0], problem.tokens()[:2]
            findings.equal(f"sampling, {vocab_size} tokens, NaN and infinity in the logits", got, want)


def draw(findings: Findings, problem: SamplingProblem, case: str) -> None:
    """Judge tokens, then the log-probability of each where a row asked for it."""
    samples = problem.sample().clone().cpu()
    findings.equal(case, samples[:, 0], problem.tokens())
    asked = [i for i, kind in enumerate(problem.kinds) if kind == "log-probabilities"]
    got = samples[asked, 1].view(torch.float32)
    want = torch.tensor([problem.log_probability(i, int(samples[i, 0])) for i in asked])
    # float32 of a sum in float64: a rounding or two of numbers up to 32.
    findings.close(f"{case}: log-probabilities", got, want, 32 * 2.0**-23)
