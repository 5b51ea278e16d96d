"""Tiny quantized checkpoints: ModelOpt's, made by ModelOpt, and others written tensor by tensor."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import make_tiny, write_tokenizer

Array = Any
GROUP = 32  # inputs of a group: 64 and 96, the tiny models' sizes, are multiples

# ModelOpt's own configuration of each recipe that it has.
PRESETS = {
    "fp8": "FP8_DEFAULT_CFG",
    "fp8_per_channel": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "int8_sq": "INT8_SMOOTHQUANT_CFG",
    "int8_wo": "INT8_WEIGHT_ONLY_CFG",
    "int4_awq": "INT4_AWQ_CFG",
    "int4_wo": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    "w4a8_awq": "W4A8_AWQ_BETA_CFG",
    "nvfp4": "NVFP4_DEFAULT_CFG",
    "nvfp4_wo": "W4A16_NVFP4_CFG",
}
RECIPES = tuple(PRESETS)  # NVFP4 with AWQ's search needs a GPU


@dataclasses.dataclass(frozen=True)
class Simulated:
    """What ModelOpt computes with for a layer.

    weight : (N, K) float32, rounded by its quantizer
    pre_scale : what the input is multiplied by before, None without
    input_amax : of a static input, None without
    """

    weight: Array
    pre_scale: Array | None
    input_amax: float | None


def make_modelopt(
    recipe: str,
    path: Path,
    family: str = "llama",
    *,
    kv: str | None = None,
    edit: Callable[[dict[str, Any]], None] | None = None,
    **overrides: Any,
) -> tuple[Path, dict[str, Simulated]]:
    """Write a tiny model that ModelOpt quantized; return its directory and what ModelOpt's simulation has.

    recipe : one of RECIPES, or "none" for a quantized KV cache alone
    kv : "FP8" to quantize the KV cache besides
    edit : changes the configuration of ModelOpt
    """
    import modelopt.torch.quantization as mtq
    import torch
    import transformers
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers

    plain = make_tiny(family, path.parent / f"{path.name}_plain", **overrides)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    config = _modelopt_config(recipe, kv)
    if edit is not None:
        edit(config)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 320, (4, 24), generator=generator)

    def loop(m: Any) -> None:
        with torch.inference_mode():
            m(prompts)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = mtq.quantize(model, config, loop)
        twin = copy.deepcopy(model)
        with torch.inference_mode():
            requantize_resmooth_fused_llm_layers(twin)
            simulated = _simulated(twin)
            export_hf_checkpoint(model, export_dir=path)
    write_tokenizer(path)
    shutil.rmtree(plain)
    return path, simulated


def _modelopt_config(recipe: str, kv: str | None) -> dict[str, Any]:
    import modelopt.torch.quantization as mtq

    if recipe == "none":
        config: dict[str, Any] = {"quant_cfg": [{"quantizer_name": "*", "enable": False}], "algorithm": "max"}
    else:
        config = copy.deepcopy(getattr(mtq, PRESETS[recipe]))
    if "int4" in recipe or "w4a8" in recipe:
        config = _with_group(config)
    if kv is not None:
        config["quant_cfg"] += copy.deepcopy(getattr(mtq, f"{kv}_KV_CFG")["quant_cfg"])
    return config


def _with_group(value: Any) -> Any:
    """Return the configuration with int4 blocks of GROUP in place of 128."""
    if isinstance(value, dict):
        return {key: GROUP if key == -1 and one == 128 else _with_group(one) for key, one in value.items()}
    return [_with_group(one) for one in value] if isinstance(value, list) else value


def _simulated(model: Any) -> dict[str, Simulated]:
    found = {}
    for name, module in model.named_modules():
        quantizer = getattr(module, "weight_quantizer", None)
        if quantizer is None or not quantizer.is_enabled:
            continue
        weight = _simulated_weight(module)
        pre_scale = getattr(module.input_quantizer, "_pre_quant_scale", None)
        amax = getattr(module.input_quantizer, "_amax", None) if module.input_quantizer.is_enabled else None
        found[name] = Simulated(
            weight.numpy().astype(np.float32),
            None if pre_scale is None else pre_scale.squeeze().numpy(),
            None if amax is None else float(amax),
        )
    return found


def _simulated_weight(module: Any) -> Any:
    import torch
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    quantizer = module.weight_quantizer
    if getattr(quantizer, "num_bits", None) != (2, 1):  # W4A8 has two quantizers in sequence
        return quantizer(module.weight).detach()
    # ModelOpt simulates NVFP4 on GPUs alone; its own packing and unpacking run anywhere.
    outer = NVFP4QTensor.get_weights_scaling_factor_2_from_quantizer(quantizer)
    scale, _ = NVFP4QTensor.get_weights_scaling_factor_from_quantizer(quantizer, module.weight, outer)
    packed = NVFP4QTensor.quantize(module.weight.detach().clone(), 16, scale, outer)[0]
    return packed.dequantize(torch.float32, scale=scale, double_scale=outer, block_sizes={-1: 16})


def rewrite(
    path: Path, change: Callable[[dict[str, Any]], None], config: dict[str, Any] | None = None
) -> None:
    """Change a checkpoint's tensors (numpy arrays and torch tensors by name) and fields of its config.json."""
    import torch
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    tensors: dict[str, Any] = load_file(file)
    change(tensors)
    as_torch = {
        name: torch.from_numpy(np.array(one, order="C")) if isinstance(one, np.ndarray) else one.contiguous()
        for name, one in tensors.items()
    }
    save_file(as_torch, file)
    if config is not None:
        edit_json(path / "config.json", lambda data: data.update(config))


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a JSON object in its file."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def linear_names(tensors: dict[str, Any]) -> list[str]:
    """Return the names of the linear layers in the decoder's blocks."""
    return [name.removesuffix(".weight") for name in tensors if name.endswith("proj.weight")]
