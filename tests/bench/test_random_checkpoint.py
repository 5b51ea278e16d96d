"""Checkpoints of random weights: transformers and the builder take what is written, and agree on it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from plansmith.runtime.engine import Engine, SamplingParams
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import random_checkpoint
from tiny_engines import build_tiny
from tiny_models import write_tokenizer

SHAPE = random_checkpoint.SHAPES["tiny"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    (folder / "tokenizer").mkdir()
    write_tokenizer(folder / "tokenizer")
    random_checkpoint.write_checkpoint(folder / "tiny", "tiny", folder / "tokenizer")
    return folder / "tiny"


def test_transformers_finds_every_weight(checkpoint: Path) -> None:
    model, loaded = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"] and not loaded["mismatched_keys"]
    for name, values in model.named_parameters():
        if values.ndim == 1:
            assert bool((values == 1).all()), name
        else:
            # The standard deviation of n normals lies within 5 / sqrt(2 n) of theirs.
            error = abs(values.float().std().item() / 0.02 - 1)
            assert error < 5 / (2 * values.numel()) ** 0.5 + 2**-9, name


def test_the_cpu_target_gives_the_tokens_of_transformers(checkpoint: Path, tmp_path: Path) -> None:
    prompt = np.random.default_rng(5).integers(3, SHAPE["vocab_size"], 40).tolist()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, -1].double().numpy()
    engine_dir = build_tiny(checkpoint, tmp_path / "engine")
    with Engine.open(engine_dir, num_threads=1) as engine:
        params = SamplingParams(max_tokens=1, temperature=0.0, return_generation_logits=True)
        (completion,) = engine.generate([prompt], params)
    ours = np.asarray(completion.generation_logits, np.float64).reshape(-1)
    # Float32 sums of at most 256 products, in two layers: far below a thousandth of the largest logit.
    assert np.abs(ours - logits).max() < 1e-3 * np.abs(logits).max()


def test_rounding_to_bfloat16_is_that_of_torch() -> None:
    values = np.random.default_rng(1).standard_normal(10_000).astype(np.float32)
    values[:3] = (1 + 2**-8, 1 + 3 * 2**-8, -0.0)  # ties: down to even, up to even
    wanted = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(random_checkpoint.bfloat16(values), wanted)


def test_the_large_shape_is_llama_3_2_1b() -> None:
    shape = random_checkpoint.SHAPES["llama1b"]
    values = sum(int(np.prod(dims)) for _, dims in random_checkpoint.tensors(shape))
    assert values == 1_235_814_400  # its parameters
