"""Shared by the tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny
from tiny_trtllm import write_trtllm
from trtllm_exports import SIZES, Exported

# What the format does not hold: windows, but for Gemma 3's, and Gemma 2's are those of its published models.
NO_WINDOW: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "gemma2": {"sliding_window": 4096},
    "phi3": {"sliding_window": None},
}


@pytest.fixture(scope="session")
def trtllm_pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Return family -> (Hugging Face directory, the same as TensorRT-LLM's); do not change the files."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(family: str) -> tuple[Path, Path]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            source = make_tiny(family, folder / "hf", **NO_WINDOW.get(family, {}))
            made[family] = source, write_trtllm(source, folder / "trtllm")
        return made[family]

    return get


@pytest.fixture
def trtllm_llama(trtllm_pairs: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> Path:
    """A copy of Llama's TensorRT-LLM directory, with the tokenizer beside it."""
    source, out = trtllm_pairs("llama")
    shutil.copytree(out, tmp_path / "llama")
    shutil.copy(source / "tokenizer.json", tmp_path / "llama")
    shutil.copy(source / "tokenizer_config.json", tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture(scope="session")
def trtllm_exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """Return recipe -> a tiny model quantized with it and exported by ModelOpt; do not change the files."""
    made: dict[str, Exported] = {}
    source = make_tiny("llama_linear", tmp_path_factory.mktemp("hf") / "m", **SIZES, rope_parameters=None)

    def get(recipe: str) -> Exported:
        if recipe not in made:
            made[recipe] = Exported(source, tmp_path_factory.mktemp(recipe), recipe)
        return made[recipe]

    return get
