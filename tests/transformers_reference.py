"""transformers' float32 logits of a checkpoint, its weights as a recipe holds them: what graphs and plans must give."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import transformers
from plansmith.builder.graph.quantize import dequantize, quantize_int4, quantize_int8
from plansmith.builder.precision import Precision, precision


def transformers_logits(
    path: Path, sequences: Sequence[Sequence[int]], recipe: str | Precision = "fp32"
) -> list[np.ndarray]:
    """Return each sequence's logits [tokens, V]; computed once for the same arguments."""
    held = precision(recipe) if isinstance(recipe, str) else recipe
    return _logits(path, tuple(map(tuple, sequences)), held)


@functools.cache
def _logits(path: Path, sequences: tuple[tuple[int, ...], ...], recipe: Precision) -> list[np.ndarray]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    hold_weights_as(model, recipe)
    with torch.no_grad():
        return [model(torch.tensor([s])).logits[0].numpy() for s in sequences]


def hold_weights_as(model: Any, recipe: Precision) -> None:
    """Replace the matrices of linear layers and embeddings by what the recipe stores, in float32."""
    modules = [m for m in model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Embedding)]
    head = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings())}
    for weight in {id(m.weight): m.weight for m in modules}.values():
        bits = recipe.head_bits if id(weight) in head else recipe.weight_bits
        w = weight.detach().numpy()
        if bits == 16:
            kind = torch.bfloat16 if recipe.name == "bf16" else torch.float16
            weight.data = weight.detach().to(kind).float()
        elif bits < 16:
            name = "lm_head" if id(weight) in head else "layers.0.q"
            group = recipe.scheme(name, w.shape[1]).weight_group
            kind = ml_dtypes.bfloat16 if recipe.scale_type == "bfloat16" else np.float32
            if bits == 8:
                rounded = quantize_int8(w, group, scale_dtype=kind)
            else:
                rounded = quantize_int4(w, group, signed=recipe.signed_scales, scale_dtype=kind)
            weight.data = torch.from_numpy(dequantize(*rounded))
