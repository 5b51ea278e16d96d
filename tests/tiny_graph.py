"""Small specs and random weights in memory, for tests of the graph that need no checkpoint."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
from plansmith.builder.spec import DecoderSpec, LayerSpec, RopeSpec, weight_shapes

Array = npt.NDArray[Any]


def rope(rotary_dim: int, theta: float = 10000.0, mscale: float = 1.0) -> RopeSpec:
    half = rotary_dim // 2
    return RopeSpec(tuple(theta ** (-n / half) for n in range(half)), rotary_dim, mscale)


def tiny_spec(**fields: Any) -> DecoderSpec:
    """A two-layer decoder, the second with a window of 8; `fields` replace any of its own."""
    base: dict[str, Any] = {
        "family": "tiny",
        "architecture": "TinyForCausalLM",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "norm_eps": 1e-5,
        "activation": "silu",
        "ropes": (rope(32),),
        "layers": (LayerSpec(), LayerSpec(window=8)),
        "attn_scale": 32**-0.5,
        "tie_embeddings": True,
    }
    return DecoderSpec(**{**base, **fields})


EVERYTHING: dict[str, Any] = {
    "activation": "gelu_tanh",
    "norm_offset": 1.0,
    "embed_scale": 8.0,
    "attn_softcap": 4.0,
    "final_softcap": 6.0,
    "qk_norm": True,
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "lm_head_bias": True,
    "post_norms": True,
    "ropes": (rope(16, mscale=1.2), rope(32, theta=500.0)),
    "layers": (LayerSpec(window=8, rope_idx=1), LayerSpec()),
    "tie_embeddings": False,
}


class RandomWeights:
    """A WeightSource of random weights that counts what it hands out and what of that is still alive."""

    def __init__(self, spec: DecoderSpec, seed: int = 0) -> None:
        self._shapes = weight_shapes(spec)
        self._seeds = {name: [seed, n] for n, name in enumerate(self._shapes)}
        self.reads: list[str] = []
        self._handed_out: list[weakref.ref[Array]] = []
        self.peak_alive = 0

    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def get(self, name: str) -> Array:
        self.reads.append(name)
        noise = np.random.default_rng(self._seeds[name]).standard_normal(self._shapes[name])
        array: Array = (0.2 * noise).astype(np.float32)
        self._handed_out.append(weakref.ref(array))  # views of it keep it alive
        alive = sum(ref() is not None for ref in self._handed_out)
        self.peak_alive = max(self.peak_alive, alive)
        return array
