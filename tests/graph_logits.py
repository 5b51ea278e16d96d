"""Logits of a checkpoint's graph in ONNX Runtime, whole sequences at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from plansmith.builder.batch import BatchPlanner
from plansmith.builder.checkpoint import Checkpoint
from plansmith.builder.graph import build_graph
from plansmith.builder.limits import make_limits
from plansmith.builder.precision import Precision
from plansmith.builder.targets.reference import ReferenceSession


def graph_logits(
    checkpoint: Checkpoint, recipe: Precision, sequences: Sequence[list[int]]
) -> list[np.ndarray]:
    """Return each sequence's logits (tokens, V), computed in mixed steps of chunks over scattered blocks."""
    limits = make_limits(checkpoint.spec.max_position_embeddings, tokens_per_block=8)
    session = ReferenceSession(build_graph(checkpoint.spec, checkpoint.weights, recipe, limits), 24)
    planner = BatchPlanner(
        sequences,
        num_blocks=24,
        tokens_per_block=8,
        max_blocks_per_seq=16,
        max_num_tokens=24,
        max_batch_size=4,
        seed=0,
    )
    out = [np.empty((len(one), checkpoint.spec.vocab_size), np.float32) for one in sequences]
    for step in planner:
        for row, (seq, at) in zip(session.step(step.batch), step.rows, strict=True):
            out[seq][at] = row
    return out
