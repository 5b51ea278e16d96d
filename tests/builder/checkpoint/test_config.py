"""config.json: defaults, old and new forms, published files, and an error for each field that is wrong or unknown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.checkpoint.config import HARMLESS
from plansmith.builder.checkpoint.families import FAMILIES as READERS
from plansmith.builder.checkpoint.hf_dir import read_spec
from plansmith.runtime.errors import CheckpointError
from tiny_models import FAMILIES, make_tiny

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TinyCheckpoint = Callable[[str], Path]


def hf_logits(path: Path) -> torch.Tensor:
    ids = torch.tensor([np.random.default_rng(7).integers(3, 320, 40).tolist()])
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
        logits: torch.Tensor = model(ids).logits
        return logits


_CONFIG_CLASSES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "gemma2": transformers.Gemma2Config,
    "gemma3_text": transformers.Gemma3TextConfig,
    "phi3": transformers.Phi3Config,
}


@pytest.mark.parametrize("model_type", _CONFIG_CLASSES)
def test_defaults_equal_transformers(model_type: str) -> None:
    """A field left out of config.json means what transformers' class says, and none of its fields is forgotten."""
    defaults = READERS[model_type].defaults
    fields = {
        name: field.default
        for name, field in _CONFIG_CLASSES[model_type].__dataclass_fields__.items()
        if field.init and name not in transformers.PreTrainedConfig.__dataclass_fields__
    }
    for name, value in defaults.items():
        if name != "sliding_window_pattern":  # an argument of Gemma 3's class, 6 by default, no field
            assert fields[name] == value, name
    left = {n for n, v in fields.items() if v is not None and n not in defaults and n not in HARMLESS}
    assert left <= {"pretraining_tp", "use_bidirectional_attention"}  # checked to have no effect


# Older config.json forms, each written as its checkpoints have it, against the transformers-5 form.


