"""Writes a simulated model in the unified Hugging Face form: ModelOpt's export, and what it leaves out."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..runtime.errors import InternalError
from ..runtime.tokenizer import FILES as TOKENIZER_FILES
from .layers import LM_HEAD
from .model import read_config
from .simulate import SimulatedModel, quantized_names

INT8_MAX = 127.0

# Of a quantized layer, by the last part of its tensor's name.
_SCALES = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "k_scale", "v_scale")


def write_checkpoint(simulated: SimulatedModel, directory: Path) -> dict[str, Any]:
    """Write safetensors, config.json, hf_quant_config.json and the tokenizer's files; return hf_quant_config.json.

    directory : exists; files of the same names are replaced
    The model's weights are packed in place.
    """
    from modelopt.torch.export import export_hf_checkpoint

    model, plan = simulated.model, simulated.plan
    int8_kv = plan.options.kv_cache == "int8"
    extra = _take_int8_kv_scales(model) if int8_kv else {}
    quantized = quantized_names(model)
    with _stored_as(model, quantized, simulated.dtype):
        export_hf_checkpoint(
            model, dtype=next(model.parameters()).dtype, export_dir=directory, extra_state_dict=extra
        )
    untied = LM_HEAD in quantized and plan.checkpoint.spec.tie_embeddings
    quant = json.loads((directory / "hf_quant_config.json").read_text(encoding="utf-8"))
    _write_configs(simulated, directory, quant, int8_kv, untied)
    _copy_tokenizer(simulated, directory)
    return dict(quant)


@contextlib.contextmanager
def _stored_as(model: Any, quantized: set[str], dtype: torch.dtype) -> Iterator[None]:
    """Let save_pretrained inside the block store unquantized weights as `dtype`, which they are rounded to already."""
    original = model.save_pretrained

    def save(directory: Any, state_dict: dict[str, torch.Tensor], **options: Any) -> None:
        stored = {name: _stored(name, one, quantized, dtype) for name, one in state_dict.items()}
        original(directory, state_dict=stored, **options)

    model.save_pretrained = save
    try:
        yield
    finally:
        del model.save_pretrained


def _stored(name: str, value: torch.Tensor, quantized: set[str], dtype: torch.dtype) -> torch.Tensor:
    module, _, leaf = name.rpartition(".")
    if leaf in _SCALES or (leaf == "weight" and module in quantized) or not value.is_floating_point():
        return value
    return value.to(dtype)


def _take_int8_kv_scales(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of an INT8 KV cache, and take its quantizers off: ModelOpt's export knows no such cache."""
    scales: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        for one in ("k", "v"):
            quantizer = getattr(module, f"{one}_bmm_quantizer", None)
            if quantizer is not None and quantizer.is_enabled:
                scales[f"{name}.{one}_proj.{one}_scale"] = quantizer.amax.float().reshape(()).cpu() / INT8_MAX
                quantizer.disable()
                quantizer.reset_amax()
    if not scales:
        raise InternalError("no attention of this model has quantizers of K and V")
    return scales


def _write_configs(
    simulated: SimulatedModel, directory: Path, quant: dict[str, Any], int8_kv: bool, untied: bool
) -> None:
    """Write the source's own config.json with what is different now, and name an INT8 KV cache in both files."""
    written = read_config(directory)
    config = copy.deepcopy(simulated.facts["source_config"])
    config.pop("dtype", None)
    config["torch_dtype"] = str(simulated.dtype).removeprefix("torch.")
    config["quantization_config"] = written["quantization_config"]
    if untied:
        config["tie_word_embeddings"] = False
    if int8_kv:
        quant["quantization"]["kv_cache_quant_algo"] = "INT8"
        config["quantization_config"]["kv_cache_scheme"] = "INT8"  # as ModelOpt names what is not FP8
        _write(directory / "hf_quant_config.json", quant)
    _write(directory / "config.json", config)


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _copy_tokenizer(simulated: SimulatedModel, directory: Path) -> None:
    """Put the source's own tokenizer files, chat template and generation_config.json in place of what others wrote."""
    files = simulated.plan.checkpoint.tokenizer_files()
    for name in TOKENIZER_FILES:
        (directory / name).unlink(missing_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
