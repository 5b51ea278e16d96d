"""Rejection in numpy, one sequence and token at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..sampling.reference import draw_bits, exponential, philox

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]


def compare(
    drawn: Int32Array, draft_tokens: Int32Array, cu_draft_lens: Int32Array
) -> list[tuple[int, list[int]]]:
    """Return (accepted, tokens emitted) of each sequence. drawn : (R,) tokens of spec.py's rows."""
    found = []
    for seq, (first, end) in enumerate(
        zip(cu_draft_lens[:-1].tolist(), cu_draft_lens[1:].tolist(), strict=True)
    ):
        row = first + seq
        accepted = 0
        while accepted < end - first and drawn[row + accepted] == draft_tokens[first + accepted]:
            accepted += 1
        found.append((accepted, drawn[row : row + accepted + 1].tolist()))
    return found


def reject(
    target: Float32Array, draft: Float32Array, seeds: list[int], output_idx: int, draft_tokens: list[int]
) -> tuple[int, list[int]]:
    """Return (accepted, tokens emitted) of one sequence by rejection sampling in float64.

    target : (n + 1, V), draft : (n, V) weights; seeds : of each row; output_idx : of the first
    """
    for i, token in enumerate(draft_tokens):
        p, q = _shares(target[i]), _shares(draft[i])
        bits, *key, _ = philox(seeds[i], output_idx + i, 1)
        if (bits + 0.5) * 2.0**-32 * q[token] >= p[token]:
            return i, [*draft_tokens[:i], _race(np.maximum(p - q, 0), key)]
    n = len(draft_tokens)
    _, *key, _ = philox(seeds[n], output_idx + n, 1)
    return n, [*draft_tokens, _race(_shares(target[n]), key)]


def _shares(weights: Float32Array) -> Float64Array:
    wide = weights.astype(np.float64)
    found: Float64Array = wide / wide.sum()
    return found


def _race(p: Float64Array, key: list[int]) -> int:
    ids = np.nonzero(p > 0)[0]
    times = exponential(draw_bits((key[0], key[1]), ids)) / p[ids]
    return int(ids[np.argmin(times)])
