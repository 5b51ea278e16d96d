"""Rectangular inputs of mixed steps: every new token reaches its place in the pool, and nothing else does."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plansmith.builder.batch import BatchPlanner, StepBatch
from plansmith.builder.targets.rtx import step_inputs
from plansmith.runtime.errors import InvalidArgumentError

BLOCKS, SIZE = 30, 8


def plan(seed: int) -> list[StepBatch]:
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(1, 90, n).tolist() for n in (37, 16, 8, 1, 21)]
    planner = BatchPlanner(
        sequences, num_blocks=BLOCKS, tokens_per_block=SIZE, max_blocks_per_seq=6, max_batch_size=4, seed=seed
    )
    return [step.batch for step in planner]


def written_places(inputs: dict[str, np.ndarray]) -> dict[tuple[int, int], int]:
    """Return (block, row) -> flat row, as TRT_KVCacheUpdate writes."""
    order, lengths, starts = (inputs[f"kv_{n}"] for n in ("token_order", "update_lengths", "write_starts"))
    places = {}
    for block in range(BLOCKS):
        for i, token in enumerate(order[lengths[block] : lengths[block + 1]]):
            places[block, int(starts[block]) + i] = int(token)
    return places


@given(st.integers(0, 10_000), st.booleans())
def test_tokens_are_written_where_the_block_table_says(seed: int, together: bool) -> None:
    for batch in plan(seed):
        everyone = list(range(batch.query_lens.size))
        parts = (
            [step_inputs.rectangle(batch, everyone, BLOCKS, SIZE)]
            if together
            else list(step_inputs.split(batch, BLOCKS, SIZE))
        )
        got = {}
        for part in parts:
            ids, positions = part.inputs["input_ids"].ravel(), part.inputs["position_ids"].ravel()
            for place, row in written_places(part.inputs).items():
                assert place not in got
                got[place] = (int(ids[row]), int(positions[row]))
        wanted = {}
        for b in everyone:
            for row in range(batch.cu_query_lens[b], batch.cu_query_lens[b + 1]):
                at = int(batch.position_ids[row])
                wanted[int(batch.block_table[b, at // SIZE]), at % SIZE] = (int(batch.input_ids[row]), at)
        assert got == wanted


@given(st.integers(0, 10_000))
def test_split_steps_have_no_padding_and_all_logits(seed: int) -> None:
    for batch in plan(seed):
        rows = []
        for part in step_inputs.split(batch, BLOCKS, SIZE):
            ids = part.inputs["input_ids"]
            assert ids.shape[0] == 1 or ids.shape[1] == 1
            assert part.inputs["kv_token_order"].size == ids.size
            rows += part.logits_idx.tolist()
            for r, flat in zip(part.logits_idx, part.inputs["logits_rows"], strict=False):
                assert ids.ravel()[flat] == batch.input_ids[batch.logits_rows[r]]
        assert sorted(rows) == list(range(batch.logits_rows.size))


@given(st.integers(0, 10_000))
def test_table_names_only_blocks_of_the_sequence(seed: int) -> None:
    for batch in plan(seed):
        part = step_inputs.rectangle(batch, list(range(batch.query_lens.size)), BLOCKS, SIZE)
        table = part.inputs["block_table"]
        assert table.shape[1] == -(-int(batch.kv_lens.max()) // SIZE)
        for row, own in zip(table.tolist(), batch.block_table.tolist(), strict=True):
            assert set(row) <= {block for block in own if block >= 0}


def chunk(**changes: np.ndarray) -> StepBatch:
    """Two sequences: five tokens of a prompt, and one token after nine."""
    fields = {
        "input_ids": [1, 2, 3, 4, 5, 6],
        "position_ids": [0, 1, 2, 3, 4, 9],
        "query_lens": [5, 1],
        "kv_lens": [5, 10],
        "cu_query_lens": [0, 5, 6],
        "block_table": [[3, -1], [7, 2]],
        "logits_rows": [5],
    }
    arrays = {name: np.array(value, np.int32) for name, value in fields.items()}
    return dataclasses.replace(StepBatch(**arrays), **changes)


def test_padding_comes_first_and_is_not_written() -> None:
    part = step_inputs.rectangle(chunk(), [0, 1], 9, SIZE)
    assert part.inputs["input_ids"].tolist() == [[1, 2, 3, 4, 5], [0, 0, 0, 0, 6]]
    assert part.inputs["kv_token_order"].tolist() == [9, 0, 1, 2, 3, 4]
    assert part.inputs["kv_update_lengths"].tolist() == [0, 0, 0, 1, 6, 6, 6, 6, 6, 6]
    assert part.inputs["kv_write_starts"].tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert part.inputs["block_table"].tolist() == [[3, 3], [7, 2]]
    assert part.inputs["logits_rows"].tolist() == [9] and part.logits_idx.tolist() == [0]


def test_a_step_without_logits_asks_for_one_row_and_drops_it() -> None:
    decode, prefill = step_inputs.split(chunk(), 9, SIZE)
    assert decode.logits_idx.tolist() == [0]
    assert prefill.inputs["logits_rows"].tolist() == [4] and prefill.logits_idx.size == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_table": [[-1, -1], [7, 2]]}, "no block in its block table"),
        ({"block_table": [[3, -1], [7, -1]]}, "no block in its block table"),
        ({"block_table": [[2, -1], [7, 2]]}, "two sequences of a step write the same block"),
        ({"block_table": [[9, -1], [7, 2]]}, "block 9 is beyond the pool's 9 blocks"),
        ({"kv_lens": [5, 18]}, "holds 18 positions, the block table has 2 blocks of 8"),
        ({"kv_lens": [4, 10]}, "1 <= query_lens <= kv_lens"),
    ],
)
def test_bad_steps_are_refused(changes: dict[str, list[int]], message: str) -> None:
    batch = chunk(**{name: np.array(value, np.int32) for name, value in changes.items()})
    with pytest.raises(InvalidArgumentError, match=message):
        step_inputs.rectangle(batch, [0, 1], 9, SIZE)
