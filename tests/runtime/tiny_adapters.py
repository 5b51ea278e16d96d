"""Adapters of the tiny checkpoints, written by hand as PEFT does, and transformers' models with them merged in."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
PREFIX = "base_model.model."


def load_model(checkpoint: Path) -> Any:
    """Return transformers' float32 model."""
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@dataclasses.dataclass
class TinyAdapter:
    """A and B by module name ("model.layers.0.self_attn.q_proj"), and the factor on B A of each module."""

    a: dict[str, torch.Tensor]
    b: dict[str, torch.Tensor]
    scales: dict[str, float]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors as PEFT names them."""
        sides = [("A", self.a), ("B", self.b)]
        return {f"{PREFIX}{m}.lora_{side}.weight": t for side, all_ in sides for m, t in all_.items()}

    def merged(self, model: Any) -> Any:
        """Return a copy of the model with W + scale B A for every W."""
        merged = copy.deepcopy(model)
        modules = dict(merged.named_modules())
        with torch.no_grad():
            for name, scale in self.scales.items():
                delta = scale * (self.b[name].double() @ self.a[name].double())
                modules[name].weight += delta.to(modules[name].weight.dtype)
        return merged


def make_adapter(
    model: Any,
    targets: Sequence[str],
    *,
    r: int = 8,
    ranks: Mapping[str, int] | None = None,
    scale: float = 2.0,
    scales: Mapping[str, float] | None = None,
    dtype: torch.dtype = torch.float32,
    layers: Sequence[int] | None = None,
    seed: int = 0,
) -> TinyAdapter:
    """Return a random adapter, large enough to change every token.

    ranks, scales : by the end of a module's name, where they differ from r and scale
    """
    generator = torch.Generator().manual_seed(seed)
    adapter = TinyAdapter({}, {}, {})
    for name, module in model.named_modules():
        wanted = name.rpartition(".")[2] in targets and isinstance(module, torch.nn.Linear)
        if not wanted or (layers is not None and int(name.split(".")[2]) not in layers):
            continue
        rank = next((n for end, n in (ranks or {}).items() if name.endswith(end)), r)
        adapter.scales[name] = next((s for end, s in (scales or {}).items() if name.endswith(end)), scale)
        a = torch.randn(rank, module.in_features, generator=generator) / math.sqrt(module.in_features)
        b = torch.randn(module.out_features, rank, generator=generator) * 0.4
        adapter.a[name], adapter.b[name] = a.to(dtype), b.to(dtype)
    assert adapter.a
    return adapter


def write_adapter(path: Path, adapter: TinyAdapter, **fields: Any) -> Path:
    """Write a PEFT directory; the defaults are r 8 and lora_alpha 16, a factor of 2."""
    path.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in adapter.tensors().items()}, path / "adapter_model.safetensors")
    write_config(path, **fields)
    return path


def write_config(path: Path, **fields: Any) -> None:
    """Write adapter_config.json with what PEFT 0.17 has in it."""
    config: dict[str, Any] = {
        "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": "tiny", "bias": "none",
        "corda_config": None, "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False,
        "inference_mode": True, "init_lora_weights": True, "layer_replication": None, "layers_pattern": None,
        "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 16, "lora_bias": False, "lora_dropout": 0.05,
        "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA",
        "qalora_group_size": 16, "r": 8, "rank_pattern": {}, "revision": None, "target_modules": list(ALL),
        "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_dora": False,
        "use_qalora": False, "use_rslora": False,
    }  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({**config, **fields}, indent=2))


def write_arrays(path: Path, adapter: TinyAdapter, ids: Mapping[str, int], dtype: type = np.float32) -> Path:
    """Write the older stack's pair of files: the factor is in B, rows are padded to one length.

    ids : module id by the last part of a module's name
    """
    rows, config = [], []
    for name, scale in adapter.scales.items():
        a, b = adapter.a[name].float().numpy(), adapter.b[name].float().numpy() * np.float32(scale)
        rows.append(np.concatenate([a.ravel(), b.ravel()]).astype(dtype))
        config.append((ids[name.rpartition(".")[2]], int(name.split(".")[2]), len(a)))
    width = max(map(len, rows))
    weights = np.stack([np.pad(row, (0, width - len(row))) for row in rows])
    path.mkdir(parents=True, exist_ok=True)
    np.save(path / "model.lora_weights.npy", weights[None])
    np.save(path / "model.lora_config.npy", np.array(config, np.int32)[None])
    return path


def greedy(model: Any, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], np.ndarray]:
    """Return transformers' greedy tokens and the log-probability of each."""
    ids, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(max_tokens):
            row = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].double(), -1)
            ids.append(int(row.argmax()))
            logprobs.append(float(row.max()))
    return ids[len(prompt) :], np.array(logprobs)
