"""Rectangular runs: the same arrays as plain loops make, and padding that touches nothing of anybody's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import random_steps
import rectangular_loops as loops
from hypothesis import given
from plansmith.builder.batch import StepBatch
from plansmith.builder.graph import contract as graph_contract
from plansmith.builder.targets.rtx import contract
from plansmith.runtime.errors import InvalidArgumentError
from plansmith.runtime.executors import rectangular, runs
from plansmith.runtime.executors.buckets import Buckets

SIZE, BLOCKS, MAX_BLOCKS = random_steps.SIZE, random_steps.BLOCKS, random_steps.MAX_BLOCKS


def assert_same(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        assert got[name].dtype == np.int32, name
        assert got[name].tolist() == array.tolist(), name


@given(random_steps.steps())
def test_runs_are_what_loops_make(step: StepBatch) -> None:
    made = list(rectangular.split(step, BLOCKS, SIZE))
    decode = [b for b, n in enumerate(step.query_lens) if n == 1]
    parts = [decode] if decode else []
    parts += [[b] for b, n in enumerate(step.query_lens) if n > 1]
    assert len(made) == len(parts)
    for run, seqs in zip(made, parts, strict=True):
        assert_same(run.inputs, loops.rectangle(step, seqs, BLOCKS, SIZE))


@given(random_steps.steps())
def test_a_mixed_run_is_what_loops_make(step: StepBatch) -> None:
    everyone = list(range(step.query_lens.size))
    run = rectangular.rectangle(step, np.array(everyone), BLOCKS, SIZE)
    assert_same(run.inputs, loops.rectangle(step, everyone, BLOCKS, SIZE))


@given(random_steps.steps())
def test_every_wanted_row_of_logits_comes_from_one_run(step: StepBatch) -> None:
    buckets = Buckets(11, MAX_BLOCKS)
    for given_buckets in (None, buckets):
        seen = []
        for run in rectangular.split(step, BLOCKS, SIZE, given_buckets, 2):
            ids = run.inputs["input_ids"].ravel()
            rows = run.inputs["logits_rows"]
            assert run.logits_idx.size == rows.size >= 1
            for row, wanted in zip(rows, run.logits_idx, strict=True):
                if wanted >= 0:
                    seen.append(int(wanted))
                    assert ids[row] == step.input_ids[step.logits_rows[wanted]]
        assert sorted(seen) == list(range(step.logits_rows.size))


@given(random_steps.steps(decode_only=True))
def test_a_bucket_pads_with_tokens_for_blocks_behind_the_pool(step: StepBatch) -> None:
    buckets = Buckets(13, MAX_BLOCKS)
    reserve = buckets.num_reserve_blocks(SIZE)
    (run,) = rectangular.split(step, BLOCKS, SIZE, buckets, reserve)
    (plain,) = rectangular.split(step, BLOCKS, SIZE)
    count = step.query_lens.size
    assert run.bucket is not None
    size = run.bucket.batch_size
    assert {k: v.shape for k, v in run.inputs.items()} == {
        "input_ids": (size, 1),
        "position_ids": (size, 1),
        "kv_lens": (size,),
        "block_table": (size, run.bucket.table_width),
        "logits_rows": (size,),
        "kv_token_order": (size,),
        "kv_update_lengths": (BLOCKS + reserve + 1,),
        "kv_write_starts": (BLOCKS + reserve,),
    }
    # Nothing that the sequences have changes.
    for name in ("input_ids", "position_ids", "kv_lens"):
        assert run.inputs[name][:count].tolist() == plain.inputs[name].tolist()
    width = plain.inputs["block_table"].shape[1]
    table = run.inputs["block_table"]
    assert table[:count, :width].tolist() == plain.inputs["block_table"].tolist()
    assert (table[:count, width:] == table[:count, :1]).all()
    assert run.inputs["kv_token_order"][:count].tolist() == plain.inputs["kv_token_order"].tolist()
    assert (
        run.inputs["kv_update_lengths"][: BLOCKS + 1].tolist() == plain.inputs["kv_update_lengths"].tolist()
    )
    # Padding goes behind the pool, each token to a place of its own, and sees one position there.
    places = {}
    lengths, starts = run.inputs["kv_update_lengths"], run.inputs["kv_write_starts"]
    for block in range(BLOCKS, BLOCKS + reserve):
        for nth, token in enumerate(run.inputs["kv_token_order"][lengths[block] : lengths[block + 1]]):
            places[int(token)] = (block, int(starts[block]) + nth)
    assert sorted(places) == list(range(count, size))
    assert len(set(places.values())) == len(places)
    assert all(row < SIZE for _, row in places.values())
    assert (run.inputs["kv_lens"][count:] == 1).all() and (table[count:] >= BLOCKS).all()
    assert run.logits_idx[count:].tolist() == [-1] * (size - count)


@given(random_steps.steps(max_seqs=5))
def test_what_contradicts_is_refused(step: StepBatch) -> None:
    everyone = np.arange(step.query_lens.size)
    with pytest.raises(InvalidArgumentError, match="beyond the pool's"):
        blocks = int(step.block_table.max())
        rectangular.rectangle(
            dataclasses.replace(step, block_table=np.where(step.block_table >= 0, blocks, -1)),
            everyone[:1],
            blocks,
            SIZE,
        )
    with pytest.raises(InvalidArgumentError, match="allocate it first"):
        rectangular.rectangle(
            dataclasses.replace(step, block_table=np.full_like(step.block_table, -1)), everyone, BLOCKS, SIZE
        )
    narrow = np.repeat(step.block_table[:, :1], 1, axis=1)
    if step.kv_lens.max() > SIZE:
        with pytest.raises(InvalidArgumentError, match="give a wider table"):
            rectangular.rectangle(dataclasses.replace(step, block_table=narrow), everyone, BLOCKS, SIZE)


def test_two_writers_of_a_block_are_refused() -> None:
    one = np.array([1, 1], np.int32)
    step = StepBatch(
        input_ids=one,
        position_ids=np.zeros(2, np.int32),
        query_lens=one,
        kv_lens=one,
        cu_query_lens=np.array([0, 1, 2], np.int32),
        block_table=np.array([[3], [3]], np.int32),
        logits_rows=np.array([0, 1], np.int32),
    )
    with pytest.raises(InvalidArgumentError, match="write the same block"):
        list(rectangular.split(step, BLOCKS, SIZE))


def test_buckets_cover_every_batch_and_width() -> None:
    buckets = Buckets(50, 20)
    assert buckets.batch_sizes == (1, 2, 4, 8, 16, 24, 32, 40, 48, 50)
    for size in range(1, 51):
        for width in range(1, 21):
            bucket = buckets.of(size, width)
            assert size <= bucket.batch_size <= 50 and width <= bucket.table_width <= 20
            assert bucket.batch_size - size <= buckets.max_padding
    assert Buckets(1, 1).batch_sizes == (1,) and Buckets(1, 1).max_padding == 0
    assert Buckets(1, 1).num_reserve_blocks(16) == 0 and buckets.num_reserve_blocks(4) == 2


def test_the_names_are_the_graph_contracts() -> None:
    assert list(graph_contract.PACKED_INPUTS) == [
        runs.INPUT_IDS,
        runs.POSITION_IDS,
        runs.QUERY_LENS,
        runs.KV_LENS,
        runs.CU_QUERY_LENS,
        runs.BLOCK_TABLE,
        runs.LOGITS_ROWS,
    ]
    assert runs.LOGITS == graph_contract.LOGITS
    assert (runs.KV_TOKEN_ORDER, runs.KV_UPDATE_LENGTHS, runs.KV_WRITE_STARTS) == (
        contract.KV_TOKEN_ORDER,
        contract.KV_UPDATE_LENGTHS,
        contract.KV_WRITE_STARTS,
    )
