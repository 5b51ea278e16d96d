"""The session: what it refuses, and that its logits do not depend on how the tokens were cut into steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from plansmith.builder.batch import BatchPlanner, StepBatch
from plansmith.builder.graph import build_graph, contract
from plansmith.builder.limits import make_limits
from plansmith.builder.precision import precision
from plansmith.builder.targets.reference import ReferenceSession
from plansmith.runtime.errors import ShapeError
from tiny_graph import EVERYTHING, RandomWeights, tiny_spec


def session(max_seq_len: int = 64, **fields: Any) -> ReferenceSession:
    spec = tiny_spec(**fields)
    limits = make_limits(128, max_seq_len=max_seq_len, tokens_per_block=8)
    return ReferenceSession(build_graph(spec, RandomWeights(spec), precision("int8"), limits), 12)


def first_step(tokens: int = 5, blocks: tuple[int, ...] = (3,)) -> StepBatch:
    ids = np.arange(tokens, dtype=np.int32)
    return StepBatch(
        input_ids=ids,
        position_ids=ids.copy(),
        query_lens=np.array([tokens], np.int32),
        kv_lens=np.array([tokens], np.int32),
        cu_query_lens=np.array([0, tokens], np.int32),
        block_table=np.array([[*blocks, -1]], np.int32),
        logits_rows=np.array([tokens - 1], np.int32),
    )


def test_cutting_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    seqs = [rng.integers(0, 96, n).tolist() for n in (20, 9, 31, 1)]
    found: dict[tuple[int, int], np.ndarray] = {}
    run = session(**EVERYTHING)
    plan = {"num_blocks": 12, "tokens_per_block": 8, "max_blocks_per_seq": 8}
    for seed, limits in (
        (0, {}),
        (1, {"max_num_tokens": 5}),
        (2, {"max_batch_size": 1, "max_num_tokens": 64}),
    ):
        for step in BatchPlanner(seqs, seed=seed, **plan, **limits):
            for row, key in zip(run.step(step.batch), step.rows, strict=True):
                np.testing.assert_allclose(row, found.setdefault(key, row), atol=2e-5)
    assert len(found) == sum(map(len, seqs))


def test_unwritten_rows_of_the_pools_stay_nan() -> None:
    run = session()
    run.step(first_step())
    pool = run.pool(contract.k_pool(0))
    assert np.isfinite(pool[3, :, :5]).all()
    pool[3, :, :5] = np.nan
    assert np.isnan(pool).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": np.arange(5, dtype=np.int64)}, "int64"),
        ({"position_ids": np.arange(4, dtype=np.int32)}, "position_ids has shape"),
        ({"position_ids": np.arange(60, 65, dtype=np.int32)}, "max_seq_len 64"),
        ({"cu_query_lens": np.array([0, 4], np.int32)}, "cu_query_lens"),
        ({"kv_lens": np.array([4], np.int32)}, "query_lens <= kv_lens"),
        ({"kv_lens": np.array([9], np.int32)}, "must name 2 blocks"),
        ({"block_table": np.array([[12, -1]], np.int32)}, "below 12"),
        ({"block_table": np.array([[-1, -1]], np.int32)}, "block table"),
        ({"logits_rows": np.array([5], np.int32)}, "logits_rows"),
    ],
)
def test_contradictory_batches_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        session().step(dataclasses.replace(first_step(), **change))
