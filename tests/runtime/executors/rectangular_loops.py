"""The rectangular steps of a packed one by plain loops: what the vectorised ones are held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def rectangle(step: Any, seqs: Sequence[int], num_blocks: int, block_size: int) -> dict[str, np.ndarray]:
    """Return the inputs of one [B, S] step of the sequences `seqs`, token by token."""
    rows = max(int(step.query_lens[b]) for b in seqs)
    width = max(-(-int(step.kv_lens[b]) // block_size) for b in seqs)
    ids, positions = np.zeros((2, len(seqs), rows), np.int32)
    table = np.zeros((len(seqs), width), np.int32)
    places: dict[int, dict[int, int]] = {}  # block -> row in it -> flat row
    flat_of = {}
    for i, b in enumerate(seqs):
        new, held = int(step.query_lens[b]), int(step.kv_lens[b])
        for j in range(width):
            is_used = j * block_size < held
            table[i, j] = step.block_table[b, j] if is_used else step.block_table[b, 0]
        for j in range(new):
            packed = int(step.cu_query_lens[b]) + j
            row = rows - new + j
            ids[i, row], positions[i, row] = step.input_ids[packed], step.position_ids[packed]
            flat_of[packed] = i * rows + row
            block, in_block = divmod(held - new + j, block_size)
            places.setdefault(int(table[i, block]), {})[in_block] = i * rows + row
    order, lengths, starts = [], [0], []
    for block in range(num_blocks):
        written = places.get(block, {})
        order += [written[row] for row in sorted(written)]
        lengths.append(len(order))
        starts.append(min(written, default=0))
    wanted = [flat_of[int(p)] for p in step.logits_rows if int(p) in flat_of]
    return {
        "input_ids": ids,
        "position_ids": positions,
        "kv_lens": step.kv_lens[list(seqs)],
        "block_table": table,
        "logits_rows": np.array(wanted or [ids.size - 1], np.int32),
        "kv_token_order": np.array(order, np.int32),
        "kv_update_lengths": np.array(lengths, np.int32),
        "kv_write_starts": np.array(starts, np.int32),
    }
