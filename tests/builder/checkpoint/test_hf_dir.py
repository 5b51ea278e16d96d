"""Directories that are incomplete, damaged, of another kind, or dangerous: each its own error. And shards."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from plansmith.builder.build import plan_build
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.runtime.errors import CheckpointError
from tiny_models import make_tiny

TinyCheckpoint = Callable[[str], Path]


@pytest.fixture
def copy(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "m"))


def fails(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as e:
        open_checkpoint(path)
    for word in words:
        assert word in str(e.value), str(e.value)


def change_tensors(path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = dict(safetensors.numpy.load_file(path / "model.safetensors"))
    change(tensors)
    safetensors.numpy.save_file(tensors, path / "model.safetensors")


def test_no_checkpoint(tmp_path: Path) -> None:
    fails(tmp_path / "none", "does not exist", ".gguf")
    fails(tmp_path, "is no checkpoint", "config.json")
    (tmp_path / "m.safetensors").write_bytes(b"")
    fails(tmp_path / "m.safetensors", "weights only", "directory")
    (tmp_path / "m.pt").write_bytes(b"")
    fails(tmp_path / "m.pt", "pickle", "safetensors")
    (tmp_path / "x.txt").write_bytes(b"hello")
    fails(tmp_path / "x.txt", "no GGUF file")
    (tmp_path / "empty").write_bytes(b"")
    fails(tmp_path / "empty", "cannot be read")


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 99_999, b'{"a": 1'])
def test_config_is_no_json(content: bytes, copy: Path) -> None:
    (copy / "config.json").write_bytes(content)
    fails(copy, "config.json", "not valid JSON")


def test_config_is_no_object(copy: Path) -> None:
    (copy / "config.json").write_text("[]")
    fails(copy, "config.json", "list", "JSON object")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_by_name(name: str, copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / name)
    fails(copy, name, "never read", "save_pretrained")


def test_no_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    fails(copy, "neither model.safetensors", "index.json")


def test_missing_tensor(copy: Path) -> None:
    change_tensors(copy, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    fails(copy, "'model.layers.1.mlp.up_proj.weight'", "missing", "incomplete")


def test_wrong_shape(copy: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.norm.weight"] = np.ones(63, np.float32)

    change_tensors(copy, change)
    fails(copy, "'model.norm.weight'", "[63]", "[64]")


def test_unknown_tensors(copy: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for n in range(4):
            tensors[f"model.layers.{n}.self_attn.sinks"] = np.ones(4, np.float32)

    change_tensors(copy, change)
    fails(copy, "'model.layers.0.self_attn.sinks'", "and 1 more", "not known", "LlamaForCausalLM")


def test_harmless_extra_tensors(tmp_path: Path) -> None:
    path = make_tiny("qwen3", tmp_path / "m")

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    change_tensors(path, change)
    checkpoint = open_checkpoint(path)
    assert checkpoint.spec.tie_embeddings and "lm_head.weight" not in checkpoint.weights.names()


def test_tied_head_with_other_values(tmp_path: Path) -> None:
    path = make_tiny("qwen3", tmp_path / "m")

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2

    change_tensors(path, change)
    fails(path, "lm_head.weight differs", "tie_word_embeddings")


def test_quantized_tensors(copy: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].astype(np.int8)

    change_tensors(copy, change)
    with pytest.raises(CheckpointError, match="stored as I8"):
        open_checkpoint(copy).weights.get("layers.0.up.weight")


def test_shards_equal_one_file(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    one = open_checkpoint(tiny_checkpoint("gemma2"))
    path = make_tiny("gemma2", tmp_path / "m", max_shard_size="200KB")
    assert len(list(path.glob("model-*.safetensors"))) > 2
    many = open_checkpoint(path)
    assert many.spec == one.spec and many.fingerprint() != one.fingerprint()
    for name in one.weights.names():
        np.testing.assert_array_equal(one.weights.get(name), many.weights.get(name))


def test_index_errors(tmp_path: Path) -> None:
    path = make_tiny("gemma2", tmp_path / "m", max_shard_size="200KB")
    shards = sorted(path.glob("model-*.safetensors"))
    index = path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    shards[1].rename(path / "away")
    fails(path, shards[1].name, "is missing", "index.json")
    shutil.copy(shards[0], shards[1])
    fails(path, shards[1].name, "is in", shards[0].name)
    for names, words in [
        ({}, ["no weight_map"]),
        ({"a": "../m.safetensors"}, ["../m.safetensors", "same directory"]),
        ({"a": "x.bin"}, ["x.bin", ".safetensors"]),
    ]:
        index.write_text(json.dumps({**good, "weight_map": names}))
        fails(path, *words)
    index.write_text("{")
    fails(path, "index.json", "not valid JSON")


def test_tokenizer_that_is_missing_damaged_or_too_large(copy: Path) -> None:
    content = json.loads((copy / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 320, "content": "<extra>"})
    (copy / "tokenizer.json").write_text(json.dumps(content))
    fails(copy, "tokenizer.json", "320", "another model")
    for damaged in ("{", "{}", "[]", '{"model": {"vocab": {"a": "b"}}}', '{"model": {"vocab": 3}}'):
        (copy / "tokenizer.json").write_text(damaged)
        fails(copy, "is no tokenizer.json")
    (copy / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    fails(copy, "has no tokens")
    (copy / "tokenizer.json").unlink()
    fails(copy, "tokenizer.json", "is missing", "AutoTokenizer")
    os.mkfifo(copy / "tokenizer.json")  # reading it would never end
    fails(copy, "tokenizer.json", "is a FIFO")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b'{"model": {"type": "Unheard-of", "vocab": {"a": 0}, "merges": []}}'),
        ("tokenizer.json", b'{"model": {"vocab": {"a": true}}}'),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"chat_template": "{% if %}"}'),
        ("chat_template.jinja", b"{% if %}"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_tokenizer_the_runtime_cannot_open_is_not_built(name: str, content: bytes, copy: Path) -> None:
    (copy / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name}|chat template"):
        plan_build(copy, ["cpu"])


def test_a_table_larger_than_the_tokenizer_is_padding(tmp_path: Path) -> None:
    assert open_checkpoint(make_tiny("llama", tmp_path / "m", vocab_size=384)).spec.vocab_size == 384


def test_tokenizer_files_and_end_of_sequence(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    (copy / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    checkpoint = open_checkpoint(copy)
    assert checkpoint.spec.eos_token_ids == (2, 0)  # generation_config.json goes before config.json
    files = checkpoint.tokenizer_files()
    assert set(files) == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    assert all(isinstance(path, Path) and path.is_file() for path in files.values())
    (copy / "generation_config.json").write_text('{"eos_token_id": "x"}')
    fails(copy, "generation_config.json", "eos_token_id")
    (copy / "generation_config.json").write_text('{"eos_token_id": [2, 320]}')
    fails(copy, "eos_token_id is 320", "vocabulary has 320", "generation_config.json")


def test_fingerprint_follows_config_and_weights(copy: Path) -> None:
    first = open_checkpoint(copy)
    assert first.fingerprint() == first.fingerprint() == open_checkpoint(copy).fingerprint()
    assert len(first.fingerprint()) == 64
    (copy / "tokenizer_config.json").write_text("{}")
    assert open_checkpoint(copy).fingerprint() == first.fingerprint()
    seen = {first.fingerprint()}
    with (copy / "model.safetensors").open("r+b") as f:
        f.seek(-1, 2)
        f.write(b"\x01")
    seen.add(open_checkpoint(copy).fingerprint())
    (copy / "config.json").write_text((copy / "config.json").read_text() + "\n")
    seen.add(open_checkpoint(copy).fingerprint())
    assert len(seen) == 3
