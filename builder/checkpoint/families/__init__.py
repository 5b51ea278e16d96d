"""The model families that can be compiled, one module each; a family is data, not code paths elsewhere."""

from __future__ import annotations

from . import gemma2, gemma3, llama, mistral, phi3, qwen2, qwen3
from .common import Family, GgufForm, Part

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY for module in (llama, mistral, qwen2, qwen3, gemma2, gemma3, phi3)
}

__all__ = ["FAMILIES", "Family", "GgufForm", "Part"]
