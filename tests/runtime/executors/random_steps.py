"""Random mixed steps over scattered blocks, for tests of the layouts."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from plansmith.builder.batch import StepBatch

SIZE = 4  # positions in a block
BLOCKS = 60
MAX_BLOCKS = 5  # of a sequence


@st.composite
def steps(draw: st.DrawFn, max_seqs: int = 11, decode_only: bool = False) -> StepBatch:
    """Return a step of up to max_seqs sequences, some with one new token, some with chunks."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(1, max_seqs))
    kv_lens = rng.integers(1, MAX_BLOCKS * SIZE + 1, count).astype(np.int32)
    lens = np.where(rng.random(count) < 0.6, 1, rng.integers(1, kv_lens + 1)).astype(np.int32)
    if decode_only:
        lens[:] = 1
    cu = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    free = rng.permutation(BLOCKS)
    table = np.full((count, MAX_BLOCKS + int(rng.integers(0, 3))), -1, np.int32)
    for b, held in enumerate(kv_lens):
        needed = -(-int(held) // SIZE)
        table[b, :needed], free = free[:needed], free[needed:]
    total = int(cu[-1])
    wanted = np.sort(rng.permutation(total)[: rng.integers(0, min(total, 8) + 1)]).astype(np.int32)
    positions = [np.arange(held - new, held) for new, held in zip(lens, kv_lens, strict=True)]
    return StepBatch(
        input_ids=rng.integers(1, 1000, total).astype(np.int32),
        position_ids=np.concatenate(positions).astype(np.int32),
        query_lens=lens,
        kv_lens=kv_lens,
        cu_query_lens=cu,
        block_table=table,
        logits_rows=wanted,
    )
