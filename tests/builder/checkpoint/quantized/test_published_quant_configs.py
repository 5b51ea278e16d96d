"""Quantization configs in the forms that published checkpoints have, each taken whole by its reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plansmith.builder.checkpoint.quantized import find_reader

_AWQ = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
_AWQ_LOADED = {  # as transformers 4 wrote it again
    **_AWQ,
    "backend": "autoawq",
    "do_fuse": False,
    "exllama_config": None,
    "fuse_max_seq_len": None,
    "modules_to_fuse": None,
}
_AWQ_TRANSFORMERS_5 = {
    **_AWQ,
    "backend": "auto",
    "desc_act": False,
    "sym": True,
    "act_group_aware": True,
    "meta": None,
    "tokenizer": None,
    "dataset": None,
    "damp_percent": 0.1,
    "true_sequential": True,
}
_AWQ_GPTQMODEL = {
    **_AWQ,
    "method": "awq",
    "format": "gemm",
    "checkpoint_format": "gemm",
    "pack_dtype": "int32",
    "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:5.0.0"]},
}
_GPTQ = {
    "batch_size": 1,
    "bits": 4,
    "block_name_to_quantize": None,
    "cache_block_outputs": True,
    "damp_percent": 0.01,
    "dataset": None,
    "desc_act": False,
    "exllama_config": {"version": 1},
    "group_size": 128,
    "max_input_length": None,
    "model_seqlen": None,
    "module_name_preceding_first_block": None,
    "modules_in_block_to_quantize": None,
    "pad_token_id": None,
    "quant_method": "gptq",
    "sym": True,
    "tokenizer": None,
    "true_sequential": True,
    "use_cuda_fp16": False,
    "use_exllama": True,
}
_AUTOGPTQ = {
    "bits": 4,
    "group_size": 128,
    "damp_percent": 0.1,
    "desc_act": False,
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
    "model_name_or_path": "model",
    "model_file_base_name": "model",
    "is_marlin_format": False,
    "quant_method": "gptq",
}
_GPTQMODEL = {
    "bits": 8,
    "checkpoint_format": "gptq",
    "desc_act": False,
    "dynamic": {"-:.*lm_head": {}},
    "group_size": 32,
    "lm_head": False,
    "meta": {
        "damp_auto_increment": 0.0025,
        "damp_percent": 0.01,
        "mse": 0.0,
        "quantizer": ["gptqmodel:1.7.4"],
        "static_groups": False,
        "true_sequential": True,
        "uri": "https://github.com/modelcloud/gptqmodel",
    },
    "pack_dtype": "int32",
    "quant_method": "gptq",
    "sym": True,
}
_FP8_BLOCKS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_AUTO_FP8 = {
    "activation_scheme": "static",
    "ignored_layers": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "fp8",
}


def _args(**change: Any) -> dict[str, Any]:
    args = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": 8,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "tensor",
        "symmetric": True,
        "type": "float",
    }
    return {**args, **change}


def _compressed(form: str, weights: dict[str, Any], inputs: Any, **change: Any) -> dict[str, Any]:
    group = {
        "input_activations": inputs,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    config = {
        "config_groups": {"group_0": group},
        "format": form,
        "global_compression_ratio": 1.46,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {
            "format": "dense",
            "global_sparsity": 0.14,
            "ignore": [],
            "registry_requires_subclass": False,
            "sparsity_structure": "unstructured",
            "targets": [],
        },
    }
    return {**config, **change}


_FP8_DYNAMIC = _compressed(
    "float-quantized",
    _args(strategy="channel"),
    _args(dynamic=True, strategy="token", observer=None),
    kv_cache_scheme=_args(),
)
_W8A8 = _compressed(
    "int-quantized",
    _args(strategy="channel", type="int"),
    _args(dynamic=True, strategy="token", type="int", observer="memoryless"),
)
_W4A16 = _compressed(
    "pack-quantized",
    _args(strategy="group", type="int", num_bits=4, group_size=128, actorder="weight"),
    None,
    version="0.9.4.20250407",
    transform_config={},
    quantization_status="compressed",
)
_NVFP4 = _compressed(
    "nvfp4-pack-quantized",
    _args(
        strategy="tensor_group", num_bits=4, group_size=16, scale_dtype="torch.float8_e4m3fn", zp_dtype=None
    ),
    _args(
        strategy="tensor_group",
        num_bits=4,
        group_size=16,
        dynamic="local",
        scale_dtype="torch.float8_e4m3fn",
        zp_dtype="torch.float8_e4m3fn",
    ),
)


@pytest.mark.parametrize(
    ("config", "producer", "kv"),
    [
        (_AWQ, "awq", "float"),
        (_AWQ_LOADED, "awq", "float"),
        (_AWQ_TRANSFORMERS_5, "awq", "float"),
        (_AWQ_GPTQMODEL, "awq", "float"),
        (_GPTQ, "gptq", "float"),
        (_AUTOGPTQ, "gptq", "float"),
        (_GPTQMODEL, "gptqmodel 1.7.4", "float"),
        (_FP8_BLOCKS, "fp8", "float"),
        (_AUTO_FP8, "fp8", "float"),
        (_FP8_DYNAMIC, "compressed-tensors", "fp8"),
        (_W8A8, "compressed-tensors", "float"),
        (_W4A16, "compressed-tensors 0.9.4.20250407", "float"),
        (_NVFP4, "compressed-tensors", "float"),
    ],
)
def test_of_config_json(config: dict[str, Any], producer: str, kv: str) -> None:
    reader = find_reader({"quantization_config": config}, Path("m"), None)
    assert reader is not None
    assert (reader.producer, reader.kv) == (producer, kv)


@pytest.mark.parametrize(
    ("quantization", "kv"),
    [
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}, "fp8"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}, "float"),
        (
            {
                "quant_algo": "NVFP4",
                "kv_cache_quant_algo": "FP8",
                "group_size": 16,
                "exclude_modules": ["lm_head"],
            },
            "fp8",
        ),
        (
            {
                "quant_algo": "W4A16_AWQ",
                "kv_cache_quant_algo": None,
                "group_size": 128,
                "has_zero_point": False,
                "pre_quant_scale": True,
                "exclude_modules": ["lm_head"],
            },
            "float",
        ),
    ],
)
def test_of_hf_quant_config(quantization: dict[str, Any], kv: str) -> None:
    side = {"producer": {"name": "modelopt", "version": "0.23.0rc1"}, "quantization": quantization}
    reader = find_reader({}, Path("m"), side)
    assert reader is not None
    assert (reader.producer, reader.kv) == ("modelopt 0.23.0rc1", kv)


@pytest.mark.parametrize("name", ["AwqConfig", "GPTQConfig", "FineGrainedFP8Config"])
def test_what_transformers_writes(name: str) -> None:
    import transformers

    config = getattr(transformers, name)(**({"bits": 4} if name == "GPTQConfig" else {}))
    written = json.loads(json.dumps(config.to_dict()))
    assert find_reader({"quantization_config": written}, Path("m"), None) is not None