def rewritten(source: Path, dest: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    dest.mkdir()
    for file in source.iterdir():
        (dest / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    change(config)
    (dest / "config.json").unlink()
    (dest / "config.json").write_text(json.dumps(config))
    return dest


def _old_flat(config: dict[str, Any]) -> None:
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["partial_rotary_factor"] = rope.pop("partial_rotary_factor", 1.0)
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")


def _old_gemma3(config: dict[str, Any]) -> None:
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["full_attention"]["rope_theta"]
    config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    config["rope_scaling"] = {"rope_type": "linear", "factor": rope["full_attention"]["factor"]}
    config.pop("layer_types")
    config["sliding_window_pattern"] = 3
    config["cache_implementation"] = "hybrid"


@pytest.mark.parametrize("family", FAMILIES)
def test_old_config_forms(family: str, tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    new = tiny_checkpoint(family)
    old = rewritten(new, tmp_path / "old", _old_gemma3 if family == "gemma3" else _old_flat)
    assert open_checkpoint(old).spec == open_checkpoint(new).spec
    torch.testing.assert_close(hf_logits(old), hf_logits(new))  # transformers reads the old form alike


def test_phi3_su_and_official_code_names(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        _old_flat(config)
        config["rope_scaling"]["type"] = "su"
        config["rope_scaling"].pop("original_max_position_embeddings")
        config["auto_map"] = {
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        }

    new = tiny_checkpoint("phi3_longrope")
    assert open_checkpoint(rewritten(new, tmp_path / "su", change)).spec == open_checkpoint(new).spec


def test_missing_fields_take_the_defaults(tmp_path: Path) -> None:
    """Gemma 2 with only what has no default: soft caps of 50 and 30, and the layers alternate."""
    path = make_tiny("gemma2", tmp_path / "m", attn_logit_softcapping=50.0, final_logit_softcapping=30.0)

    def change(config: dict[str, Any]) -> None:
        for name in ("attn_logit_softcapping", "final_logit_softcapping", "layer_types", "rope_parameters"):
            del config[name]

    bare = rewritten(path, tmp_path / "bare", change)
    assert open_checkpoint(bare).spec == open_checkpoint(path).spec
    torch.testing.assert_close(hf_logits(bare), hf_logits(path))


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["dynamic", "yarn"]),
        ("llama", {"rope_parameters": {"rope_type": "spiral"}}, ["spiral", "llama3"]),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, ["linear", "factor"]),
        ("llama", {"rope_parameters": {"rope_type": "default", "sparkle": 1}}, ["sparkle"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ("llama", {"rope_parameters": {"rope_theta": "big"}}, ["rope_theta", "big"]),
        ("llama", {"rope_parameters": {"rope_theta": 10**400}}, ["rope_theta"]),
        ("llama", {"hidden_act": "relu"}, ["hidden_act", "relu", "silu", "gelu_pytorch_tanh"]),
        ("llama", {"pretraining_tp": 2}, ["pretraining_tp", "2", "1"]),
        ("llama", {"is_encoder_decoder": True}, ["is_encoder_decoder", "True"]),
        ("llama", {"clip_qkv": 8.0, "logit_scale": 0.1}, ["clip_qkv", "8.0", "logit_scale"]),
        ("llama", {"num_key_value_heads": 3}, ["num_attention_heads", "4", "3"]),
        ("llama", {"hidden_size": "wide"}, ["hidden_size", "wide", "integer"]),
        ("llama", {"num_hidden_layers": 1001}, ["num_hidden_layers", "1001", "an integer from 1 to 1000"]),
        ("mistral", {"num_hidden_layers": 65535}, ["num_hidden_layers", "an integer from 1 to 1000"]),
        ("phi3", {"num_hidden_layers": 65535}, ["num_hidden_layers", "an integer from 1 to 1000"]),
        ("llama", {"hidden_size": 10**400}, ["'hidden_size' is 10000", "0..., it must be"]),
        ("llama", {"hidden_size": True}, ["hidden_size", "True"]),
        ("llama", {"rms_norm_eps": 0}, ["rms_norm_eps", "0"]),
        ("llama", {"rms_norm_eps": 1e40}, ["rms_norm_eps", "1e+40"]),
        ("llama", {"attention_bias": None}, ["attention_bias", "true or false"]),
        ("llama", {"eos_token_id": [-3]}, ["eos_token_id", "-3"]),
        ("llama", {"head_dim": 15}, ["15", "even"]),
        ("llama", {"layer_types": ["full_attention"]}, ["layer_types", "1 entries", "2"]),
        ("llama", {"layer_types": ["full_attention", "mamba"]}, ["layer 1", "mamba"]),
        (
            "llama",
            {"architectures": ["LlamaForSequenceClassification"]},
            ["SequenceClassification", "CausalLM"],
        ),
        ("llama", {"auto_map": {"AutoModel": "evil.Model"}}, ["auto_map", "evil.Model", "never run"]),
        ("llama", {"quantization_config": {"quant_method": "hqq"}}, ["quantized with 'hqq'", "--precision"]),
        ("llama", {"num_local_experts": 8}, ["mixture of experts", "num_local_experts"]),
        ("llama", {"model_type": "qwen2_moe"}, ["mixture of experts", "qwen2_moe"]),
        ("llama", {"model_type": "mixtral"}, ["mixture of experts", "mixtral"]),
        ("llama", {"model_type": "gpt2"}, ["gpt2", "llama", "phi3"]),
        ("llama", {"model_type": "gemma3", "text_config": {}}, ["gemma3", "vision", "text-only"]),
        ("llama", {"model_type": None}, ["model_type", "None"]),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "Ministral"]),
        ("qwen2", {"use_mrope": True}, ["use_mrope", "True", "False"]),
        ("qwen2", {"use_sliding_window": False}, ["sliding_attention", "sliding_window"]),
        ("gemma2", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("gemma2", {"hidden_activation": None}, ["hidden_activation", "None"]),
        ("gemma3", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        ("gemma3", {"rope_parameters": {"rope_theta": 1.0}}, ["rope_parameters", "full_attention"]),
        ("gemma3", {"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, ["full_attention", "dynamic"]),
        ("phi3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ["linear", "longrope"]),
        ("phi3", {"partial_rotary_factor": 0.7, "rope_parameters": None}, ["11", "even", "0.7"]),
        ("phi3_longrope", {"original_max_position_embeddings": 1}, ["original_max_position_embeddings"]),
        (
            "phi3_longrope",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            ["short_factor", "1 numbers", "8"],
        ),
    ],
)
def test_config_errors(
    family: str, change: dict[str, Any], words: list[str], tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    path = rewritten(tiny_checkpoint(family), tmp_path / "bad", lambda config: config.update(change))
    with pytest.raises(CheckpointError) as e:
        open_checkpoint(path)
    assert "config.json" in str(e.value)
    for word in words:
        assert word in str(e.value)


def test_harmless_fields_are_let_through(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config.update(
            use_cache=False, attention_dropout=0.1, temperature=0.7, _name_or_path="x", id2label=None
        )
        config.update(
            pretraining_tp=1, rope_interleaved=False, is_llama_config=True, quantization_config=None
        )

    path = rewritten(tiny_checkpoint("llama"), tmp_path / "ok", change)
    assert open_checkpoint(path).spec == open_checkpoint(tiny_checkpoint("llama")).spec


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats()
    | st.sampled_from(["", "x", "yarn"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "a"]), inner),
    max_leaves=4,
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # overflows in absurd rope parameters
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_of_any_field_is_read_or_a_checkpoint_error(
    family: str, data: st.DataObject, tiny_checkpoint: TinyCheckpoint
) -> None:
    config = json.loads((tiny_checkpoint(family) / "config.json").read_text())
    names = [*config, "rope_scaling", "rope_theta", "partial_rotary_factor", "num_experts", "auto_map"]
    target = config
    rope = config["rope_parameters"]
    if data.draw(st.booleans()):
        target = rope.get("full_attention", rope)
        names = list(target)
    name = data.draw(st.sampled_from(names))
    if data.draw(st.booleans()):
        target[name] = data.draw(_JSON)
    else:
        target.pop(name, None)
    try:
        spec, _ = read_spec(config, "config.json", 0)
    except CheckpointError as e:
        assert "config.json" in str(e)
    else:
        assert len(spec.layers) == spec.num_layers
        assert all(len(rope.inv_freq) == rope.rotary_dim // 2 for rope in spec.ropes)


def test_inconsistent_gemma2_windows(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    same = rewritten(tiny_checkpoint("gemma2"), tmp_path / "a", lambda c: c.update(sliding_window_size=8))
    assert open_checkpoint(same).spec == open_checkpoint(tiny_checkpoint("gemma2")).spec
    other = rewritten(tiny_checkpoint("gemma2"), tmp_path / "b", lambda c: c.update(sliding_window_size=9))
    with pytest.raises(CheckpointError, match="sliding_window_size is 9"):
        open_checkpoint(other)
