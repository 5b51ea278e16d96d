"""A step as the runs of a plan: names of a plan's inputs, and what a run is."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from ..batch import Int32Array

# The names of the graph contract, version 1, and of its rectangular form (builder/graph/contract.py has the meanings).
INPUT_IDS = "input_ids"
POSITION_IDS = "position_ids"
QUERY_LENS = "query_lens"
KV_LENS = "kv_lens"
CU_QUERY_LENS = "cu_query_lens"
BLOCK_TABLE = "block_table"
LOGITS_ROWS = "logits_rows"
KV_TOKEN_ORDER = "kv_token_order"
KV_UPDATE_LENGTHS = "kv_update_lengths"
KV_WRITE_STARTS = "kv_write_starts"
LOGITS = "logits"


class Step(Protocol):
    """The arrays of a mixed step that a layout reads: runtime's Batch, or the builder's StepBatch."""

    @property
    def input_ids(self) -> Int32Array: ...  # (T,)
    @property
    def position_ids(self) -> Int32Array: ...  # (T,)
    @property
    def query_lens(self) -> Int32Array: ...  # (B,)
    @property
    def kv_lens(self) -> Int32Array: ...  # (B,)
    @property
    def cu_query_lens(self) -> Int32Array: ...  # (B + 1,)
    @property
    def block_table(self) -> Int32Array: ...  # (B, stride), -1 = unused
    @property
    def logits_rows(self) -> Int32Array: ...  # (R,)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The shape that a decode run is padded to, so that one CUDA graph serves all that fit: B and the table's width."""

    batch_size: int
    table_width: int


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a plan.

    inputs : name -> int32 array, everything a plan takes but the pools
    logits_idx : (rows of the plan's logits,) int32, the step's row that each is; -1 = nobody wants it
    bucket : what the run was padded to; None = it has its own shape
    """

    inputs: dict[str, Int32Array]
    logits_idx: Int32Array
    bucket: Bucket | None = None


def rows_of(step: Step) -> Int32Array:
    """Return, for each of a step's packed tokens (T,), its row of logits; -1 = not wanted."""
    rows = np.full(step.input_ids.size, -1, np.int32)
    rows[step.logits_rows] = np.arange(step.logits_rows.size, dtype=np.int32)
    return rows
