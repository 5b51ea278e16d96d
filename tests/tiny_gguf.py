"""GGUF files of the tiny checkpoints, written as converters write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
from tiny_models import CHAT_TEMPLATE

_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        module, leaf = rest.rsplit(".", 1)
        return f"blk.{layer}.{_LAYER[module]}.{leaf}"
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    return f"{top[name.rsplit('.', 1)[0]]}.{name.rsplit('.', 1)[1]}"


def interleave(w: np.ndarray, heads: int) -> np.ndarray:
    """As Llama converters do: rows (h, 2, d/2) -> (h, d/2, 2)."""
    return w.reshape(heads, 2, len(w) // heads // 2, -1).swapaxes(1, 2).reshape(w.shape)


def write_gguf(source: Path, path: Path, kind: str = "f32", skip: tuple[str, ...] = (), **meta: Any) -> Path:
    """Write a directory's model as GGUF; `meta` adds or replaces metadata (value None: leaves it out)."""
    config = json.loads((source / "config.json").read_text())
    arch = config["model_type"]
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocab = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    values: dict[str, Any] = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        f"{arch}.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(vocab) - 3),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    if config.get("head_dim"):
        values[f"{arch}.attention.key_length"] = config["head_dim"]
        values[f"{arch}.attention.value_length"] = config["head_dim"]
        values[f"{arch}.rope.dimension_count"] = config["head_dim"]
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**values, **meta}.items():
        add_value(writer, key, value)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in safetensors.numpy.load_file(source / "model.safetensors").items():
        if arch == "llama" and name.split(".")[-2] in heads:
            tensor = interleave(tensor, heads[name.split(".")[-2]])
        if gguf_name(name) not in skip:
            add_tensor(writer, gguf_name(name), np.ascontiguousarray(tensor), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if key.endswith("general.architecture"):
        writer.kv_data[0][key] = gguf.GGUFValue(value, gguf.GGUFValueType.STRING)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif value is not None:
        writer.add_string(key, value)


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray, kind: str) -> None:
    if kind == "q8_0" and tensor.ndim == 2:
        packed = gguf.quants.quantize(tensor, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    else:
        writer.add_tensor(name, tensor.astype(np.float16) if kind == "f16" and tensor.ndim == 2 else tensor)
