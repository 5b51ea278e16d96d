"""Every field of a TensorRT-LLM config.json that changes the model is understood, or refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.runtime.errors import CheckpointError


def rewritten(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))
    return path


def drop(*names: str) -> Callable[[dict[str, Any]], Any]:
    return lambda config: [config.pop(name) for name in names]


def put(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config.update(fields)


CHANGES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (put(architecture="GPTForCausalLM"), "architecture 'GPTForCausalLM', supported are LlamaForCausalLM, "),
    (put(architecture="MixtralForCausalLM"), "architecture 'MixtralForCausalLM'"),
    (drop("rotary_base"), "'rotary_base' is missing: ModelOpt"),
    (drop("hidden_act"), "'hidden_act' is None"),
    (put(hidden_act="relu"), "'hidden_act' is 'relu'.* supported: silu, "),
    (put(hidden_act="swiglu"), "'hidden_act' is 'swiglu'"),
    (drop("max_position_embeddings"), "'max_position_embeddings' is missing"),
    (put(hidden_size="64"), "'hidden_size' is '64'"),
    (put(head_size=None, hidden_size=66), "hidden_size 66 is not divisible by num_attention_heads 4"),
    (drop("position_embedding_type"), "'position_embedding_type' is 'learned_absolute'"),
    (put(position_embedding_type="rope_gptj"), "'position_embedding_type' is 'rope_gptj'"),
    (put(rotary_pct=0.5), "rotary_pct is 0.5, models of this type rotate whole heads"),
    (put(rotary_embedding_dim=16), "rotary_embedding_dim is 16, 32 of a head's 32 columns"),
    (put(rotary_scaling={"type": "dynamic", "factor": 2.0}), "dynamic"),
    (put(rotary_scaling=[1]), r"rotary_scaling is \[1\]"),
    (put(rotary_scaling={"rope_type": "default", "rope_theta": 5.0}), "rope_theta 5.0 and rotary_base is"),
    (put(qk_layernorm=True), "qk_layernorm is True, models of this type have no norms on q and k"),
    (put(attn_bias=False), "attn_bias is False, but 'transformer.layers.0.attention.qkv.bias' is there"),
    (put(mlp_bias=False), "mlp_bias is False, but"),
    (put(embedding_multiplier=12.0), "'embedding_multiplier' is 12.0"),
    (put(residual_multiplier=True), "'residual_multiplier' is True"),
    (put(use_logn_attn=True), "'use_logn_attn' is True, only False"),
    (put(lm_head_bias=True), "'lm_head_bias' is True"),
    (put(residual_mlp=True), "'residual_mlp' is True"),
    (put(is_pruned=True), "'is_pruned' is True"),
    (put(rmsnorm=False), "'rmsnorm' is False"),
    (
        put(runtime_defaults={"kv_cache_config": {"max_attention_window": [4]}}),
        "attention windows are not read",
    ),
    (put(runtime_defaults=[1]), "runtime_defaults is"),
    (put(enable_pos_shift=True), "'enable_pos_shift' is True"),
    (put(moe={"num_experts": 8}), "a mixture of experts"),
    (put(moe=[]), r"moe is \[\]"),
    (put(num_hidden_layers=3), r"'transformer.layers.2.attention.* needed for 3 layers"),
    (put(num_hidden_layers=1), r"'transformer.layers.1.* not known"),
    (put(num_key_value_heads=4), "attention.qkv.weight' has shape"),
    (put(vocab_size=321), "vocab_embedding.weight' has shape"),
    (put(frobnicate=1), "fields that plansmith does not know for this model: 'frobnicate' = 1"),
    (put(mapping=3), "mapping is 3"),
    (put(mapping={"world_size": 1, "tp_size": 2}), "world_size 1; supported are"),
    (put(mapping={"world_size": 2, "cp_size": 2}), "cp_size 2"),
    (put(mapping={"tp_size": 0}), "mapping: 'tp_size' is 0"),
    (put(mapping={"tp_size": 2}), "rank1.safetensors: is missing, config.json has a mapping of 2 ranks"),
    (put(use_parallel_embedding="yes"), "'use_parallel_embedding' is 'yes'"),
    (put(quantization=7), "quantization is 7"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_config_that_is_not_understood(change: Any, message: str, trtllm_llama: Path) -> None:
    open_checkpoint(trtllm_llama)
    rewritten(trtllm_llama, change)
    with pytest.raises(CheckpointError, match=message) as error:
        open_checkpoint(trtllm_llama)
    assert str(trtllm_llama) in str(error.value)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen2", put(attn_bias=False), "attn_bias is False"),
        ("qwen2", put(qwen_type="qwen2_moe"), "qwen_type is 'qwen2_moe'"),
        ("qwen3", put(attn_bias=True), "attn_bias is True, but .* is missing"),
        ("gemma2", drop("query_pre_attn_scalar"), "'query_pre_attn_scalar' is missing"),
        ("gemma3", drop("sliding_window_pattern"), "'sliding_window_pattern' is missing"),
        ("gemma3", drop("rope_local_base_freq"), "'rope_local_base_freq' is missing"),
        ("gemma3", put(sliding_window=None), "'sliding_window' is None"),
        ("phi3", put(longrope_scaling_short_factors=[1.0]), "scaled rotary embeddings"),
        ("phi3_longrope", drop("longrope_scaling_long_factors"), "long_factor"),
        (
            "phi3_longrope",
            drop("original_max_position_embeddings"),
            "'original_max_position_embeddings' is missing",
        ),
        ("phi3_longrope", put(longrope_long_mscale=1.1), "'longrope_long_mscale' is 1.1"),
        ("mistral", put(architecture="Qwen2ForCausalLM", attn_bias=True), "qkv.bias.* missing"),
    ],
)
def test_family_fields_that_are_not_understood(
    family: str, change: Any, message: str, trtllm_pairs: Any, tmp_path: Path
) -> None:
    source, out = trtllm_pairs(family)
    shutil.copytree(out, tmp_path / "t")
    rewritten(tmp_path / "t", change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "t", tokenizer=source)


def test_llama3_scaling_by_name_alone_has_the_numbers_of_that_stack(
    trtllm_pairs: Any, tmp_path: Path
) -> None:
    source, out = trtllm_pairs("llama3")
    shutil.copytree(out, tmp_path / "t")
    rewritten(tmp_path / "t", put(rotary_scaling={"type": "llama3"}, max_position_embeddings=65536))
    named = open_checkpoint(tmp_path / "t", tokenizer=source).spec
    full = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rewritten(tmp_path / "t", put(rotary_scaling={**full, "original_max_position_embeddings": 8192}))
    assert open_checkpoint(tmp_path / "t", tokenizer=source).spec == named
    assert named.ropes[0].inv_freq != open_checkpoint(out, tokenizer=source).spec.ropes[0].inv_freq


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_truncated_rank(cut: int, trtllm_llama: Path) -> None:
    path = trtllm_llama / "rank0.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"rank0.safetensors: "):
        open_checkpoint(trtllm_llama)


def test_damaged_config(trtllm_llama: Path) -> None:
    """Cut or with one byte changed, config.json is refused or means what it says; nothing else happens."""
    path = trtllm_llama / "config.json"
    text = path.read_bytes()
    rng = np.random.default_rng(3)
    refused = 0
    for _ in range(150):
        damaged = bytearray(text)
        damaged[rng.integers(len(text))] = rng.integers(32, 127)
        path.write_bytes(damaged)
        try:
            open_checkpoint(trtllm_llama).weights.get("layers.0.q.weight")
        except CheckpointError:
            refused += 1
    assert refused > 75
