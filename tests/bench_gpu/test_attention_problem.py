"""The float64 answer that attention's kernels are judged by, against the operation's own reference."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "gpu"))

from attention_problem import Case, Problem, numbers, relative_errors
from bench_device import Device
from plansmith.plugins.paged_attention import reference, spec


@pytest.mark.parametrize("kv", ["same", "fp8", "int8"])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (5, 0.0), (0, 3.0)])
def test_exact_is_the_reference(kv: Any, window: int, softcap: float) -> None:
    attention = spec.Attention("fp16", kv, 4, 2, 16, has_softcap=softcap > 0)
    case = Case(attention, (1, 4, 7), (9, 4, 30), block_size=4, window=window, softcap=softcap)
    problem = Problem(Device(dry_run=True, seed=3), case)
    # The reference writes the step's own K and V; they are what the pools hold already.
    k_pool, v_pool = (numbers(pool, kv).numpy() for pool in (problem.k_pool, problem.v_pool))
    rows = {"k": [], "v": []}  # type: ignore[var-annotated]
    for b, (count, length) in enumerate(zip(case.query_lens, case.kv_lens, strict=True)):
        for position in range(length - count, length):
            block = int(problem.block_table[b, position // 4])
            rows["k"].append(k_pool[block, :, position % 4].reshape(-1))
            rows["v"].append(v_pool[block, :, position % 4].reshape(-1))
    scales = [1.0 if scale is None else float(scale) for scale in (problem.k_scale, problem.v_scale)]
    k, v = (np.array(rows[name]) * scale for name, scale in zip(rows, scales, strict=True))
    want, _, _ = reference.paged_attention(
        problem.q.numpy().astype(np.float64),
        k,
        v,
        k_pool,
        v_pool,
        problem.cu_query_lens.numpy(),
        problem.kv_lens.numpy(),
        problem.block_table.numpy(),
        num_heads=4,
        kv_num_heads=2,
        head_dim=16,
        scale=problem.scale,
        softcap=softcap,
        window=window,
        kv="float" if kv == "same" else kv,
        k_scale=scales[0],
        v_scale=scales[1],
    )
    np.testing.assert_allclose(problem.exact().numpy(), want, rtol=1e-6, atol=1e-7)


def test_a_position_too_few_is_seen() -> None:
    attention = spec.Attention("fp16", "same", 4, 2, 16)
    problem = Problem(Device(dry_run=True), Case(attention, (1,), (900,), block_size=16))
    exact = problem.exact()
    fewer = Problem(Device(dry_run=True), Case(attention, (1,), (899,), block_size=16))
    fewer.__dict__.update({name: value for name, value in vars(problem).items() if name != "case"})
    from attention_problem import bound

    worst = float(relative_errors(fewer.exact(), exact, 16).max())
    assert worst > bound("fp16")


def test_rows_that_nobody_wrote_are_wrong() -> None:
    want = torch.ones(2, 16, dtype=torch.float64)
    got = torch.ones(2, 16)
    got[1] = float("nan")
    errors = relative_errors(got, want, 16)
    assert errors[0] == 0 and not errors[1] <= 1


def test_splits_that_cut_a_tile_are_refused() -> None:
    attention = spec.Attention("fp16", "same", 4, 2, 16)
    problem = Problem(Device(dry_run=True), Case(attention, (1,), (90,), block_size=16, split_len=32))
    with pytest.raises(ValueError, match="splits of 32 positions; they must be whole tiles of 128"):
        problem.attend()
