"""TensorRT-LLM checkpoints of every family against the Hugging Face ones they were converted from."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graph_logits import graph_logits
from plansmith.builder.build import build_engine, plan_build
from plansmith.builder.checkpoint import Checkpoint, open_checkpoint
from plansmith.builder.precision import precision
from plansmith.builder.verify_subject import open_subject
from plansmith.runtime.errors import CheckpointError
from tiny_models import FAMILIES, VOCAB_SIZE, make_tiny, write_tokenizer
from tiny_trtllm import write_trtllm
from transformers_reference import transformers_logits

TinyCheckpoint = Callable[[str], Path]


def norm_offset(name: str, want: Checkpoint) -> np.ndarray:
    return np.float32(want.spec.norm_offset if "norm" in name else 0.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_is_the_checkpoint_it_was_converted_from(
    family: str, trtllm_pairs: Callable[[str], tuple[Path, Path]]
) -> None:
    """The same spec, and every weight the same, so the same graph; norms of Gemma hold 1 + w instead of w."""
    source, out = trtllm_pairs(family)
    for max_seq_len in (None, 256):  # LongRoPE looks at it
        want, got = open_checkpoint(source, max_seq_len), open_checkpoint(out, max_seq_len, source)
        assert got.spec == dataclasses.replace(want.spec, norm_offset=0.0)
    assert got.weights.names() == want.weights.names()
    for name in want.weights.names():
        stored = got.weights.get(name)
        assert stored.shape == got.weights.shape(name) == want.weights.shape(name)
        np.testing.assert_array_equal(stored, np.float32(want.weights.get(name)) + norm_offset(name, want))
    facts = got.describe()
    assert facts["kind"] == "tensorrt_llm"
    assert {**facts, "kind": "huggingface", "stored_bytes": 0} == {**want.describe(), "stored_bytes": 0}


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3", "phi3"])
def test_graph_gives_the_logits_of_transformers(family: str, trtllm_pairs: Any) -> None:
    source, out = trtllm_pairs(family)
    rng = np.random.default_rng(7)
    sequences = [rng.integers(3, VOCAB_SIZE, n).tolist() for n in (60, 17, 1)]
    got = graph_logits(open_checkpoint(out, tokenizer=source), precision("fp32"), sequences)
    for one, want in zip(got, transformers_logits(source, sequences), strict=True):
        # float32 sums in another order give about 2e-6 of the largest logit
        np.testing.assert_allclose(one, want, atol=2e-5 * float(np.abs(want).max()))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_are_views_of_the_file(dtype: str, tmp_path: Path) -> None:
    source = make_tiny("llama3", tmp_path / "hf", dtype=dtype)
    checkpoint = open_checkpoint(write_trtllm(source, tmp_path / "t"), tokenizer=source)
    assert checkpoint.spec.dtype == dtype
    weight = checkpoint.weights.get("layers.1.k.weight")
    assert str(weight.dtype) == dtype
    assert not weight.flags.owndata
    assert not weight.flags.writeable


def test_a_head_that_repeats_the_table_is_tied(trtllm_pairs: Any, tmp_path: Path) -> None:
    """Gemma's converter writes the table twice."""
    import torch
    from safetensors.torch import load_file, save_file

    source, out = trtllm_pairs("gemma3")
    shutil.copytree(out, tmp_path / "t")
    tensors = load_file(tmp_path / "t/rank0.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.vocab_embedding.weight"].clone()
    save_file(tensors, tmp_path / "t/rank0.safetensors")
    assert open_checkpoint(tmp_path / "t", tokenizer=source).spec.tie_embeddings
    tensors["lm_head.weight"][-1, -1] += 1.0
    save_file(tensors, tmp_path / "t/rank0.safetensors")
    own = open_checkpoint(tmp_path / "t", tokenizer=source)
    assert not own.spec.tie_embeddings
    np.testing.assert_array_equal(own.weights.get("lm_head.weight"), tensors["lm_head.weight"].numpy())
    assert torch.is_tensor(tensors["lm_head.weight"])


# The tokenizer.


def test_tokenizer_is_asked_for(trtllm_pairs: Any) -> None:
    source, out = trtllm_pairs("llama")
    with pytest.raises(
        CheckpointError, match=r"has no tokenizer; give the directory .* with --tokenizer-dir"
    ):
        open_checkpoint(out)
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json; give --tokenizer-dir a directory"):
        open_checkpoint(out, tokenizer=out)
    with pytest.raises(CheckpointError, match=r"is no directory and no tokenizer.json"):
        open_checkpoint(out, tokenizer=out / "nothing")
    for given in (source, source / "tokenizer.json"):
        files = open_checkpoint(out, tokenizer=given).tokenizer_files()
        assert files["tokenizer.json"] == source / "tokenizer.json"


