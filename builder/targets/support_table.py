"""What each compiler takes on each GPU, as one table.

Every cell of TensorRT-RTX is compiled by a test (tests/builder/targets/rtx/test_support_cells.py), those that say no
too. TensorRT 11's cells are what NVIDIA documents (support matrix and "Working with Quantized Types", 11.3); no test
compiles them, since that takes each GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

Need = Literal[
    "fp32",
    "fp16",
    "bf16",
    "int8_weights",
    "w8a8",
    "fp8_weights",
    "fp8",
    "fp8_channels",
    "fp8_blocks",
    "int4",
    "int4_zeros",
    "w4a8",
    "w4a8_int8",
    "nvfp4_weights",
    "nvfp4",
    "kv_fp8",
    "kv_int8",
]

WORDS: dict[Need, str] = {
    "fp32": "plans in float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "int8_weights": "INT8 weights",
    "w8a8": "INT8 products",
    "fp8_weights": "FP8 weights",
    "fp8": "FP8 products",
    "fp8_channels": "FP8 products with a scale a channel",
    "fp8_blocks": "FP8 products with scales by blocks",
    "int4": "INT4 weights",
    "int4_zeros": "INT4 weights with zero points",
    "w4a8": "INT4 weights with FP8 inputs",
    "w4a8_int8": "INT4 weights with INT8 inputs",
    "nvfp4_weights": "FP4 weights",
    "nvfp4": "FP4 products",
    "kv_fp8": "FP8 KV pools",
    "kv_int8": "INT8 KV pools",
}
"""What a recipe can need, in words for people."""


@dataclasses.dataclass(frozen=True)
class CompilerSupport:
    """What one compiler takes.

    is_tried : whether a test compiles every cell; the others are as documented
    cells : need -> compute capabilities
    """

    name: str
    is_tried: bool
    cells: Mapping[Need, frozenset[str]]


def _cells(**rows: str) -> dict[Need, frozenset[str]]:
    assert rows.keys() == WORDS.keys()
    return {need: frozenset(rows[need].split()) for need in WORDS}


_TURING_ON, _AMPERE_ON = "sm75 sm80 sm86 sm89 sm120", "sm80 sm86 sm89 sm120"
_ADA_ON, _BLACKWELL_ON = "sm89 sm120", "sm120"
_DATA_CENTER = "sm90 sm100 sm103"

SUPPORT: dict[str, CompilerSupport] = {
    "cpu": CompilerSupport("the cpu target", True, dict.fromkeys(WORDS, frozenset({"cpu"}))),
    "rtx": CompilerSupport(
        "TensorRT-RTX 1.7",
        True,
        _cells(
            fp32="",  # it would compile, but no GPU kernel of interest is float32
            fp16=_TURING_ON,
            bf16=_AMPERE_ON,
            int8_weights=_TURING_ON,
            w8a8=_TURING_ON,
            fp8_weights=_ADA_ON,
            fp8=_ADA_ON,
            fp8_channels=_ADA_ON,
            fp8_blocks=_ADA_ON,
            int4=_AMPERE_ON,
            int4_zeros=_AMPERE_ON,
            w4a8=_ADA_ON,
            w4a8_int8=_AMPERE_ON,
            nvfp4_weights=_BLACKWELL_ON,
            nvfp4=_BLACKWELL_ON,
            kv_fp8="",  # its cache op takes pools of floats
            kv_int8="",
        ),
    ),
    "tensorrt": CompilerSupport(
        "TensorRT 11",
        False,
        _cells(
            fp32="",
            fp16=f"{_TURING_ON} {_DATA_CENTER}",
            bf16=f"{_AMPERE_ON} {_DATA_CENTER}",
            int8_weights=f"{_TURING_ON} {_DATA_CENTER}",
            w8a8=f"{_TURING_ON} {_DATA_CENTER}",
            fp8_weights=f"{_ADA_ON} {_DATA_CENTER}",
            fp8=f"{_ADA_ON} {_DATA_CENTER}",
            fp8_channels=f"{_ADA_ON} {_DATA_CENTER}",
            fp8_blocks="",
            int4=f"{_AMPERE_ON} {_DATA_CENTER}",
            int4_zeros=f"{_AMPERE_ON} {_DATA_CENTER}",
            w4a8="",  # documented for weights alone
            w4a8_int8="",
            nvfp4_weights=f"{_BLACKWELL_ON} sm100 sm103",
            nvfp4=f"{_BLACKWELL_ON} sm100 sm103",
            kv_fp8=f"{_ADA_ON} {_DATA_CENTER}",  # read and written by our plugin; the type is an input's
            kv_int8=f"{_AMPERE_ON} {_DATA_CENTER}",
        ),
    ),
}
