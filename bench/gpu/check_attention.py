"""Attention's kernels on random steps: types, pools, head sizes, windows, soft caps, decode, prefill and both."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from attention_problem import Case, Problem, bound, relative_errors
from bench_device import Device
from finding import Findings
from plansmith.plugins.paged_attention import spec

HEADS = ((32, 8), (8, 1), (9, 3), (4, 4), (14, 2))
STEPS = ("decode", "prefill", "mixed", "verify")


def run(device: Device, findings: Findings) -> None:
    """Hold out against float64 row by row, and a second launch against the first, bit for bit."""
    for name, case in cases(device):
        if findings.seconds_left() < 25:
            findings.skip("attention: the rest", "no time left")
            return
        with findings.guarded(f"attention {name}: {case}"):
            problem = Problem(device, case)
            got = problem.attend().clone()
            worst = relative_errors(got, problem.exact(), case.attention.head_dim)
            findings.close(
                f"attention {name}: {case}", worst, torch.zeros_like(worst), bound(case.attention.dtype)
            )
            if name == "decode":
                problem.out.fill_(float("nan"))
                findings.equal(f"attention {name} again: {case}", problem.attend(), got)


def cases(device: Device) -> Iterator[tuple[str, Case]]:
    """Yield named random cases, this process's share of them; all types of each kind come before more of one."""
    chance = random.Random(device.seed)
    number = device.pick(96, 6)
    for i in range(number):
        step = STEPS[i % len(STEPS)]
        case = random_case(device, chance, i, step)
        if i % device.num_shards == device.shard:
            yield step, case


def random_case(device: Device, chance: random.Random, i: int, step: str) -> Case:
    """Return one case; i goes through the types and pools."""
    dtypes = device.dtypes()
    dtype, kv = dtypes[i // 4 % len(dtypes)], ("same", "fp8", "int8")[i // len(STEPS) % 3]
    heads = chance.choice(device.pick(HEADS, ((4, 2), (3, 1))))
    head_dim = chance.choice(device.pick((64, 128, 128, 256, 80, 96), (16, 24)))
    cap = chance.choice((0.0, 0.0, 20.0))
    attention = spec.Attention(dtype, kv, *heads, head_dim, has_softcap=cap > 0, sm=device.sm())  # type: ignore[arg-type]
    # Splits are whole tiles: 128 positions and more.
    longest, rows = device.pick((3000, 700), (300, 300))
    num = chance.randint(1, device.pick(9, 4))
    kv_lens = [chance.randint(1, longest) if chance.random() < 0.9 else 0 for _ in range(num)]
    query_rows = {"decode": 1, "prefill": 0, "mixed": 1, "verify": 4}[step]
    query_lens = []
    for length in kv_lens:
        most = {"decode": 1, "prefill": rows, "mixed": chance.choice((1, rows)), "verify": 5}[step]
        query_lens.append(chance.randint(1, min(most, length)) if length else 0)
    return Case(
        attention,
        tuple(query_lens),
        tuple(kv_lens),
        block_size=chance.choice(device.pick((16, 32, 64, 128), (4, 16))),
        window=chance.choice((0, 0, longest // 3, 5)),
        softcap=cap,
        query_rows=query_rows,
        split_len=chance.choice(device.pick((512, 256, 1024), (128, 256))),
    )