def test_tokenizer_beside_a_tensorrt_llm_checkpoint_is_taken(trtllm_llama: Path) -> None:
    assert (
        open_checkpoint(trtllm_llama).tokenizer_files()["tokenizer.json"] == trtllm_llama / "tokenizer.json"
    )


def test_tokenizer_of_another_model_is_refused(trtllm_pairs: Any, tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "small", vocab_size=319)
    with pytest.raises(CheckpointError, match="token ids up to 319, the model's vocabulary has 319"):
        open_checkpoint(write_trtllm(source, tmp_path / "t"), tokenizer=source)


def test_tokenizer_also_of_a_hugging_face_directory(trtllm_pairs: Any, tmp_path: Path) -> None:
    source, _ = trtllm_pairs("llama")
    shutil.copytree(source, tmp_path / "hf")
    (tmp_path / "hf/tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer.json: is missing"):
        open_checkpoint(tmp_path / "hf")
    checkpoint = open_checkpoint(tmp_path / "hf", tokenizer=source)
    assert checkpoint.tokenizer_files()["tokenizer.json"] == source / "tokenizer.json"
    assert checkpoint.tokenizer_files()["generation_config.json"] == tmp_path / "hf/generation_config.json"
    assert checkpoint.spec == open_checkpoint(source).spec


def test_tokenizer_of_a_gguf_file_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="leave --tokenizer-dir out"):
        open_checkpoint(tmp_path / "m.gguf", tokenizer=tmp_path)


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({"generation_config.json": {"eos_token_id": [7, 8]}, "config.json": {"model_type": "x"}}, (7, 8)),
        ({"config.json": {"model_type": "x", "eos_token_id": 9, "bos_token_id": 4}}, (9,)),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}}}, (2,)),
        ({"config.json": {"architecture": "x", "eos_token_id": 9}}, None),
    ],
)
def test_end_of_sequence_comes_from_the_tokenizer(
    files: dict[str, Any], want: tuple[int, ...] | None, trtllm_pairs: Any, tmp_path: Path
) -> None:
    _, out = trtllm_pairs("llama")
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    if want is None:
        with pytest.raises(CheckpointError, match="does not say which token ends a sequence"):
            open_checkpoint(out, tokenizer=tmp_path)
        return
    checkpoint = open_checkpoint(out, tokenizer=tmp_path)
    assert checkpoint.spec.eos_token_ids == want
    # An engine's tokenizer/ says it too, so that it can stand in for the directory.
    made = checkpoint.tokenizer_files()["generation_config.json"]
    content = json.loads(made if isinstance(made, bytes) else made.read_bytes())
    assert content["eos_token_id"] in (want[0], list(want))


def test_engine_is_built_and_verified_without_the_tokenizer_again(trtllm_pairs: Any, tmp_path: Path) -> None:
    source, out = trtllm_pairs("llama3")
    plan = plan_build(out, ["cpu"], precision="fp32", tokenizer=source)
    build_engine(plan, tmp_path / "engine")
    engine_of_source = tmp_path / "engine_hf"
    build_engine(plan_build(source, ["cpu"], precision="fp32"), engine_of_source)
    one, two = (
        (path / "targets/cpu/model.plan").read_bytes() for path in (tmp_path / "engine", engine_of_source)
    )
    assert one == two
    with open_subject(tmp_path / "engine") as subject:
        assert subject.checkpoint.spec.eos_token_ids == open_checkpoint(source).spec.eos_token_ids


# Kinds told apart.

BUILT = {"version": "0.17.0", "pretrained_config": {"architecture": "LlamaForCausalLM"}, "build_config": {}}


@pytest.mark.parametrize(
    ("config", "files"),
    [(BUILT, ["rank0.engine"]), (BUILT, []), (None, ["rank0.engine", "rank1.engine"])],
)
def test_engine_is_refused(tmp_path: Path, config: Any, files: list[str]) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"is a TensorRT-LLM engine, .* give the checkpoint it was built from"
    ):
        open_checkpoint(tmp_path)


def test_engine_file(tmp_path: Path) -> None:
    file = tmp_path / "rank0.engine"
    file.write_bytes(b"ftrt")
    with pytest.raises(CheckpointError, match="is a TensorRT-LLM engine"):
        open_checkpoint(file)


def test_other_unknown_config_is_not_blamed_on_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architecture": "x"}))
    with pytest.raises(CheckpointError, match="model_type is 'bert'"):
        open_checkpoint(tmp_path)


def test_no_rank_file(trtllm_llama: Path) -> None:
    (trtllm_llama / "rank0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank0.safetensors: is missing, .* mapping of 1 rank;"):
        open_checkpoint(trtllm_llama)
