"""A mixed step as the one run of a packed plan: inputs [T], sequences one after another."""

from __future__ import annotations

import numpy as np

from ..batch import Int32Array
from . import runs
from .buckets import Buckets
from .runs import Bucket, Run, Step

_NO_BLOCK = -1


def pack(step: Step, block_size: int, buckets: Buckets | None = None) -> Run:
    """Return the run of a step.

    block_size : BS, positions in a block
    buckets : pad a step that only decodes (one new token a sequence) to its bucket, with sequences of kv_lens 0, for
        which nothing is read or written, and ask for all rows, so that every run of the bucket has the same shapes
    """
    width = max(1, -(-int(step.kv_lens.max()) // block_size))
    table = step.block_table[:, :width]
    if buckets is not None and step.query_lens.max() == 1:
        return _decode(step, table, buckets.of(step.query_lens.size, width))
    logits_rows, logits_idx = step.logits_rows, np.arange(step.logits_rows.size, dtype=np.int32)
    if logits_rows.size == 0:
        logits_rows, logits_idx = np.array([step.input_ids.size - 1], np.int32), np.array([-1], np.int32)
    inputs = {
        runs.INPUT_IDS: step.input_ids,
        runs.POSITION_IDS: step.position_ids,
        runs.QUERY_LENS: step.query_lens,
        runs.KV_LENS: step.kv_lens,
        runs.CU_QUERY_LENS: step.cu_query_lens,
        runs.BLOCK_TABLE: table,
        runs.LOGITS_ROWS: logits_rows,
    }
    return Run(inputs, logits_idx)


def _decode(step: Step, table: Int32Array, bucket: Bucket) -> Run:
    size = bucket.batch_size
    padded = np.full((size, bucket.table_width), _NO_BLOCK, np.int32)
    padded[: table.shape[0], : table.shape[1]] = table
    inputs = {
        runs.INPUT_IDS: _extended(step.input_ids, size),
        runs.POSITION_IDS: _extended(step.position_ids, size),
        runs.QUERY_LENS: np.ones(size, np.int32),
        runs.KV_LENS: _extended(step.kv_lens, size),
        runs.CU_QUERY_LENS: np.arange(size + 1, dtype=np.int32),
        runs.BLOCK_TABLE: padded,
        runs.LOGITS_ROWS: np.arange(size, dtype=np.int32),
    }
    logits_idx = np.full(size, -1, np.int32)
    logits_idx[: step.input_ids.size] = runs.rows_of(step)
    return Run(inputs, logits_idx, bucket)


def _extended(values: Int32Array, size: int) -> Int32Array:
    """Return values with zeros behind."""
    extended = np.zeros(size, np.int32)
    extended[: values.size] = values
    return extended
