"""Packed runs: a step as it is, or padded to a bucket by sequences that hold nothing."""

from __future__ import annotations

import numpy as np
import random_steps
from hypothesis import given
from plansmith.builder.batch import StepBatch
from plansmith.runtime.executors import packed
from plansmith.runtime.executors.buckets import Buckets

SIZE, MAX_BLOCKS = random_steps.SIZE, random_steps.MAX_BLOCKS
BUCKETS = Buckets(13, MAX_BLOCKS)


@given(random_steps.steps())
def test_a_step_goes_in_as_it_is(step: StepBatch) -> None:
    run = packed.pack(step, SIZE)
    feeds = step.feeds()
    assert list(run.inputs) == list(feeds) and run.bucket is None
    width = -(-int(step.kv_lens.max()) // SIZE)
    assert run.inputs["block_table"].tolist() == feeds.pop("block_table")[:, :width].tolist()
    rows = feeds.pop("logits_rows")
    if rows.size:
        assert run.inputs["logits_rows"].tolist() == rows.tolist()
        assert run.logits_idx.tolist() == list(range(rows.size))
    else:
        assert run.inputs["logits_rows"].tolist() == [step.input_ids.size - 1]
        assert run.logits_idx.tolist() == [-1]
    for name, array in feeds.items():
        assert run.inputs[name].tolist() == array.tolist()


@given(random_steps.steps(decode_only=True))
def test_a_bucket_pads_with_sequences_that_hold_nothing(step: StepBatch) -> None:
    run = packed.pack(step, SIZE, BUCKETS)
    count = step.query_lens.size
    assert run.bucket == BUCKETS.of(count, -(-int(step.kv_lens.max()) // SIZE))
    size = run.bucket.batch_size
    assert run.inputs["kv_lens"].tolist() == step.kv_lens.tolist() + [0] * (size - count)
    assert run.inputs["input_ids"].tolist() == step.input_ids.tolist() + [0] * (size - count)
    assert run.inputs["position_ids"].tolist() == step.position_ids.tolist() + [0] * (size - count)
    assert run.inputs["query_lens"].tolist() == [1] * size
    assert run.inputs["cu_query_lens"].tolist() == list(range(size + 1))
    table = run.inputs["block_table"]
    assert table.shape == (size, run.bucket.table_width)
    for b, held in enumerate(step.kv_lens):
        used = -(-int(held) // SIZE)
        assert table[b, :used].tolist() == step.block_table[b, :used].tolist()
    assert (table[count:] == -1).all()
    assert run.inputs["logits_rows"].tolist() == list(range(size))
    wanted = {int(row): i for i, row in enumerate(step.logits_rows)}
    assert run.logits_idx.tolist() == [wanted.get(row, -1) for row in range(size)]
    assert all(array.dtype == np.int32 for array in run.inputs.values())


@given(random_steps.steps())
def test_only_steps_that_decode_are_padded(step: StepBatch) -> None:
    run = packed.pack(step, SIZE, BUCKETS)
    assert (run.bucket is None) == (int(step.query_lens.max()) > 1)
