"""TensorRT-LLM checkpoint directories of Hugging Face ones, by the layout that its documentation and converters give.

Written with torch and safetensors alone, from transformers' state dict, so that it shares nothing with the reader.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


def write_trtllm(source: Path, out: Path, *, tp_size: int = 1, pp_size: int = 1, **changes: Any) -> Path:
    """Write the checkpoint `source` (a directory of tiny_models) as TensorRT-LLM's into `out` and return it.

    changes : fields of config.json that are to be another; a value of ... leaves one out
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    config = trtllm_config(json.loads((source / "config.json").read_text()))
    config["mapping"] = {"world_size": tp_size * pp_size, "tp_size": tp_size, "pp_size": pp_size}
    config = {name: value for name, value in {**config, **changes}.items() if value is not ...}
    tensors = convert({k: v.detach() for k, v in model.state_dict().items()}, config)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    for rank in range(tp_size * pp_size):
        save_file(share(tensors, config, rank), out / f"rank{rank}.safetensors")
    return out


def trtllm_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json that the stack's own converters make of a Hugging Face one."""
    rope = dict(hf.get("rope_parameters") or {})
    nested = "full_attention" in rope
    full = dict(rope["full_attention"]) if nested else rope
    theta, factor = full.pop("rope_theta"), full.pop("partial_rotary_factor", 1.0)
    config: dict[str, Any] = {
        "architecture": hf["architectures"][0],
        "dtype": hf["dtype"],
        "logits_dtype": "float32",
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "intermediate_size": hf["intermediate_size"],
        "num_hidden_layers": hf["num_hidden_layers"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_key_value_heads": hf["num_key_value_heads"],
        "head_size": hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        "max_position_embeddings": hf["max_position_embeddings"],
        "hidden_act": hf.get("hidden_activation") or hf["hidden_act"],
        "norm_epsilon": hf["rms_norm_eps"],
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": theta,
        "rotary_scaling": None if full.get("rope_type") in (None, "default") else full,
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "qk_layernorm": False,
        "quantization": {
            "quant_algo": None,
            "kv_cache_quant_algo": None,
            "exclude_modules": None,
            "group_size": 128,
        },
        "runtime_defaults": None,
    }
    kind = hf["model_type"]
    if kind in ("llama", "mistral"):
        config |= {"attn_bias": hf.get("attention_bias", False), "mlp_bias": hf.get("mlp_bias", False)}
        config |= {"residual_mlp": False, "moe": {"num_experts": 0, "top_k": 0}, "fc_after_embed": False}
    if kind.startswith("qwen"):
        config |= {"qwen_type": kind, "attn_bias": kind == "qwen2", "mlp_bias": False, "use_logn_attn": False}
    if kind.startswith("gemma"):
        config |= {
            "attn_bias": False,
            "mlp_bias": False,
            "share_embedding_table": True,
            "inter_layernorms": True,
        }
        config |= {name: hf.get(name) for name in ("query_pre_attn_scalar", "final_logit_softcapping")}
    if kind == "gemma2":
        config["attn_logit_softcapping"] = hf["attn_logit_softcapping"]
    if nested:
        config |= {"sliding_window": hf["sliding_window"], "sliding_window_pattern": 3}
        config |= {"rope_local_base_freq": rope["sliding_attention"]["rope_theta"]}
    if kind == "phi3":
        config |= {"rotary_pct": factor, "hidden_act": "swiglu", "rotary_scaling": None}
        if full.get("rope_type") == "longrope":
            config |= {"position_embedding_type": "long_rope"}
            config |= {"original_max_position_embeddings": hf["original_max_position_embeddings"]}
            config |= {f"longrope_scaling_{one}_factors": full[f"{one}_factor"] for one in ("short", "long")}
    return config


def convert(state: Tensors, config: dict[str, Any]) -> Tensors:
    """Return a state dict under TensorRT-LLM's names; norms of Gemma become 1 + w."""
    gemma = config["architecture"].startswith("Gemma")
    out: Tensors = {}
    for name, value in state.items():
        if gemma and "norm" in name:
            value = value.float() + 1.0
        value = value.contiguous()
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            _convert_layer(out, f"transformer.layers.{layer}", rest, value, state, gemma)
        elif name == "model.embed_tokens.weight":
            out["transformer.vocab_embedding.weight"] = value
        elif name == "model.norm.weight":
            out["transformer.ln_f.weight"] = value
        elif name == "lm_head.weight":
            if not torch.equal(value, state["model.embed_tokens.weight"]):
                out[name] = value
        else:
            raise AssertionError(name)
    return out


def _convert_layer(
    out: Tensors, layer: str, rest: str, value: torch.Tensor, state: Tensors, gemma: bool
) -> None:
    module, leaf = rest.rsplit(".", 1)
    names = {
        "self_attn.o_proj": "attention.dense",
        "self_attn.qkv_proj": "attention.qkv",
        "self_attn.q_norm": "attention.q_layernorm",
        "self_attn.k_norm": "attention.k_layernorm",
        "mlp.gate_proj": "mlp.fc",
        "mlp.up_proj": "mlp.gate",
        "mlp.down_proj": "mlp.proj",
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_layernorm",
        "pre_feedforward_layernorm": "pre_feedforward_layernorm",
        "post_feedforward_layernorm": "post_feedforward_layernorm",
    }
    if module == "self_attn.q_proj":
        n = layer.rsplit(".", 1)[1]
        parts = [state[f"model.layers.{n}.self_attn.{one}_proj.{leaf}"] for one in "qkv"]
        out[f"{layer}.attention.qkv.{leaf}"] = torch.cat(parts)
    elif module in ("self_attn.k_proj", "self_attn.v_proj"):
        pass
    elif module == "mlp.gate_up_proj":
        gate, up = value.chunk(2)
        out[f"{layer}.mlp.fc.{leaf}"] = torch.cat([up, gate])
    else:
        out[f"{layer}.{names[module]}.{leaf}"] = value


def share(tensors: Tensors, config: dict[str, Any], rank: int) -> Tensors:
    """Return one rank's tensors: rank = stage * tp_size + share."""
    tp, pp = config["mapping"]["tp_size"], config["mapping"]["pp_size"]
    stage, part = divmod(rank, tp)
    layers = config["num_hidden_layers"]
    base, extra = divmod(layers, pp)
    counts = [base + (n < extra) for n in range(pp)]
    first = sum(counts[:stage])
    out: Tensors = {}
    for name, value in tensors.items():
        if name.startswith("transformer.layers."):
            _, _, layer, rest = name.split(".", 3)
            if not first <= int(layer) < first + counts[stage]:
                continue
            local = f"transformer.layers.{int(layer) - first}.{rest}"
            out[local] = _part(rest, value, config, part)
        elif name == "transformer.vocab_embedding.weight":
            if stage == 0:
                axis = config["embedding_sharding_dim"]
                out[name] = _chunk(value, axis, tp, part) if config["use_parallel_embedding"] else value
        elif stage == pp - 1:
            out[name] = _chunk(value, 0, tp, part) if name.startswith("lm_head") else value
    return {name: value.clone().contiguous() for name, value in out.items()}


def _chunk(value: torch.Tensor, axis: int, count: int, index: int) -> torch.Tensor:
    missing = -value.shape[axis] % count
    if missing:
        assert axis == 0
        value = torch.cat([value, value.new_zeros(missing, *value.shape[1:])])
    return value.chunk(count, axis)[index]


def _part(rest: str, value: torch.Tensor, config: dict[str, Any], part: int) -> torch.Tensor:
    tp = config["mapping"]["tp_size"]
    module, leaf = rest.rsplit(".", 1)
    if value.numel() == 1:
        return value
    if module == "attention.qkv" and leaf not in ("prequant_scaling_factor", "activation_scaling_factor"):
        heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
        unit = value.shape[0] // (heads + 2 * kv)  # rows of a head, or of half of it where two are packed
        q, k, v = value.split([heads * unit, kv * unit, kv * unit])
        if kv < tp:
            k, v = (
                one.reshape(kv, 1, unit, -1).repeat(1, tp // kv, 1, 1).reshape(tp * unit, *one.shape[1:])
                for one in (k, v)
            )
        return torch.cat([one.chunk(tp)[part] for one in (q, k, v)])
    if module in ("mlp.fc", "mlp.gate") and leaf not in (
        "prequant_scaling_factor",
        "activation_scaling_factor",
    ):
        return value.chunk(tp)[part]
    if module in ("attention.dense", "mlp.proj"):
        if leaf in ("weight", "weights_scaling_factor") and value.dim() == 2:
            return value.chunk(tp, 1)[part]
        if leaf == "prequant_scaling_factor":
            return value.chunk(tp)[part]
    return value
