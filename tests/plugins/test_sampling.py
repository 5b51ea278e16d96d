"""Sampling's kernels by themselves: arithmetic, masks, edits, rows that cannot be drawn, large vocabularies."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from plansmith.plugins import aot
from plansmith.plugins.sampling import reference, run, spec
from plansmith.plugins.sampling.arithmetic import (
    arrival,
    distance_key,
    draw_bits,
    draw_key,
    weight,
    weight_units,
)
from plansmith.runtime.batch import LOGIT_EDIT
from sampling_problems import LOGITS, kernels_draw, make_logits, make_rows, rule_draws

DRAWN = {"temperature": 1.0, "seed": 5}


@triton.jit
def evaluate(x, weights, units, bits, times, seed_0, seed_1, output_idx, shift, SIZE: tl.constexpr):
    """All arithmetic of a draw, of SIZE logits whose best is 0."""
    ids = tl.arange(0, SIZE)
    w = weight(distance_key(tl.load(x + ids), 0.0, 1.0))
    tl.store(weights + ids, w)
    tl.store(units + ids, weight_units(w, shift))
    key_0, key_1 = draw_key(seed_0.to(tl.uint32), seed_1.to(tl.uint32), output_idx.to(tl.uint32))
    random = draw_bits(key_0, key_1, ids * 5)
    tl.store(bits + ids, random.to(tl.int32, bitcast=True))
    tl.store(times + ids, arrival(random, 1.0 + ids.to(tl.float32) * 0.0))


@pytest.mark.parametrize("shift", [0, 1, 4])
def test_each_operation_has_the_rules_bits(shift: int) -> None:
    size = 1 << 16
    random = np.random.default_rng(shift)
    x = -np.abs(random.standard_normal(size) * 10.0 ** random.integers(-8, 3, size)).astype(np.float32)
    x[:8] = [0.0, -0.0, -87.6, -87.7, -88.0, -1e30, -np.inf, -1e-45]
    # Weights of halves of a unit, where ties are: e^x is one for x of a whole number of ln 2.
    x[8:60] = (-np.arange(52) * np.log(2)).astype(np.float32)
    outputs = [torch.zeros(size, dtype=t) for t in (torch.float32, torch.int64, torch.int32, torch.float64)]
    with np.errstate(all="ignore"):
        evaluate[(1,)](torch.from_numpy(x), *outputs, 123, 0x7FFFFFFF, 77, shift, SIZE=size)
    weights, units, bits, times = (out.numpy() for out in outputs)
    want = reference.weights(x)
    assert weights.view(np.int32).tolist() == want.view(np.int32).tolist()
    assert units.tolist() == reference.weight_units(want, 2 ** (19 + shift)).tolist()
    key = reference.draw_key(123 + (0x7FFFFFFF << 32), 77)
    random_bits = reference.draw_bits(key, np.arange(size) * 5)
    assert bits.view(np.uint32).tolist() == random_bits.tolist()
    assert times.tolist() == reference.exponential(random_bits).tolist()


def test_units_are_those_of_float64_additions() -> None:
    w = np.random.default_rng(1).random(100_000).astype(np.float32) ** 8
    rounder = 1.5 * 2.0**18
    rounded = (w.astype(np.float64) + rounder) - rounder
    assert (reference.weight_units(w, 50_000) * 2.0**-34 == rounded).all()
    assert [spec.weight_shift(v) for v in (1, 2**19, 2**19 + 1, 2**20, 2**20 + 1)] == [0, 0, 1, 1, 2]


def edits_of(*edits: tuple[int, float, float, float]) -> Any:
    return np.array(list(edits), LOGIT_EDIT)


def test_masks_and_edits_change_what_can_be_drawn() -> None:
    random = np.random.default_rng(3)
    vocab_size = 4500  # three chunks
    logits = np.stack([make_logits(random, "normal", vocab_size) for _ in range(8)])
    masks = random.integers(0, 2**32, (3, -(-vocab_size // 32)), dtype=np.uint32)
    masks[2] = 0
    masks[2, 140] = 1 << 19  # token 4499 alone
    ids = np.sort(random.choice(vocab_size, 700, replace=False))
    many = np.zeros(700, LOGIT_EDIT)
    many["id"], many["factor"], many["minus"] = ids, 1.3, 0.5
    many["plus"] = random.choice((-np.inf, 0.0, 7.5), 700)
    few = edits_of(
        (0, 0.5, 0.0, -np.inf), (2047, 1.0, -9.0, 0.0), (2048, 1.0, 0.0, 30.0), (4499, 2.0, 0.0, 0.25)
    )
    edits = np.concatenate([many, few])
    rows = make_rows([{**DRAWN, "seed": i, "num_logprobs": 2 * (i % 2)} for i in range(8)])
    rows["mask_idx"] = [-1, 0, 1, 2, 0, -1, -1, 1]
    rows["edit_begin"] = [0, 0, 0, 0, 0, 0, 700, 700]
    rows["edit_end"] = [0, 0, 0, 0, 700, 700, 704, 704]
    rows["temperature"][[2, 6]] = 0.0
    rows["top_k"][[4, 7]] = 20
    want = rule_draws(logits, rows, edits, masks)
    assert (want[3], want[6]) == (4499, 2048)
    samples = kernels_draw(logits, rows, edits, masks)
    assert samples["token"].tolist() == want
    for x, row, sample in zip(logits, rows, samples, strict=True):  # of the logits as they were
        best = np.argsort(-x, kind="stable")[: row["num_logprobs"]]
        assert sample["num_top"] == len(best)
        assert sample["top_ids"][: len(best)].tolist() == best.tolist()
        if len(best):
            wide = reference.log_probabilities(x)
            assert abs(sample["logprob"] - wide[sample["token"]]) < 1e-5


def test_rows_that_cannot_be_drawn_say_why_and_leave_others_alone() -> None:
    vocab_size = 2100
    logits = np.zeros((10, vocab_size), np.float32)
    logits[0, 2099] = np.nan
    logits[1, 2098] = np.inf
    logits[2] = -np.inf
    logits[3, 7] = 3e38
    logits[4, 7] = -np.inf
    logits[6, 5] = np.nan  # masked, and yet the model's
    logits[8, 11] = 50.0
    logits[9, 7] = 3e38
    edits = np.concatenate(
        [
            edits_of((7, 1.0, -3e38, 0.0)),  # to +inf
            edits_of((7, 1.0, 0.0, np.inf)),  # to NaN
            edits_of(*((i, 1.0, 0.0, -np.inf) for i in range(vocab_size))),
            edits_of((7, 0.5, 0.0, -np.inf)),  # to +inf, and with a bias of -inf to NaN
        ]
    )
    masks = np.zeros((1, -(-vocab_size // 32)), np.uint32)
    rows = make_rows([{**DRAWN, "num_logprobs": 3}] * 10)
    rows["edit_begin"] = [0, 0, 0, 0, 1, 2, 0, 0, 0, 2 + vocab_size]
    rows["edit_end"] = [0, 0, 0, 1, 2, 2 + vocab_size, 0, 0, 0, 3 + vocab_size]
    rows["mask_idx"] = [-1, -1, -1, -1, -1, -1, 0, 0, -1, -1]
    rows["top_k"][::2] = 5
    samples = kernels_draw(logits, rows, edits, masks)
    assert samples["token"].tolist() == [-1, -1, -2, -3, -3, -2, -1, -2, 11, -3]
    assert samples["token"].tolist() == rule_draws(logits, rows, edits, masks)
    assert samples["num_top"].tolist() == [0] * 8 + [3, 0]
    assert samples["top_ids"][8, :3].tolist() == [11, 0, 1]
    assert (samples["reserved"] == 0).all()


def test_impossible_tokens_are_no_best_ones() -> None:
    logits = np.full((1, 70), -np.inf, np.float32)
    logits[0, [3, 66]] = 1.0
    samples = kernels_draw(logits, make_rows([{"num_logprobs": 20}]))
    assert (samples["token"][0], samples["num_top"][0]) == (3, 2)
    assert samples["top_ids"][0, :2].tolist() == [3, 66]
    assert np.allclose(samples["top_logprobs"][0, :2], np.log(0.5), atol=1e-7)


def test_more_candidates_than_there_is_room_for_are_read_from_the_row() -> None:
    vocab_size = spec.CAPACITY + 900
    random = np.random.default_rng(8)
    logits = np.stack([make_logits(random, kind, vocab_size) for kind in ("all equal", "nearly equal")])
    rows = make_rows(
        [{**DRAWN, "top_p": 0.9999, "seed": 3}, {**DRAWN, "top_k": vocab_size - 3, "top_p": 0.7}]
    )
    assert kernels_draw(logits, rows)["token"].tolist() == rule_draws(logits, rows)


def state_of(workspace: torch.Tensor, num_rows: int, vocab_size: int) -> Any:
    """Return (R, STATE_WORDS) of the workspace."""
    region = spec.regions(num_rows, vocab_size)["state"]
    words = workspace.numpy()[region.offset : region.offset + 4 * num_rows * spec.STATE_WORDS]
    return words.view(np.int32).reshape(region.shape)


def with_room_for(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels list so many candidates of a row and no more."""
    for name in ("GATHER", "REFINE", "REGATHER", "DRAW"):
        kernel = getattr(spec, name)
        constants = {
            key: capacity if key in ("WIDE", "CAPACITY") else n for key, n in kernel.constants.items()
        }
        monkeypatch.setattr(spec, name, dataclasses.replace(kernel, constants=constants))


