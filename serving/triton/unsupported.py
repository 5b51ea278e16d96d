"""Inputs of models and deployments that this engine does not run, refused by name with what to do instead.

An input that says nothing is no reason to refuse a request: one without elements, a length of 0, a mask that skips
nothing, and the decoder prompt of one token that the older preprocessing sends to every model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...runtime.errors import UnsupportedError
from .tensors import Inputs

_ENC_DEC = "of an encoder-decoder model, and this engine is decoder-only; put the prompt into input_ids"
_VISION = "of a multimodal model, and this engine takes tokens only; serve that model elsewhere"
_SPLIT = "of disaggregated serving, where one server computes prompts for another; this engine does both, leave it out"
_REFUSED = {
    "encoder_input_features": _ENC_DEC,
    "cross_attention_mask": _ENC_DEC,
    "prompt_embedding_table": "of prompt tuning, which this engine has not; use a LoRA adapter (lora_task_id)",
    "multimodal_embedding": _VISION,
    "mrope_rotary_cos_sin": _VISION,
    "context_phase_params": _SPLIT,
}
_REFUSED_IF_SET = {
    "encoder_output_lengths": _ENC_DEC,
    "skip_cross_attn_blocks": _ENC_DEC,
    "mrope_position_deltas": _VISION,
    "prompt_vocab_size": "of prompt tuning, which this engine has not; leave it out",
    "prompt_table_extra_ids": (
        "of prompt tuning, which this engine has not; leave it out or send zeros, and keep prefixes apart by cache_salt"
    ),
}
_REQUEST_TYPE = "context_and_generation"


def refuse_unsupported(inputs: Inputs, parameters: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for the first input or request parameter that asks for what this engine has not."""
    for name, why in _REFUSED.items():
        if name in inputs:
            raise UnsupportedError(f"{name} is {why}")
    for name, why in _REFUSED_IF_SET.items():
        if any(any(inputs.integers(name, row) or ()) for row in range(inputs.num_rows)):
            raise UnsupportedError(f"{name} is {why}")
    for row in range(inputs.num_rows):
        prompt = inputs.row("decoder_input_ids", row)
        if prompt is not None and prompt.size > 1:
            raise UnsupportedError(f"decoder_input_ids has {prompt.size} tokens; it is {_ENC_DEC}")
    wanted = parameters.get("request_type", _REQUEST_TYPE)
    if wanted != _REQUEST_TYPE:
        raise UnsupportedError(
            f"the request parameter request_type is {wanted!r}, {_REQUEST_TYPE} alone is served"
        )
