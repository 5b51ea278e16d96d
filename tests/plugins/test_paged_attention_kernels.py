"""PagedAttention's kernels, run by the interpreter, against float64; and what about their bits is promised to hold."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any, cast

import numpy as np
import pytest
from plansmith.plugins.paged_attention import spec
from plansmith.plugins.paged_attention.spec import Attention

from .attention_case import Case, check

KINDS: dict[str, tuple[list[int], list[int], int]] = {  # rows, positions, query_rows
    "decode": ([1, 1, 1, 1], [1, 77, 300, 0], 1),
    "verify": ([4, 0, 3, 1, 2], [9, 0, 130, 257, 2], 4),
    "prefill": ([37, 1, 65], [37, 100, 150], 0),
    "mixed": ([1, 45, 1, 2, 1], [200, 45, 129, 150, 0], 1),
}
LEVELS: dict[str, list[Any]] = {
    "dtype": ["fp16", "bf16"],
    "kv": ["same", "fp8", "int8"],
    "head_dim": [64, 80, 96, 112, 128, 256],
    "block_size": [16, 32, 64, 128],
    "group": [1, 2, 3, 4, 7, 8],
    "window": [0, 1, 70],
    "softcap": [0.0, 3.0],
    "kind": list(KINDS),
    "sm": [80, 90],
}


def pairwise(levels: dict[str, list[Any]], seed: int) -> list[dict[str, Any]]:
    """Return combinations in which each two values of two features meet, greedily few."""
    rng = random.Random(seed)
    features = list(levels)
    missing = {
        ((a, x), (b, y)) for a, b in itertools.combinations(features, 2) for x in levels[a] for y in levels[b]
    }
    rows = []
    while missing:
        pinned = dict(min(missing, key=repr))
        tries = [
            {name: pinned.get(name, rng.choice(values)) for name, values in levels.items()} for _ in range(40)
        ]
        best = max(tries, key=lambda row: len(missing & set(itertools.combinations(row.items(), 2))))
        missing -= set(itertools.combinations(best.items(), 2))
        rows.append(best)
    return rows


def make(row: dict[str, Any], seed: int = 0) -> tuple[Case, int]:
    """Return a combination's case and its query_rows."""
    kv_heads = 1 if row["group"] > 4 else 2
    attention = Attention(
        row["dtype"],
        row["kv"],
        kv_heads * row["group"],
        kv_heads,
        row["head_dim"],
        row["softcap"] > 0,
        row["sm"],
    )
    rows, lens, query_rows = KINDS[row["kind"]]
    return Case(attention, row["block_size"], rows, lens, row["window"], row["softcap"], seed), query_rows


@pytest.mark.parametrize("row", pairwise(LEVELS, 0), ids=lambda row: "-".join(map(str, row.values())))
def test_every_two_features_together(row: dict[str, Any]) -> None:
    check(*make(row))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_random_steps(seed: int) -> None:
    rng = random.Random(seed)
    case, query_rows = make({name: rng.choice(values) for name, values in LEVELS.items()}, seed)
    rows = [rng.choice([1, 1, 2, 5, 40]) for _ in range(rng.randint(1, 6))]
    lens = [n + rng.choice([0, 1, 63, 64, 200]) for n in rows]
    case = dataclasses.replace(case, query_lens=rows, kv_lens=lens)
    check(case, query_rows, split_len=rng.choice([128, 256, 512]))


