"""The graph, run by ONNX Runtime over mixed steps, against transformers: every family, every precision.

A quantized graph is compared with a transformers model that holds the dequantized weights, so that the tolerance is
that of float32 arithmetic and a wrong axis, group or scale cannot hide behind quantization error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from plansmith.builder.batch import BatchPlanner
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.graph import build_graph
from plansmith.builder.limits import make_limits
from plansmith.builder.precision import precision
from plansmith.builder.targets.reference import ReferenceSession
from tiny_models import FAMILIES, VOCAB_SIZE
from transformers_reference import transformers_logits

TOLERANCE = 2e-5  # of the largest logit; float32 sums in another order give about 2e-6
NUM_BLOCKS = 24


def sequences(longest: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    lengths = (longest, 17, 5, longest // 2, 1, 30)
    return [rng.integers(3, VOCAB_SIZE, n).tolist() for n in lengths]


def largest_difference(
    session: ReferenceSession, seqs: list[list[int]], wanted: list[np.ndarray], seed: int
) -> float:
    """Run all sequences through mixed steps and return max |diff| / max |wanted|; every row is compared once."""
    planner = BatchPlanner(
        seqs,
        num_blocks=NUM_BLOCKS,
        tokens_per_block=8,
        max_blocks_per_seq=16,
        max_num_tokens=24,
        max_batch_size=4,
        seed=seed,
    )
    worst, seen = 0.0, set()
    for step in planner:
        logits = session.step(step.batch)
        for row, (seq, pos) in enumerate(step.rows):
            worst = max(worst, float(np.abs(logits[row] - wanted[seq][pos]).max()))
            seen.add((seq, pos))
    assert len(seen) == sum(map(len, seqs))
    return worst / max(float(np.abs(w).max()) for w in wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_graph_is_transformers(family: str, tiny_checkpoint: Callable[[str], Path]) -> None:
    path = tiny_checkpoint(family)
    checkpoint = open_checkpoint(path)
    spec = checkpoint.spec
    limits = make_limits(spec.max_position_embeddings, tokens_per_block=8)
    session = ReferenceSession(build_graph(spec, checkpoint.weights, precision("fp32"), limits), NUM_BLOCKS)
    seqs = sequences(min(100, limits.max_seq_len))
    wanted = transformers_logits(path, seqs)
    for seed in (0, 1):  # the second pass finds the first one's leftovers in the pools
        assert largest_difference(session, seqs, wanted, seed) < TOLERANCE


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_precisions_are_transformers_with_those_weights(
    family: str, recipe: str, tiny_checkpoint: Callable[[str], Path]
) -> None:
    path = tiny_checkpoint(family)
    checkpoint = open_checkpoint(path)
    spec = checkpoint.spec
    limits = make_limits(spec.max_position_embeddings, tokens_per_block=8)
    session = ReferenceSession(build_graph(spec, checkpoint.weights, precision(recipe), limits), NUM_BLOCKS)
    plain = transformers_logits(path, sequences(40))
    wanted = transformers_logits(path, sequences(40), recipe)
    scale = max(float(np.abs(w).max()) for w in wanted)
    moved = max(float(np.abs(a - b).max()) for a, b in zip(plain, wanted, strict=True)) / scale
    assert moved > 10 * TOLERANCE, "the recipe changes too little for this test to see it"
    assert largest_difference(session, sequences(40), wanted, seed=3) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_float16_activations_stay_near(family: str, tiny_checkpoint: Callable[[str], Path]) -> None:
    """What a GPU target computes in: the same graph with float16 between the ops."""
    path = tiny_checkpoint(family)
    checkpoint = open_checkpoint(path)
    limits = make_limits(checkpoint.spec.max_position_embeddings, tokens_per_block=8)
    wanted = transformers_logits(path, sequences(40), "fp16")
    graph = build_graph(checkpoint.spec, checkpoint.weights, precision("fp16"), limits, compute="float16")
    difference = largest_difference(ReferenceSession(graph, NUM_BLOCKS), sequences(40), wanted, seed=0)
    assert 0 < difference < 2e-2  # float16 has 2^-11 = 5e-4 an operation, some 20 of them in a row
