"""Checkpoints that are quantized already: one reader a format, each giving schemes, codes and scales as they are."""

from __future__ import annotations

from .registry import QUANT_CONFIG, QUANT_FIELDS, find_reader
from .source import QuantizedWeights, untie_quantized_head

__all__ = ["QUANT_CONFIG", "QUANT_FIELDS", "QuantizedWeights", "find_reader", "untie_quantized_head"]
