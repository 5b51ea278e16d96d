"""The transformers model of a checkpoint, in the precision that calibration computes in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ..runtime.errors import CheckpointError, InvalidArgumentError, OutOfMemoryError
from .layers import LM_HEAD
from .third_party import is_out_of_memory


def load_model(directory: Path, device: str, quantize_lm_head: bool) -> Any:
    """Return the model in float32 on a CPU, in its own type on a GPU; in evaluation mode, without gradients.

    quantize_lm_head : give lm_head a table of its own where it shares the embedding's, which stays as it is
    No code of the checkpoint is run and no pickle is read.
    raises CheckpointError when transformers cannot load it, InvalidArgumentError for a device that is not there
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    on = find_device(device)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(directory),
            dtype=torch.float32 if on.type == "cpu" else "auto",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
        model = model.to(on).eval().requires_grad_(False)
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemoryError(
                f"{directory}: the model does not fit into the memory of {device} in "
                f"{'float32' if on.type == 'cpu' else 'its own type'}; quantize it on a larger machine"
            ) from error
        raise CheckpointError(
            f"{directory}: transformers cannot load it ({error}); check that it opens the checkpoint on its own, or "
            "get it again"
        ) from error
    if quantize_lm_head and getattr(model.config, "tie_word_embeddings", False):
        untie(model)
    return model


def find_device(name: str) -> torch.device:
    """Return a device; InvalidArgumentError when this machine or this torch does not have it."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidArgumentError(
            f"--device {name}: this torch ({torch.__version__}) finds no CUDA device; use --device cpu"
        )
    try:
        return torch.device(name)
    except RuntimeError:
        raise InvalidArgumentError(f"--device {name!r} is not known; use cpu, cuda or cuda:1") from None


def untie(model: Any) -> None:
    """Give the output layer a copy of the embedding's table, and say so in the model's configuration."""
    head = model.get_submodule(LM_HEAD)
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    model.config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}
    model._tied_weights_keys = None


def stored_dtype(wanted: str, checkpoint_dtype: str) -> torch.dtype:
    """Return the type of what is not quantized: `wanted`, or with "auto" the checkpoint's own, float16 for blocks."""
    name = checkpoint_dtype if wanted == "auto" else wanted
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return torch.float16  # e.g. a GGUF file's own blocks
    return dtype


def round_floats(model: Any, quantized: set[str], dtype: torch.dtype) -> None:
    """Round what stays float (embeddings, norms, biases, layers left out) to the type it is going to be stored in.

    The model keeps its own type, so that it computes with exactly the stored values.
    """
    for name, parameter in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        if parameter.dtype != dtype and not (leaf == "weight" and module in quantized):
            parameter.data = parameter.data.to(dtype).to(parameter.dtype)


def read_config(directory: Path) -> dict[str, Any]:
    """Return a checkpoint's config.json."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_bytes())
    return config