def test_a_wide_nucleus_ends_in_a_part_that_is_listed() -> None:
    vocab_size = 2 * spec.CAPACITY
    random = np.random.default_rng(12)
    logits = np.stack([make_logits(random, "normal", vocab_size) for _ in range(4)])
    parameters = [
        {**DRAWN, "top_p": 0.95, "temperature": 2.5},
        {**DRAWN, "top_p": 0.999, "temperature": 2.0, "min_p": 0.05},
        {**DRAWN, "top_p": 0.97, "temperature": 30.0},
        {**DRAWN, "top_p": 0.9, "seed": 3},
    ]
    rows = make_rows(parameters)
    workspace = run.make_workspace(4, vocab_size, "cpu").fill_(0x7F)
    samples = kernels_draw(logits, rows, workspace=workspace)
    assert samples["token"].tolist() == rule_draws(logits, rows)
    state = state_of(workspace, 4, vocab_size)
    assert (state[:3, 0] > spec.CAPACITY).all() and spec.WIDE < state[3, 0] <= spec.CAPACITY
    assert (state[:, 4] > 0).all() and (state[:, 4] < 2000).all()


def test_parts_that_hold_much_end_where_the_rule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four values of about the same weight: half of the tokens would be kept too much, or too little."""
    for name in ("REFINE", "REGATHER", "DRAW"):
        kernel = getattr(spec, name)
        changed = dataclasses.replace(kernel, constants={**kernel.constants, "WIDE": 24})
        monkeypatch.setattr(spec, name, changed)
    vocab_size, num_rows = 600, 24
    random = np.random.default_rng(14)
    logits = np.stack([make_logits(random, "nearly equal", vocab_size) for _ in range(num_rows)])
    rows = make_rows([{**DRAWN, "seed": i, "top_p": (0.3, 0.6, 0.8)[i % 3]} for i in range(num_rows)])
    workspace = run.make_workspace(num_rows, vocab_size, "cpu").fill_(0x7F)
    assert kernels_draw(logits, rows, workspace=workspace)["token"].tolist() == rule_draws(logits, rows)
    assert (state_of(workspace, num_rows, vocab_size)[:, 4] > 24).all()


def test_little_room_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wide nucleus and every one that is read from the row has to end where one in the list does."""
    with_room_for(24, monkeypatch)
    vocab_size, num_rows = 2500, 42
    random = np.random.default_rng(13)
    logits = np.stack([make_logits(random, LOGITS[i % len(LOGITS)], vocab_size) for i in range(num_rows)])
    rows = make_rows(
        [
            {
                "temperature": (0.3, 1.0, 4.0)[i % 3],
                "top_p": (0.3, 0.9, 0.999, 0.999999)[i // 2 % 4],
                "min_p": (0.0, 0.0, 0.05)[i // 3 % 3],
                "top_k": (0, 0, 0, 0, 60)[i % 5],
                "seed": i,
            }
            for i in range(num_rows)
        ]
    )
    workspace = run.make_workspace(num_rows, vocab_size, "cpu").fill_(0x7F)
    assert kernels_draw(logits, rows, workspace=workspace)["token"].tolist() == rule_draws(logits, rows)
    found, in_part = state_of(workspace, num_rows, vocab_size)[:, [0, 4]].T
    assert (found <= 24).any()  # listed at once
    assert ((in_part > 0) & (in_part <= 24)).sum() >= 8  # as a part
    assert (in_part > 24).sum() >= 5 and ((found > 24) & (rows["top_k"] > 0)).any()  # read from the row


def test_a_large_vocabulary() -> None:
    random = np.random.default_rng(9)
    vocab_size = 49152
    logits = np.stack([make_logits(random, "normal", vocab_size) for _ in range(4)])
    rows = make_rows(
        [
            {"num_logprobs": 3},
            {**DRAWN, "temperature": 0.8},
            {**DRAWN, "top_p": 0.9},
            {**DRAWN, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
        ]
    )
    assert kernels_draw(logits, rows)["token"].tolist() == rule_draws(logits, rows)


def test_of_tokens_that_arrive_at_once_the_lower_id_wins() -> None:
    vocab_size, same = 5000, np.zeros(2, np.int64)
    for seed in range(20_000):  # two tokens of equal random bits: one seed in some 350 has them
        bits = reference.draw_bits(reference.draw_key(seed, 0), np.arange(vocab_size))
        order = np.argsort(bits, kind="stable")
        equal = np.nonzero(np.diff(bits[order]) == 0)[0]
        if len(equal):
            same = order[equal[0] : equal[0] + 2]
            break
    assert same[0] < same[1]
    logits = np.full((2, vocab_size), -np.inf, np.float32)
    logits[:, same] = 1.0
    rows = make_rows([{**DRAWN, "seed": seed}, {**DRAWN, "seed": seed, "top_k": 2}])
    assert kernels_draw(logits, rows)["token"].tolist() == [same[0]] * 2 == rule_draws(logits, rows)


def test_nothing_of_the_workspace_has_to_be_there_before() -> None:
    random = np.random.default_rng(10)
    logits = np.stack([make_logits(random, "few values", 130) for _ in range(4)])
    rows = make_rows([{**DRAWN, "num_logprobs": 4}, {**DRAWN, "top_k": 9}, {**DRAWN, "top_p": 0.6}, {}])
    samples = [kernels_draw(logits, rows, fill=fill).tobytes() for fill in (0x00, 0x7F, 0xFF)]
    assert samples[0] == samples[1] == samples[2]


def test_kernels_that_no_row_needs_can_be_left_out() -> None:
    random = np.random.default_rng(11)
    logits = np.stack([make_logits(random, "normal", 300) for _ in range(3)])
    greedy, raced = make_rows([{}, {"top_k": 1, "temperature": 2.0}, {}]), make_rows([DRAWN] * 3)
    nothing = {"sampled": False, "filtered": False, "logprobs": False}
    assert len(spec.steps(3, 300, **nothing)) == 2
    assert kernels_draw(logits, greedy, **nothing)["token"].tolist() == rule_draws(logits, greedy)
    some = {"filtered": False, "logprobs": False}
    assert kernels_draw(logits, raced, **some)["token"].tolist() == rule_draws(logits, raced)


def test_a_tokens_share_of_draws_is_its_probability() -> None:
    logits = np.array([0.5, 2.0, -1.0, 1.5, 0.0, -3.0, 1.0, -np.inf], np.float32)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    num_draws = 6000
    rows = make_rows([{**DRAWN, "seed": 7919 * i} for i in range(num_draws)])
    counts = np.bincount(rule_draws([logits] * num_draws, rows), minlength=8)
    assert counts[7] == 0
    expected = p[:7] * num_draws
    # 6 degrees of freedom: 22.5 is passed in one of 1000. Seeds are fixed, so it does not flicker.
    assert ((counts[:7] - expected) ** 2 / expected).sum() < 22.5


def test_regions_of_the_workspace_do_not_overlap() -> None:
    items = {"*fp32": 4, "*i32": 4, "*fp64": 8, "*i64": 8}
    for num_rows, vocab_size in ((1, 1), (3, 2049), (64, 128256)):
        end = 0
        for region in spec.regions(num_rows, vocab_size).values():
            assert region.offset % 256 == 0 and region.offset >= end
            end = region.offset + int(np.prod(region.shape)) * items[region.pointer]
        assert end <= spec.workspace_bytes(num_rows, vocab_size) < end + 256


def check_exact(ptx: str) -> None:
    """No operation that rounds otherwise than the core's: fused, approximate, or without the smallest numbers."""
    for operation in ("fma.", ".ftz", "div.full", ".approx", "mul.f32", "add.f32", "mul.f64", "add.f64"):
        assert operation not in ptx, operation


def test_compiled_arithmetic_is_the_cores() -> None:
    (compiled,) = aot.compile_kernels([spec.WEIGH], [90], jobs=1)
    check_exact(compiled.ptx)
    assert "mul.rn.f32" in compiled.ptx and "div.rn.f64" in compiled.ptx
    assert not compiled.resources.spills


@pytest.mark.slow
def test_every_kernel_compiles_for_every_sm() -> None:
    for compiled in aot.compile_kernels(spec.catalog(), aot.ALL_SMS):
        check_exact(compiled.ptx)
        assert not compiled.resources.spills, (compiled.kernel.name, compiled.sm)
