"""Small specs, weights, graphs and mixed steps for the tests of TensorRT-RTX's and TensorRT's targets."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from plansmith.builder.batch import BatchPlanner, PlannedStep
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.graph import build_graph
from plansmith.builder.limits import Limits
from plansmith.builder.precision import precision
from plansmith.builder.spec import DecoderSpec, LayerSpec, RopeSpec, weight_shapes

LIMITS = Limits(max_batch_size=4, max_num_tokens=32, max_input_len=64, max_seq_len=64, tokens_per_block=8)
BLOCKS = 24


def tiny_spec(*, windows: tuple[int, ...] = (0, 6), **changes: Any) -> DecoderSpec:
    """Return a decoder of len(windows) layers with grouped heads."""
    fields: dict[str, Any] = {
        "family": "tiny",
        "architecture": "TinyForCausalLM",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": len(windows),
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "norm_eps": 1e-5,
        "activation": "silu",
        "ropes": (RopeSpec(tuple(10000.0 ** (-n / 16) for n in range(16)), 32),),
        "layers": tuple(LayerSpec(window) for window in windows),
        "attn_scale": 32**-0.5,
        "tie_embeddings": True,
    }
    return DecoderSpec(**{**fields, **changes})


class RandomWeights:
    """Weights of a spec, the same each time they are asked for."""

    def __init__(self, spec: DecoderSpec) -> None:
        self._shapes = weight_shapes(spec)

    def names(self) -> Iterable[str]:
        """All names."""
        return self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """A weight's shape."""
        return self._shapes[name]

    def get(self, name: str) -> Any:
        """A weight in float32."""
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        return (0.2 * rng.standard_normal(self._shapes[name])).astype(np.float32)


def tiny_graph(
    spec: DecoderSpec | None = None,
    *,
    recipe: str = "fp16",
    compute: str = "float16",
    limits: Limits = LIMITS,
) -> ir.Model:
    """Return a graph with random weights."""
    spec = spec or tiny_spec()
    return build_graph(spec, RandomWeights(spec), precision(recipe), limits, compute=compute)


def sequences(vocab_size: int) -> list[list[int]]:
    """Return the token ids of five sequences, the same each time."""
    rng = np.random.default_rng(7)
    return [rng.integers(3, vocab_size, n).tolist() for n in (40, 17, 9, 1, 24)]


def steps(vocab_size: int, seed: int = 1) -> Iterator[PlannedStep]:
    """Return mixed steps over them, on scattered blocks of a pool of BLOCKS."""
    planner = BatchPlanner(
        sequences(vocab_size),
        num_blocks=BLOCKS,
        tokens_per_block=LIMITS.tokens_per_block,
        max_blocks_per_seq=LIMITS.max_blocks_per_seq,
        max_num_tokens=LIMITS.max_num_tokens,
        max_batch_size=LIMITS.max_batch_size,
        seed=seed,
    )
    return iter(planner)


def graph_of(path: Path, recipe: str = "fp32", compute: str = "float32") -> ir.Model:
    """Return the graph of a checkpoint."""
    checkpoint = open_checkpoint(path)
    return build_graph(checkpoint.spec, checkpoint.weights, precision(recipe), LIMITS, compute=compute)
