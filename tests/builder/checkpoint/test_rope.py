"""Each rope formula against transformers' own functions, at published parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from plansmith.builder.checkpoint.rope import RopeConfig, make_rope
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

_LONG = {"short_factor": [1.0 + n / 50 for n in range(48)], "long_factor": [1.1 + n for n in range(48)]}
CASES: list[tuple[str, int, int, dict[str, Any]]] = [  # name, head_dim, max positions, parameters
    ("llama2", 128, 4096, {"rope_type": "default", "rope_theta": 10000.0}),
    ("qwen2", 128, 32768, {"rope_type": "default", "rope_theta": 1000000.0}),
    ("linear", 128, 16384, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    (
        "llama3.1",
        128,
        131072,
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    (
        "llama3.2",
        64,
        131072,
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    (
        "qwen-yarn",
        128,
        131072,
        {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    ),
    (
        "yarn-all",
        64,
        65536,
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 24.0,
            "beta_slow": 2.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.9,
            "truncate": False,
        },
    ),
    (
        "yarn-factor",
        64,
        65536,
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 4096,
            "attention_factor": 1.25,
        },
    ),
    (
        "longrope",
        96,
        131072,
        {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096, **_LONG},
    ),
    (
        "longrope-partial",
        128,
        131072,
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 4096,
            "factor": 16.0,
            **_LONG,
        },
    ),
    (
        "longrope-factor",
        96,
        131072,
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 4096,
            "attention_factor": 1.19,
            **_LONG,
        },
    ),
]


@pytest.mark.parametrize("seq_len", [None, 4096, 131072])
@pytest.mark.parametrize(("name", "head_dim", "positions", "parameters"), CASES, ids=[c[0] for c in CASES])
def test_equals_transformers(
    name: str, head_dim: int, positions: int, parameters: dict[str, Any], seq_len: int | None
) -> None:
    config = transformers.LlamaConfig(
        hidden_size=head_dim * 4,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rope_parameters=dict(parameters),
    )
    kind = parameters["rope_type"]
    if kind == "default":
        module = LlamaRotaryEmbedding(config)
        want, mscale = module.inv_freq, module.attention_scaling
    else:
        want, mscale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len)
    got = make_rope(
        RopeConfig(
            parameters,
            where="config.json",
            head_dim=head_dim,
            max_position_embeddings=positions,
            max_seq_len=seq_len or 0,
        )
    )
    assert got.kind == kind and got.rotary_dim == 2 * len(want)
    assert got.mscale == pytest.approx(mscale, rel=1e-12)
    # Two units in the last place of float32: powers and products may each be rounded the other way.
    np.testing.assert_allclose(np.float64(got.inv_freq), want.double().numpy(), rtol=2.4e-7)
