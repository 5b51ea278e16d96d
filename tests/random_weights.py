"""A model of some shape with random weights, and the cpu plans that are made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from plansmith.builder.checkpoint.hf_dir import read_spec
from plansmith.builder.graph import build_graph
from plansmith.builder.limits import Limits, make_limits
from plansmith.builder.scheme import QuantizedInput, QuantizedWeight
from plansmith.builder.spec import DecoderSpec
from plansmith.builder.targets.cpu import compile_plan
from plansmith.builder.weight_sizes import ShapesOnly, assumed_recipe

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# 34 million parameters: 67 MB at fp16, so that one per cent is more than a page here and there.
MIDDLE: dict[str, Any] = LLAMA | {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 16384,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
LLAMA_7B: dict[str, Any] = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
LLAMA_70B: dict[str, Any] = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}


def spec_of(config: dict[str, Any]) -> DecoderSpec:
    """Return the spec of a config.json's object."""
    return read_spec(config, "config.json", 0)[0]


class RandomWeights(ShapesOnly):
    """A WeightSource of small random numbers, each made when it is asked for."""

    def get(self, name: str) -> Any:
        """Return a weight."""
        generator = np.random.default_rng(self.names().index(name))
        return generator.standard_normal(self.shape(name), np.float32) * np.float32(0.02)

    def quantized(self, name: str) -> QuantizedWeight:
        """Return a weight as FP8 codes with one scale, for the recipe fp8."""
        codes = (self.get(name) * 1000).astype(ml_dtypes.float8_e4m3fn)
        return QuantizedWeight(codes, np.array(1e-3, np.float32))

    def quantized_input(self, name: str) -> QuantizedInput:
        """Return the scale of its input."""
        return QuantizedInput(0.01)


def write_plan(config: dict[str, Any], precision: str, path: Path, **limits: int) -> tuple[Path, Limits]:
    """Write the cpu plan of a random model and return it with its limits."""
    spec = spec_of(config)
    made = make_limits(spec.max_position_embeddings, **limits)
    recipe = assumed_recipe(precision, spec).on_cpu()
    compile_plan(build_graph(spec, RandomWeights(spec), recipe, made), spec, made, path)
    return path, made
