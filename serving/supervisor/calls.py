"""Which models call others, by their configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ENGINE_KEY = "tensorrt_llm_model_name"
_KEYS = (_ENGINE_KEY, "tensorrt_llm_draft_model_name")
_ENGINE = "tensorrt_llm"


def steps(config: Mapping[str, Any]) -> list[str]:
    """Return an ensemble's models; [] for others. config : as the server's JSON has it."""
    return [one["model_name"] for one in config.get("ensemble_scheduling", {}).get("step", ())]


def called_by_code(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the models that a model's program calls by itself, as tensorrt_llm_bls does."""
    given = config.get("parameters", {})
    texts = {key: str(given[key].get("string_value", "")).strip() for key in _KEYS if key in given}
    if _ENGINE_KEY in texts or str(config.get("name", "")).endswith("_bls"):
        texts[_ENGINE_KEY] = texts.get(_ENGINE_KEY) or _ENGINE
    return frozenset(text for text in texts.values() if text)
