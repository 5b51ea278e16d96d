"""kv_write on random steps: pools, head sizes and blocks, with and without rope, against its reference in float64."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from attention_problem import TORCH, UNIT_ROUNDOFF, numbers
from bench_device import Device
from finding import Findings
from plansmith.plugins.kv_write import reference, spec
from plansmith.plugins.kv_write.run import kv_write

NAN_CODE = 0x7F
UNWRITTEN = {"same": float("nan"), "fp8": NAN_CODE, "int8": -128}
"""What pools hold before: a write that goes astray changes one, one that is missing leaves it."""


def run(device: Device, findings: Findings) -> None:
    """Write steps of sequences of all lengths, padding among them."""
    chance = random.Random(device.seed + 7)
    for i in range(device.pick(48, 5)):
        kv = ("same", "fp8", "int8")[i % 3]
        dtype = device.dtypes()[i // 3 % len(device.dtypes())]
        heads = chance.choice(device.pick(((32, 8), (9, 3), (4, 4)), ((4, 2), (3, 1))))
        head_dim = chance.choice(device.pick((64, 128, 80, 256), (16, 24)))
        # Rope before rounding to codes: a number near the middle of two may go either way, so those are left unrotated.
        rotary_dim = chance.choice((0, head_dim, head_dim // 2)) if kv == "same" else 0
        write = spec.KvWrite(dtype, kv, *heads, head_dim, rotary_dim)  # type: ignore[arg-type]
        block_size = chance.choice(device.pick((16, 64, 128), (4, 16)))
        longest = device.pick(500, 30)
        kv_lens = [chance.randint(1, longest) for _ in range(3)] + [0, longest]
        query_lens = [chance.choice((1, chance.randint(1, length))) if length else 0 for length in kv_lens]
        case = (
            f"kv_write: {write.dtype}, {kv} KV, heads {heads[0]}/{heads[1]} x {head_dim}, rope {rotary_dim}"
        )
        if i % device.num_shards == device.shard:
            with findings.guarded(case):
                check(
                    device,
                    findings,
                    f"{case}, blocks of {block_size}",
                    write,
                    query_lens,
                    kv_lens,
                    block_size,
                )


def check(
    device: Device,
    findings: Findings,
    case: str,
    write: spec.KvWrite,
    query_lens: list[int],
    kv_lens: list[int],
    block_size: int,
) -> None:
    """Run one step and hold pools and q against the reference."""
    given = problem(device, write, query_lens, kv_lens, block_size)
    q = given["q"].clone()
    before_k, before_v = given["k_pool"].clone(), given["v_pool"].clone()
    rope = {"q": q, "cos": given["cos"], "sin": given["sin"], "position_ids": given["position_ids"]}
    scales = {} if write.kv == "same" else {"k_scale": given["k_scale"], "v_scale": given["v_scale"]}
    names = ("k", "v", "k_pool", "v_pool", "cu_query_lens", "kv_lens", "block_table")
    kv_write(write, *(given[name] for name in names), **(rope if write.rotary_dim else {}), **scales)
    want_k, want_v, want_q, bound = expected(write, given, before_k, before_v)
    for name, want in (("k_pool", want_k), ("v_pool", want_v)):
        got = given[name].cpu()
        if write.rotary_dim and name == "k_pool":
            same = torch.isnan(want) == torch.isnan(got.double())
            findings.equal(f"{case}: which positions are written", same, torch.ones_like(same))
            findings.close(f"{case}: rotated K", got.double().nan_to_num(0.0), want.nan_to_num(0.0), bound)
        else:
            findings.equal(f"{case}: {name}", numbers(got, write.kv), want)
    if write.rotary_dim:
        findings.close(f"{case}: rotated q", q, want_q, bound)


def problem(
    device: Device, write: spec.KvWrite, query_lens: list[int], kv_lens: list[int], block_size: int
) -> dict[str, Any]:
    """Return the arguments: pools that nothing is written to yet, blocks in random order."""
    dtype = TORCH[write.dtype]
    num_tokens = sum(query_lens)
    widths = [-(-length // block_size) for length in kv_lens]
    order = device.permutation(sum(widths) + 3)
    table = torch.full((len(kv_lens), max(widths)), -1, dtype=torch.int32, device=device.name)
    for b, width in enumerate(widths):
        at = sum(widths[:b])
        table[b, :width] = order[at : at + width]
    held = {"same": dtype, "fp8": torch.uint8, "int8": torch.int8}[write.kv]
    shape = (order.numel(), write.kv_num_heads, block_size, write.head_dim)
    positions = [range(length - rows, length) for rows, length in zip(query_lens, kv_lens, strict=True)]
    angles = device.normal(max(kv_lens), max(1, write.rotary_dim // 2))

    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device.name)

    return {
        "q": device.normal(num_tokens, write.num_heads * write.head_dim, dtype=dtype),
        "k": device.normal(num_tokens, write.kv_num_heads * write.head_dim, dtype=dtype),
        "v": device.normal(num_tokens, write.kv_num_heads * write.head_dim, dtype=dtype, scale=3.0),
        "k_pool": torch.full(shape, UNWRITTEN[write.kv], dtype=held, device=device.name),
        "v_pool": torch.full(shape, UNWRITTEN[write.kv], dtype=held, device=device.name),
        "cu_query_lens": ints(np.cumsum([0, *query_lens]).tolist()),
        "kv_lens": ints(kv_lens),
        "block_table": table,
        "position_ids": ints(p for one in positions for p in one),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "k_scale": torch.tensor(0.0173, device=device.name),
        "v_scale": torch.tensor(0.0291, device=device.name),
    }


def expected(
    write: spec.KvWrite, given: dict[str, Any], before_k: torch.Tensor, before_v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Return (k_pool, v_pool, q) in float64 and how far a rotated number may be from them."""
    host = {name: value.cpu() for name, value in given.items()}

    def rotated(name: str) -> Any:
        # A copy in float32 first: numpy has no bfloat16, and every number of both types is one of float32.
        x = host[name].float().numpy()
        if not write.rotary_dim:
            return x
        tables = (host["cos"].numpy(), host["sin"].numpy())
        return reference.rotate(x, *tables, host["position_ids"].numpy(), write.head_dim, write.rotary_dim)

    k, q = rotated("k"), rotated("q")
    pools = reference.kv_write(
        k,
        host["v"].float().numpy(),
        numbers(before_k.cpu(), write.kv).numpy(),
        numbers(before_v.cpu(), write.kv).numpy(),
        host["cu_query_lens"].numpy(),
        host["kv_lens"].numpy(),
        host["block_table"].numpy(),
        kv="float" if write.kv == "same" else write.kv,
        k_scale=float(host["k_scale"]),
        v_scale=float(host["v_scale"]),
    )
    # One rounding to the type, of numbers no larger than the largest; float32 adds next to nothing.
    bound = 1.01 * UNIT_ROUNDOFF[write.dtype] * max(float(np.abs(k).max()), float(np.abs(q).max()))
    wanted_k, wanted_v = (torch.from_numpy(pool) for pool in pools)
    return wanted_k, wanted_v, torch.from_numpy(q), bound
