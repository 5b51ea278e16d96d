"""Rotary tables against float64 and against transformers' float32 angle."""

from __future__ import annotations

import numpy as np
import torch
from plansmith.builder.graph.rope import rope_tables
from tiny_graph import rope


def test_tables_are_cos_and_sin_times_mscale() -> None:
    spec = rope(16, mscale=1.25)
    cos, sin = rope_tables(spec, 40)
    angle = np.arange(40)[:, None] * np.array(spec.inv_freq)[None, :]
    assert cos.shape == sin.shape == (40, 8) and cos.dtype == np.float32
    np.testing.assert_allclose(cos, 1.25 * np.cos(angle), atol=5e-6)
    np.testing.assert_allclose(sin, 1.25 * np.sin(angle), atol=5e-6)


def test_far_positions_have_the_angle_that_the_model_was_trained_with() -> None:
    spec = rope(64)
    cos, _ = rope_tables(spec, 100_001)
    inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32)
    theirs = (torch.tensor(100_000.0) * inv_freq).cos().numpy()
    np.testing.assert_allclose(cos[100_000], theirs, atol=1e-6)
    exact = np.cos(100_000 * np.array(spec.inv_freq))
    assert np.abs(theirs - exact).max() > 1e-4  # the trap: exact angles would be the wrong ones
