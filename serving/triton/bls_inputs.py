"""A request of text as one of token ids: what `tensorrt_llm_bls` hands on under which name."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.errors import UnsupportedError
from .text_encoder import TextEncoder
from .text_tensors import Tensors

# Inputs of `preprocessing` -> what they are called here.
TEXT_INPUTS = {
    "QUERY": "text_input",
    "DECODER_QUERY": "decoder_text_input",
    "IMAGE_BYTES": "image_bytes_input",
    "IMAGE_URL": "image_url_input",
    "VIDEO_BYTES": "video_bytes_input",
    "REQUEST_OUTPUT_LEN": "max_tokens",
    "BAD_WORDS_DICT": "bad_words",
    "STOP_WORDS_DICT": "stop_words",
    "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
    "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
    "END_ID": "end_id",
    "PAD_ID": "pad_id",
    "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
}
# Outputs of `preprocessing` -> inputs of `tensorrt_llm`.
_ENCODED = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
}
# Handed on under another name; what is in neither table keeps its own.
_RENAMED = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "top_p_min": "runtime_top_p_min",
    "top_p_decay": "runtime_top_p_decay",
    "top_p_reset_ids": "runtime_top_p_reset_ids",
    "length_penalty": "len_penalty",
    "stream": "streaming",
}
_OWN = frozenset([*TEXT_INPUTS.values(), "num_draft_tokens", "use_draft_logits", "image_input", "stop"])


class BlsInputs:
    """Makes the engine's inputs of a request's. Any thread.

    encoder : with TEXT_INPUTS as its names
    """

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder

    def make(self, tensors: Tensors) -> dict[str, NDArray[Any]]:
        """Return the inputs of `tensorrt_llm`; those that say nothing are left out.

        tensors : [B, ...] by name
        raises : UnsupportedError for images, InvalidArgumentError and ShapeError naming the input
        """
        if "image_input" in tensors and tensors["image_input"].size:
            raise UnsupportedError(
                "image_input is of a multimodal model, and this engine takes text only; leave it out"
            )
        encoded = self._encoder.encode(tensors)
        inputs = {
            name: encoded[key] for key, name in _ENCODED.items() if key in encoded and encoded[key].size
        }
        if "end_id" not in tensors:  # the engine's own, which may be several
            del inputs["end_id"]
        if "decoder_text_input" in tensors:
            inputs["decoder_input_ids"] = encoded["DECODER_INPUT_ID"]
        is_batched = tensors["text_input"].ndim > 1
        for name, array in tensors.items():
            if name not in _OWN and array.size:
                inputs[_RENAMED.get(name, name)] = _on_the_wire(array, is_batched)
        return inputs


def _on_the_wire(array: NDArray[Any], is_batched: bool) -> NDArray[Any]:
    """Return a tensor as a client would send it: the configuration's reshape to a scalar undone."""
    return array.reshape(-1, 1) if is_batched and array.ndim == 1 else np.atleast_1d(array)


def first_flag(tensors: Tensors, name: str) -> bool:
    """Return the boolean that a request's first row has."""
    return first_number(tensors, name, 0) != 0


def first_number(tensors: Tensors, name: str, default: float) -> float:
    """Return the number that a request's first row has."""
    array = tensors.get(name)
    return default if array is None or not array.size else float(array.reshape(-1)[0])
