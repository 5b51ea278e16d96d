"""The decode step in transformers: LlamaForCausalLM with a static cache, over our weights, as fast as it can be had.

Its attention is scaled_dot_product_attention and the step is one CUDA graph. The step's cache is exactly full, so no
mask is needed: transformers is kept from making one, and torch takes its fastest kernel. `compiled` is the same under
torch.compile, which is what a static cache with mode "reduce-overhead" runs: compiled kernels in a CUDA graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from bench_device import Device
from llama_shape import DecodeInputs, Shape, Weights


class Peer:
    """transformers' model and its cache, filled with random keys and values."""

    def __init__(
        self, device: Device, shape: Shape, weights: Weights, inputs: DecodeInputs, dtype: torch.dtype
    ) -> None:
        """Make the model over `weights` without a copy, and a cache of `inputs.context` positions."""
        from transformers import StaticCache

        self.model = build_model(device, shape, weights, dtype)
        self.inputs = inputs
        self.cache: Any = StaticCache(config=self.model.config, max_cache_len=inputs.context)
        self.cache.early_initialization(
            inputs.batch, shape.kv_num_heads, shape.head_dim, dtype, torch.device(device.name)
        )
        for layer in self.cache.layers:
            drawn = (inputs.batch, shape.kv_num_heads, inputs.context, shape.head_dim)
            layer.keys.copy_(device.normal(*drawn, dtype=dtype))
            layer.values.copy_(device.normal(*drawn, dtype=dtype))
        self.input_ids = inputs.input_ids.long()[:, None]
        self.position_ids = torch.full_like(self.input_ids, inputs.context - 1)
        accepted = inspect.signature(type(self.model).forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self._extra = {"cache_position": self.position_ids[0]} if "cache_position" in accepted else {}

    def rewind(self) -> None:
        """Make room for the step's token again; it is called before each step and is not part of it."""
        for layer in self.cache.layers:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length.fill_(self.inputs.context - 1)

    def logits(self) -> torch.Tensor:
        """Return the step's logits (B, V), after rewind()."""
        arguments = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            self._cache_argument: self.cache,
            "use_cache": True,
            **self._extra,
        }
        out: torch.Tensor = self.model(**arguments).logits[:, -1]
        return out

    def step(self) -> torch.Tensor:
        """Return the greedy tokens (B,) of the step."""
        return self.logits().argmax(dim=-1)

    def compiled(self, backend: str) -> Callable[[], torch.Tensor]:
        """Return the step under torch.compile, for these sizes alone."""
        torch._dynamo.reset()
        return torch.compile(self.step, dynamic=False, backend=backend)


def build_model(device: Device, shape: Shape, weights: Weights, dtype: torch.dtype) -> Any:
    """Return LlamaForCausalLM whose parameters are views of `weights`."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama import modeling_llama

    # During a capture it cannot see that the cache is full, and would take slower attention over a mask of ones.
    modeling_llama.create_causal_mask = lambda *_, **__: None

    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.kv_num_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=1 << 17,
        rms_norm_eps=shape.eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.model.rotary_emb = modeling_llama.LlamaRotaryEmbedding(config=config).to(device.name)
    model.load_state_dict(state(shape, weights), assign=True, strict=True)
    return model.eval().requires_grad_(False)


def state(shape: Shape, weights: Weights) -> dict[str, torch.Tensor]:
    """Return transformers' names -> views of the weights."""
    heads, kv = shape.num_heads * shape.head_dim, shape.kv_num_heads * shape.head_dim
    named = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.norm,
        "lm_head.weight": weights.head,
    }
    for i, layer in enumerate(weights.layers):
        q, k, v = layer.qkv.split([heads, kv, kv])
        gate, up = layer.gate_up.chunk(2)
        named |= {
            f"model.layers.{i}.input_layernorm.weight": layer.attention_norm,
            f"model.layers.{i}.self_attn.q_proj.weight": q,
            f"model.layers.{i}.self_attn.k_proj.weight": k,
            f"model.layers.{i}.self_attn.v_proj.weight": v,
            f"model.layers.{i}.self_attn.o_proj.weight": layer.out,
            f"model.layers.{i}.post_attention_layernorm.weight": layer.mlp_norm,
            f"model.layers.{i}.mlp.gate_proj.weight": gate,
            f"model.layers.{i}.mlp.up_proj.weight": up,
            f"model.layers.{i}.mlp.down_proj.weight": layer.down,
        }
    return named
