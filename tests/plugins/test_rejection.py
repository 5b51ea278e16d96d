"""Draft tokens verified: by comparing with what was drawn, and by rejection sampling."""

from __future__ import annotations

from typing import Any

import fast_interpreter  # noqa: F401
import numpy as np
import pytest
import torch
from plansmith.plugins.rejection import reference, run, spec
from sampling_problems import make_rows


def test_drafts_are_accepted_up_to_the_first_that_was_not_drawn() -> None:
    random = np.random.default_rng(1)
    lens = np.array([0, 3, 1, 9, 0, 4, 2, 5])
    cu = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    drafts = random.integers(0, 50, cu[-1]).astype(np.int32)
    drawn = random.integers(0, 50, cu[-1] + len(lens)).astype(np.int32)
    for seq, right in enumerate((0, 1, 1, 9, 0, 0, 1, 3)):  # so many are right
        row = cu[seq] + seq
        drawn[row : row + right] = drafts[cu[seq] : cu[seq] + right]
        if right < lens[seq]:
            drawn[row + right] = drafts[cu[seq] + right] + 1
    drawn[cu[6] + 6 + 1] = -2  # no token could be drawn behind the first
    want = reference.compare(drawn, drafts, cu)
    assert [accepted for accepted, _ in want] == [0, 1, 1, 9, 0, 0, 1, 3]
    words = np.full((len(drawn), 44), 7, np.int32)
    words[:, 0] = drawn
    for given in (drawn, words):
        accepted, tokens = run.compare(
            torch.from_numpy(given), torch.from_numpy(drafts), torch.from_numpy(cu), 9
        )
        assert accepted.tolist() == [n for n, _ in want]
        assert tokens.tolist() == [emitted + [-1] * (10 - len(emitted)) for _, emitted in want]


def test_more_drafts_than_a_program_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 127"):
        run.compare(*(torch.zeros(2, dtype=torch.int32),) * 3, spec.MAX_DRAFT_LEN + 1)


def weights_of(random: np.random.Generator, shape: tuple[int, int]) -> Any:
    weights = np.exp(random.standard_normal(shape) * 1.5).astype(np.float32)
    weights[random.random(shape) < 0.3] = 0.0
    weights[:, 0] = 0.5
    return weights * random.choice((1e-3, 1.0, 40.0), (shape[0], 1)).astype(np.float32)


def test_the_kernels_reject_as_the_reference_does() -> None:
    random = np.random.default_rng(2)
    lens, vocab_size = np.array([3, 0, 1, 5, 4, 2, 4, 4]), 2100
    cu = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    num_rows = int(cu[-1]) + len(lens)
    target = weights_of(random, (num_rows, vocab_size))
    draft = weights_of(random, (int(cu[-1]), vocab_size))
    seeds = random.integers(0, 2**64, num_rows, dtype=np.uint64)
    for seq in range(len(lens)):  # a draft that is near the target, so that both happen
        row = cu[seq] + seq
        near = target[row : row + lens[seq]]
        draft[cu[seq] : cu[seq + 1]] = np.where(random.random(near.shape) < 0.7, near, near * np.float32(1.5))
    drafts = np.array(
        [random.choice(vocab_size, p=row / row.sum()) for row in draft.astype(np.float64)], np.int32
    )
    rows = make_rows([{"seed": seed} for seed in seeds.tolist()])
    want = []
    for seq in range(len(lens)):
        row = cu[seq] + seq
        rows["output_idx"][row : row + lens[seq] + 1] = 20 + np.arange(lens[seq] + 1)
        at, mine = slice(row, row + lens[seq] + 1), slice(cu[seq], cu[seq + 1])
        want.append(reference.reject(target[at], draft[mine], seeds[at].tolist(), 20, drafts[mine].tolist()))
    assert {n == length for (n, _), length in zip(want, lens.tolist(), strict=True) if length} == {
        True,
        False,
    }
    words = torch.from_numpy(rows.view(np.int32).reshape(-1, 12).copy())
    arrays = [torch.from_numpy(a) for a in (target, draft)]
    accepted, tokens = run.reject(*arrays, words, torch.from_numpy(drafts), torch.from_numpy(cu), 5)
    assert accepted.tolist() == [n for n, _ in want]
    assert tokens.tolist() == [emitted + [-1] * (6 - len(emitted)) for _, emitted in want]


def test_what_comes_out_is_distributed_as_the_target() -> None:
    """One draft token drawn of q by other random numbers: the first token emitted is one of p, however far q is."""
    random = np.random.default_rng(3)
    p = np.array([0.4, 0.25, 0.2, 0.1, 0.05, 0.0], np.float32)
    q = np.array([0.1, 0.3, 0.05, 0.2, 0.05, 0.3], np.float32)
    num_draws = 12000
    counts, accepted = np.zeros(6), 0
    wide = q.astype(np.float64) / q.astype(np.float64).sum()
    for i, drafted in enumerate(random.choice(6, num_draws, p=wide).tolist()):
        n, tokens = reference.reject(np.stack([p, p]), q[None], [i * 7919, i], 3, [drafted])
        counts[tokens[0]] += 1
        accepted += n
    assert counts[5] == 0
    expected = p[:5] / p.sum() * num_draws
    # 4 degrees of freedom: 18.5 is passed in one of 1000. Seeds are fixed, so it does not flicker.
    assert ((counts[:5] - expected) ** 2 / expected).sum() < 18.5
    rate = np.minimum(p, q).sum()  # what rejection sampling accepts; 4 sigma of the share
    assert abs(accepted / num_draws - rate) < 4 * np.sqrt(rate * (1 - rate) / num_draws)
