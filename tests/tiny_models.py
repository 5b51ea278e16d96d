"""Tiny random checkpoints of every family, made by transformers with every feature of the family on.

Weights are large enough that a forgotten bias, window, soft cap or rope scaling moves the logits far. The
vocabulary is 320: three special tokens, the 256 bytes, 61 merges; so a directory is a complete checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 320
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_MERGE_TEXT = (
    "the quick brown fox jumps over the lazy dog while the other animals stand there and think that this is "
    "the thing they should have done in the morning and the rest of the day "
) * 3

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "tie_word_embeddings": False,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * n for n in range(6)],
    "long_factor": [1.0 + 0.9 * n for n in range(6)],
}

# family -> (transformers' config class, model class, config fields)
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 32, "rms_norm_eps": 1e-5},
    ),
    "llama_linear": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
        },
    ),
    "llama3": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama_yarn": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 8.0,
                "beta_slow": 1.0,
            },
        },
    ),
    "mistral": (
        "MistralConfig",
        "MistralForCausalLM",
        {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 32, "sliding_window": 8},
    ),
    "qwen2": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
        },
    ),
    "qwen3": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {"head_dim": 32, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "query_pre_attn_scalar": 40,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "tie_word_embeddings": True,
        },
    ),
    "phi3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {
            "sliding_window": 8,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "phi3_longrope": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {**_LONGROPE, "partial_rotary_factor": 0.75},
        },
    ),
}

FAMILIES: tuple[str, ...] = tuple(_FAMILIES)


def make_tiny(
    family: str,
    path: str | Path,
    *,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Write a tiny random checkpoint of that family into the directory `path` and return it.

    dtype, max_shard_size : how the weights are saved ("bfloat16", "100KB" makes shards)
    overrides : fields of the family's transformers config, e.g. num_hidden_layers=3
    """
    import transformers

    config_class, model_class, fields = _FAMILIES[family]
    # A copy: transformers fills in the rope dictionary that it is given.
    config = getattr(transformers, config_class)(**json.loads(json.dumps({**_COMMON, **fields, **overrides})))
    model = getattr(transformers, model_class)(config)
    _randomize(model, norm_mean=0.0 if family.startswith("gemma") else 1.0, seed=seed)
    model.to(_torch_dtype(dtype)).save_pretrained(path, max_shard_size=max_shard_size)
    write_tokenizer(Path(path))
    return Path(path)


def _torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _randomize(model: Any, norm_mean: float, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(norm_mean + 0.3 * noise)
            else:
                parameter.copy_((0.4 if name.endswith("bias") else 0.2) * noise)
    model.tie_weights()


def write_tokenizer(path: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json of the 320-token byte-level BPE into the directory."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_MERGE_TEXT], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
