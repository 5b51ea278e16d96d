"""Properties of the batch planner: every token once and in order, blocks never shared, the books right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plansmith.builder.batch import BatchPlanner, PlannedStep
from plansmith.runtime.errors import InvalidArgumentError

PLAN: dict[str, Any] = {"num_blocks": 12, "tokens_per_block": 8, "max_blocks_per_seq": 6}


def plan(lengths: list[int], **options: Any) -> tuple[list[list[int]], list[PlannedStep]]:
    seqs = [[100 * (i + 1) + n for n in range(length)] for i, length in enumerate(lengths)]  # tokens tell who
    return seqs, list(BatchPlanner(seqs, **{**PLAN, **options}))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 48), min_size=1, max_size=8),
    seed=st.integers(0, 99),
    max_num_tokens=st.integers(1, 40),
    max_batch_size=st.integers(1, 5),
)
def test_every_token_is_fed_once_in_order_and_owned(
    lengths: list[int], seed: int, max_num_tokens: int, max_batch_size: int
) -> None:
    seqs, steps = plan(lengths, seed=seed, max_num_tokens=max_num_tokens, max_batch_size=max_batch_size)
    done = [0] * len(seqs)
    for step in steps:
        b = step.batch
        b.check(12, 8)
        assert b.input_ids.size <= max_num_tokens and b.query_lens.size <= max_batch_size
        used = b.block_table[b.block_table >= 0]
        assert len(set(used.tolist())) == used.size
        for row, (seq, pos) in zip(b.logits_rows.tolist(), step.rows, strict=True):
            assert b.input_ids[row] == seqs[seq][pos] and b.position_ids[row] == pos
        for i, count in enumerate(b.query_lens.tolist()):
            first = int(b.cu_query_lens[i])
            seq = int(b.input_ids[first]) // 100 - 1
            span = slice(done[seq], done[seq] + count)
            assert b.input_ids[first : first + count].tolist() == seqs[seq][span]
            done[seq] += count
            assert b.kv_lens[i] == done[seq]
    assert done == lengths


def test_plans_mix_prefill_and_decode_scatter_and_reuse_blocks() -> None:
    _, steps = plan([48, 30, 20, 40, 7, 33], seed=4)
    mixed = [s for s in steps if s.batch.query_lens.max() > 1 and s.batch.query_lens.min() == 1]
    assert mixed and any(s.batch.query_lens.size >= 3 for s in steps)
    tables = [s.batch.block_table[0] for s in steps]
    assert any((np.diff(t[t >= 0]) != 1).any() for t in tables)
    owners: dict[int, set[int]] = {}
    for s in steps:
        for row, table in zip(s.batch.cu_query_lens, s.batch.block_table, strict=False):
            for block in table[table >= 0].tolist():
                owners.setdefault(block, set()).add(int(s.batch.input_ids[row]) // 100)
    assert max(map(len, owners.values())) > 1


def test_same_seed_same_plan_and_last_rows() -> None:
    _, a = plan([9, 20], seed=1, logits="last")
    _, b = plan([9, 20], seed=1, logits="last")
    for x, y in zip(a, b, strict=True):
        np.testing.assert_equal(x.batch.feeds(), y.batch.feeds())
        assert x.batch.logits_rows.tolist() == (x.batch.cu_query_lens[1:] - 1).tolist()
    _, c = plan([9, 20], seed=2, logits="last")
    assert [s.rows for s in a] != [s.rows for s in c]


def test_prompt_lens_are_kept() -> None:
    _, steps = plan([10], prompt_lens=[6], max_num_tokens=64, seed=0)
    after = [s for s in steps if s.batch.kv_lens[0] > 6]
    assert [s.batch.query_lens.tolist() for s in after] == [[1]] * 4


@pytest.mark.parametrize("length", [0, 49])
def test_sequences_that_cannot_fit_are_refused(length: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"sequence 0 has {length} tokens"):
        plan([length])