def part(case: Case, b: int, first: int, last: int) -> Case:
    """Return the step of one sequence's rows first..last-1 alone, over the same pools."""
    past = case.kv_lens[b] - case.query_lens[b]
    alone = dataclasses.replace(case, query_lens=[last - first], kv_lens=[past + last])
    alone.pools, alone.scale = case.pools, case.scale
    alone.q = case.q[case.cu[b] + first : case.cu[b] + last]
    used = -(-(past + last) // case.block_size)
    alone.table = np.concatenate([case.table[b : b + 1, :used], np.full((1, 3), -1, np.int32)], axis=1)
    return alone


@pytest.mark.parametrize("window", [0, 50])
def test_bits_of_a_prompt_depend_on_no_chunk_and_no_neighbour(window: int) -> None:
    case = Case(Attention("fp16", "same", 6, 2, 64), 16, [20, 150, 1], [180, 190, 70], window)
    together = case.run(query_rows=0)[20:170]
    for cuts in ([0, 150], [0, 1, 64, 128, 150], [0, 43, 149, 150]):
        chunks = [part(case, 1, first, last).run(query_rows=0) for first, last in itertools.pairwise(cuts)]
        np.testing.assert_array_equal(np.concatenate(chunks), together)


@pytest.mark.parametrize("window", [0, 150])
def test_bits_of_a_draft_depend_on_no_neighbour_and_no_row_beside(window: int) -> None:
    """Row 385 is the first of its split: for the rows before it that split is empty."""
    case = Case(Attention("bf16", "fp8", 8, 2, 64), 32, [1, 4, 3], [40, 387, 300], window, spare_width=9)
    together = case.run(query_rows=4)
    for b, count in enumerate(case.query_lens):
        for row in range(count):
            alone = part(case, b, row, row + 1).run(query_rows=4)
            np.testing.assert_array_equal(alone[0], together[case.cu[b] + row])


def test_one_split_and_many_agree_within_rounding() -> None:
    case = Case(Attention("fp16", "int8", 4, 1, 128), 16, [1], [1500])
    check(case, 1, split_len=1536)
    check(case, 1, split_len=128)  # 12 splits
    check(dataclasses.replace(case, kv_lens=[2500]), 1, split_len=128)  # 20: combine takes two rounds


def test_decode_alone_leaves_longer_sequences_alone() -> None:
    case = Case(Attention("fp16", "same", 2, 1, 64), 16, [1, 5], [30, 40])
    out = case.run(query_rows=1, has_prefill=False)
    assert (out[1:] == 12288.0).all() and (out[0] != 12288.0).all()


def test_infinity_and_nan_of_the_row_itself_are_seen() -> None:
    case = Case(Attention("fp16", "same", 2, 1, 64), 16, [1, 1], [30, 40])
    case.q[0, 3] = np.nan
    out = case.run(query_rows=1)
    assert np.isnan(out[0, :64]).all() and np.isfinite(out[0, 64:]).all() and np.isfinite(out[1]).all()


def test_split_len_is_the_least_that_fits_the_budget() -> None:
    attention = Attention("bf16", "same", 32, 8, 128)
    assert spec.split_len(attention, 64, 4096) == spec.MIN_SPLIT_LEN
    for batch, length in ((256, 131072), (64, 32768), (1, 1 << 20)):
        chosen = spec.split_len(attention, batch, length)
        used = [spec.workspace_bytes(attention, batch, 1, -(-length // n)) for n in (chosen, chosen // 2)]
        assert used[0] <= 256 << 20 and (used[1] > 256 << 20 or chosen == spec.MIN_SPLIT_LEN)


def test_cost_counts_what_is_seen_once() -> None:
    attention = Attention("fp16", "fp8", 8, 2, 64)
    cost = spec.cost(attention, [1, 3, 5], [10, 3, 0])  # the last is padding
    assert cost.num_bytes == 4 * 2 * 8 * 64 * 2 + 13 * 2 * 2 * 64
    assert cost.num_operations == 4 * 64 * 8 * (10 + 1 + 2 + 3)
    windowed = spec.cost(attention, [2], [10], window=3)  # rows 8 and 9 see 6..8 and 7..9
    assert windowed.num_bytes == 2 * 2 * 8 * 64 * 2 + 4 * 2 * 2 * 64
    assert windowed.num_operations == 4 * 64 * 8 * 6


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="must divide"):
        Attention("fp16", "same", 6, 4, 64)
    with pytest.raises(ValueError, match="multiples of 8"):
        Attention("fp16", "same", 4, 4, 100)
    kernel = spec.decode_kernel(Attention("fp16", "same", 4, 4, 64))
    with pytest.raises(ValueError, match="no argument window"):
        spec.with_constants(kernel, "x", window=4)


@pytest.mark.parametrize("sm", [75, 80, 90, 120])
def test_catalog_names_tell_kernels_apart(sm: int) -> None:
    kernels = spec.catalog(sm)
    assert len({kernel.name for kernel in kernels}) == len(kernels)
    assert all(kernel.min_sm <= sm for kernel in kernels)
    for kernel in kernels:
        assert not cast(set[str], kernel.signature.keys() & kernel.constants.keys())
