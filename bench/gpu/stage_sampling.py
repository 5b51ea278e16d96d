"""Sampling: microseconds for 1, 64 and 256 rows of Llama-3's vocabulary, beside what torch's operations take."""

from __future__ import annotations

from collections.abc import Callable

import torch
from bench_device import Device
from finding import Findings
from sampling_problem import SamplingProblem
from stages import GOALS

TIMED = ("greedy", "temperature", "top-p", "wide top-p", "top-k", "penalties", "mask")


def run(device: Device, findings: Findings) -> None:
    """Time each kind of row; torch draws from the same distribution, by what it has for that."""
    vocab_size = device.pick(128256, 700)
    for num_rows in device.pick((64, 1, 256), (2,)):
        for kind in TIMED:
            case = f"{num_rows} rows, {kind}"
            if findings.seconds_left() < 6:
                findings.skip(case, "no time left")
                continue
            with findings.guarded(case):
                problem = SamplingProblem(device, [kind] * num_rows, vocab_size, device.seed)
                functions = {"ours": problem.sample, "torch": peer(problem, kind)}
                times = device.times(functions, rounds=9)
                value, beside = times["ours"] * 1e6, times["torch"] * 1e6
                findings.rate(
                    case,
                    value,
                    "us",
                    "torch",
                    beside,
                    GOALS["sampling"],
                    less_is_better=True,
                    minor=num_rows == 256,
                )


def peer(problem: SamplingProblem, kind: str) -> Callable[[], torch.Tensor]:
    """Return torch's operations for a kind of row: none of it waits for the host, so a graph holds them too.

    Draws are by an exponential race, which is faster than torch.multinomial and needs no synchronisation.
    """
    row = problem.rows[0]
    logits = problem.logits
    temperature, top_p, top_k = (row[name].item() for name in ("temperature", "top_p", "top_k"))
    ids = (
        torch.from_numpy(problem.edits["id"][row["edit_begin"] : row["edit_end"]].copy())
        .long()
        .to(logits.device)
    )
    edits = problem.edits[row["edit_begin"] : row["edit_end"]]
    factor, minus, plus = (
        torch.from_numpy(edits[name].copy()).to(logits.device) for name in ("factor", "minus", "plus")
    )
    bits = torch.from_numpy(problem.masks.view("u1")[0].copy()).to(logits.device)
    allowed = (bits[:, None] >> torch.arange(8, device=logits.device)).bitwise_and(1).bool().view(-1)

    def sample() -> torch.Tensor:
        x = logits
        if kind == "greedy":
            return x.argmax(-1)
        if kind == "penalties":
            edited = x[:, ids]
            edited = torch.where(edited > 0, edited / factor, edited * factor) - minus + plus
            x = x.index_copy(1, ids, edited)
        if kind == "mask":
            x = x.masked_fill(~allowed[: x.shape[1]], float("-inf"))
        x = x / temperature
        if top_k:
            x, chosen = x.topk(min(top_k, x.shape[1]), dim=-1)
            return chosen.gather(1, race(x.softmax(-1)))
        if top_p < 1:
            ordered, chosen = x.sort(dim=-1, descending=True)
            p = ordered.softmax(-1)
            p = p.masked_fill(p.cumsum(-1) - p > top_p, 0.0)
            return chosen.gather(1, race(p))
        return race(x.softmax(-1))

    return sample


def race(p: torch.Tensor) -> torch.Tensor:
    """Return an index drawn by each row's probabilities, (R, 1)."""
    return (p / torch.empty_like(p).exponential_()).argmax(-1, keepdim=True)
