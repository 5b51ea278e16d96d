"""What this engine does not run is refused by name; what says nothing is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from plansmith.runtime.errors import UnsupportedError
from plansmith.serving.triton.tensors import Inputs
from plansmith.serving.triton.unsupported import refuse_unsupported

PROMPT = np.array([[1, 2, 3]], np.int32)

ASKS: list[tuple[str, Any]] = [
    ("encoder_input_features", np.ones((1, 4, 2), np.float16)),
    ("encoder_output_lengths", np.array([[4]], np.int32)),
    ("decoder_input_ids", np.array([[1, 2]], np.int32)),
    ("cross_attention_mask", np.ones((1, 2, 2), np.bool_)),
    ("skip_cross_attn_blocks", np.array([[True]])),
    ("prompt_embedding_table", np.ones((1, 2, 8), np.float16)),
    ("prompt_vocab_size", np.array([[8]], np.int32)),
    ("prompt_table_extra_ids", np.array([[0, 0, 7]], np.uint64)),
    ("multimodal_embedding", np.ones((1, 2, 8), np.float32)),
    ("mrope_rotary_cos_sin", np.ones((1, 8), np.float32)),
    ("mrope_position_deltas", np.array([[3]], np.int64)),
    ("context_phase_params", np.ones((1, 8), np.uint8)),
]

SAYS_NOTHING: list[tuple[str, Any]] = [
    ("encoder_input_features", np.ones((1, 0, 2), np.float16)),
    ("encoder_output_lengths", np.array([[0]], np.int32)),
    ("decoder_input_ids", np.array([[50256]], np.int32)),
    ("decoder_input_lengths", np.array([[1]], np.int32)),
    ("cross_attention_mask", np.ones((1, 0, 0), np.bool_)),
    ("skip_cross_attn_blocks", np.array([[False]])),
    ("prompt_embedding_table", np.ones((1, 0, 0), np.float16)),
    ("prompt_vocab_size", np.array([[0]], np.int32)),
    ("prompt_table_extra_ids", np.zeros((1, 3), np.uint64)),
    ("mrope_position_deltas", np.array([[0]], np.int64)),
    ("context_phase_params", np.ones((1, 0), np.uint8)),
]


def refuse(tensors: dict[str, Any], **parameters: Any) -> None:
    refuse_unsupported(Inputs({"input_ids": PROMPT} | tensors, parameters), parameters)


@pytest.mark.parametrize(("name", "array"), ASKS, ids=lambda x: x if isinstance(x, str) else "")
def test_what_asks_for_another_model_is_refused_by_name(name: str, array: Any) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{name} (is|has) .*(;|,) \w+"):
        refuse({name: array})


@pytest.mark.parametrize(("name", "array"), SAYS_NOTHING, ids=lambda x: x if isinstance(x, str) else "")
def test_what_says_nothing_is_let_through(name: str, array: Any) -> None:
    refuse({name: array})


def test_one_row_of_a_batch_is_enough() -> None:
    tensors = {"input_ids": np.ones((2, 3), np.int32), "encoder_output_lengths": np.array([0, 4], np.int32)}
    with pytest.raises(UnsupportedError, match="encoder_output_lengths"):
        refuse_unsupported(Inputs(tensors, {}), {})


def test_only_whole_requests_are_served() -> None:
    refuse({}, request_type="context_and_generation")
    for kind in ("context_only", "generation_only", "else", 3):
        with pytest.raises(UnsupportedError, match=r"request_type is .*context_and_generation alone"):
            refuse({}, request_type=kind)
