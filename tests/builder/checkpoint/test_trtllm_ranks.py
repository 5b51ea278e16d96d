"""Rank files of a model that was shared out are put together to the model it was."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.runtime.errors import CheckpointError
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from tiny_trtllm import write_trtllm

SMOLLM2 = Path(__file__).parents[3] / "demo" / "smollm2"


@pytest.mark.parametrize(
    ("family", "tp_size", "pp_size", "changes"),
    [
        ("llama", 2, 1, {}),
        ("llama", 2, 1, {"use_parallel_embedding": True}),
        ("llama", 2, 1, {"use_parallel_embedding": True, "embedding_sharding_dim": 1}),
        ("llama", 4, 1, {}),  # two KV heads, each on two ranks
        ("llama", 1, 2, {}),
        ("llama", 2, 2, {"use_parallel_embedding": True}),
        ("qwen3", 2, 1, {}),
        ("gemma2", 2, 3, {}),  # four layers in stages of 2, 1 and 1
        ("phi3_longrope", 1, 2, {}),
    ],
)
def test_ranks_are_one_model(
    family: str,
    tp_size: int,
    pp_size: int,
    changes: dict[str, Any],
    tiny_checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    source = tiny_checkpoint(family)
    if family == "gemma2":
        changes = {**changes, "sliding_window": 8}
    one = open_checkpoint(write_trtllm(source, tmp_path / "one", **changes), tokenizer=source)
    out = write_trtllm(source, tmp_path / "many", tp_size=tp_size, pp_size=pp_size, **changes)
    many = open_checkpoint(out, tokenizer=source)
    assert many.spec == one.spec
    assert len({path.name for path in out.glob("rank*")}) == tp_size * pp_size
    for name in one.weights.names():
        assert many.weights.shape(name) == one.weights.shape(name)
        np.testing.assert_array_equal(many.weights.get(name), one.weights.get(name))
    assert many.fingerprint() != one.fingerprint()


def test_vocabulary_that_was_padded_to_be_shared(tmp_path: Path) -> None:
    source = make_tiny("llama3", tmp_path / "hf", vocab_size=321)
    changes = {"use_parallel_embedding": True}
    out = write_trtllm(source, tmp_path / "t", tp_size=2, **changes)
    assert load_file(out / "rank1.safetensors")["lm_head.weight"].shape[0] == 161
    want, got = open_checkpoint(source), open_checkpoint(out, tokenizer=source)
    assert got.spec.vocab_size == 321
    for name in ("embed.weight", "lm_head.weight"):
        np.testing.assert_array_equal(got.weights.get(name), want.weights.get(name))


@pytest.fixture
def shared(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A Llama in two ranks, with its tokenizer."""
    source = tiny_checkpoint("llama")
    out = write_trtllm(source, tmp_path / "t", tp_size=2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, out)
    return out


def changed(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_rank_is_missing(shared: Path) -> None:
    (shared / "rank1.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"rank1.safetensors: is missing, config.json has a mapping of 2 ranks"
    ):
        open_checkpoint(shared)


def test_a_rank_too_many(shared: Path) -> None:
    shutil.copy(shared / "rank1.safetensors", shared / "rank2.safetensors")
    with pytest.raises(
        CheckpointError, match=r"rank2.safetensors: is one file more than the 2 of config.json"
    ):
        open_checkpoint(shared)


def test_ranks_with_different_tensors(shared: Path) -> None:
    changed(shared / "rank1.safetensors", lambda t: t.pop("transformer.ln_f.weight"))
    with pytest.raises(CheckpointError, match=r"tensor 'transformer.ln_f.weight' is in one of the ranks"):
        open_checkpoint(shared)


def test_ranks_with_different_shapes(shared: Path) -> None:
    name = "transformer.layers.0.mlp.fc.weight"
    changed(shared / "rank1.safetensors", lambda t: t.update({name: t[name][:40].clone()}))
    with pytest.raises(
        CheckpointError, match=r"fc.weight' is float32 \[40, 64\], the first rank of the layer has"
    ):
        open_checkpoint(shared)


def test_ranks_that_must_be_alike(shared: Path) -> None:
    """A norm is the same on every rank; another there means files of two models."""
    name = "transformer.layers.1.input_layernorm.weight"
    changed(shared / "rank1.safetensors", lambda t: t.update({name: t[name] + 1.0}))
    checkpoint = open_checkpoint(shared)
    with pytest.raises(CheckpointError, match=r"input_layernorm.weight' differs between rank 0 and rank 1"):
        checkpoint.weights.get("layers.1.attn_norm.weight")


def test_heads_that_do_not_divide(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source = tiny_checkpoint("llama")
    out = write_trtllm(source, tmp_path / "t")
    for rank in (1, 2):
        shutil.copy(out / "rank0.safetensors", out / f"rank{rank}.safetensors")
    config = (out / "config.json").read_text().replace('"world_size": 1', '"world_size": 3')
    (out / "config.json").write_text(config.replace('"tp_size": 1', '"tp_size": 3'))
    with pytest.raises(CheckpointError, match="tp_size is 3, which does not go with 4 heads and 2 KV heads"):
        open_checkpoint(out, tokenizer=source)


def test_fused_gate_and_up_are_not_taken_from_shares(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source = tiny_checkpoint("phi3")
    out = write_trtllm(source, tmp_path / "t", tp_size=2)
    with pytest.raises(
        CheckpointError, match="gate_proj and up_proj are one tensor, whose order in the ranks"
    ):
        open_checkpoint(out, tokenizer=source)


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.exists(), reason="run make demo first")
def test_smollm2_in_six_ranks_that_modelopt_wrote(tmp_path: Path) -> None:
    pytest.importorskip("modelopt")
    import transformers
    from modelopt.torch.export import export_tensorrt_llm_checkpoint

    model = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
    model.config.rope_theta = model.config.rope_parameters["rope_theta"]  # where the exporter looks
    export_tensorrt_llm_checkpoint(
        model,
        "llama",
        torch.float16,
        tmp_path,
        inference_tensor_parallel=3,
        inference_pipeline_parallel=2,
    )
    want, got = open_checkpoint(SMOLLM2), open_checkpoint(tmp_path, tokenizer=SMOLLM2)
    assert got.spec == dataclasses.replace(want.spec, dtype="float16")
    for name in want.weights.names():
        np.testing.assert_array_equal(got.weights.get(name), want.weights.get(name).astype(np.float16))
