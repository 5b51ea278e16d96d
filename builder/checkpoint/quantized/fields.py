"""A quantization config's fields: read once with their types, and none may be left over that says something."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..config import Config

# Of transformers' and the quantizers' own loaders: which kernels they pick, and how the weights were found.
_HARMLESS = """quant_method method meta backend exllama_config use_exllama do_fuse fuse_max_seq_len modules_to_fuse
    use_cuda_fp16 max_input_length disable_exllama dataset tokenizer batch_size damp_percent
    damp_auto_increment true_sequential static_groups cache_block_outputs block_name_to_quantize
    module_name_preceding_first_block model_seqlen pad_token_id model_name_or_path model_file_base_name
    inside_layer_modules modules_in_block_to_quantize act_group_aware mse hessian offload_to_disk
    mock_quantization parallel_packing gptaq v2 v2_alpha lm_head dequantize"""


def quant_fields(data: Mapping[str, Any], where: str) -> Config:
    """Return the fields that are set; a null is as good as none."""
    return Config({name: value for name, value in data.items() if value is not None}, where, {})


def finish(config: Config, harmless: Iterable[str] = ()) -> None:
    """Raise CheckpointError for fields that nobody read and that may change the weights' meaning."""
    config.finish([*_HARMLESS.split(), *harmless])


def first_name(config: Config, fields: Iterable[str], default: str) -> str:
    """Return the first of several fields that is set, in lower case: the names that one thing had over the years."""
    values = [value for field in fields if (value := config.raw(field)) is not None]
    return str(values[0]).lower() if values else default


def check_pack_dtype(config: Config) -> None:
    """Raise CheckpointError where codes are packed into other words than of 32 bits."""
    value = config.raw("pack_dtype")
    if value is not None and "int32" not in str(value):
        raise config.error(f"pack_dtype is {value!r}, read is 'int32'; pack it again with that")


def names(config: Config, *fields: str) -> tuple[str, ...]:
    """Return the names of one or several list fields."""
    found: list[str] = []
    for field in fields:
        value = config.raw(field)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise config.error(f"{field!r} is {value!r}, it must be a list of names; the file is damaged")
        found += value
    return tuple(found)


def flag(config: Config, name: str, default: bool) -> bool:
    """Return a boolean field, the default where it is absent."""
    return config.boolean(name) if config.has(name) else default


def is_listed(name: str, listed: Iterable[str]) -> bool:
    """Return whether a module, one that it is part of, or some of its dotted names in a row are in a list."""
    return any(f".{one}." in f".{name}." for one in listed)
