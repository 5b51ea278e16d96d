"""GGUF files written with the gguf package: the same spec, weights and token ids as the directory they came from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.checkpoint.gguf_file import GgufFile
from plansmith.builder.checkpoint.hf_write import gguf_to_directory
from plansmith.runtime.errors import CheckpointError
from tiny_gguf import add_tensor, write_gguf
from tiny_models import CHAT_TEMPLATE, make_tiny
from tokenizers import Tokenizer

TinyCheckpoint = Callable[[str], Path]
TEXTS = [
    "the other animals think that 12345 is 6 7",
    "It's  DON'T\n\n\t x 漢字 é 🎉 ...!?  end ",
    "<|im_start|>user\nhello<|im_end|>\n",
]


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_round_trip(family: str, kind: str, tmp_path: Path) -> None:
    windows = {"use_sliding_window": False, "layer_types": None} if family == "qwen2" else {}
    source = make_tiny(family, tmp_path / "m", **windows)
    want = open_checkpoint(source)
    got = open_checkpoint(write_gguf(source, tmp_path / "m.gguf", kind))
    assert got.spec == dataclass_with(
        want.spec, dtype={"f32": "float32", "f16": "float16", "q8_0": "float32"}[kind]
    )
    for name in want.weights.names():
        a, b = want.weights.get(name), got.weights.get(name)
        assert a.shape == b.shape == got.weights.shape(name)
        if kind == "f32" or a.ndim == 1:
            np.testing.assert_array_equal(a, b)
        elif kind == "f16":
            assert b.dtype == np.float16
            np.testing.assert_array_equal(a.astype(np.float16), b)
        else:  # 8 bits in a block of 32: half a step of its largest value, the step itself rounded to float16
            step = np.abs(a).reshape(-1, 32).max(-1, keepdims=True) / 127
            assert np.all(np.abs(a - b).reshape(-1, 32) <= step * (0.5 + 127 / 2**11)) and not np.array_equal(
                a, b
            )
    stored = got.describe()["stored_bytes"]
    assert got.describe()["kind"] == "gguf" and kind.upper() in stored
    assert len(got.fingerprint()) == 64 and got.fingerprint() != want.fingerprint()


def dataclass_with(spec: Any, **changes: Any) -> Any:
    return dataclasses.replace(spec, **changes)


def test_unquantized_tensors_are_views(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    weights = open_checkpoint(write_gguf(tiny_checkpoint("llama"), tmp_path / "m.gguf")).weights
    for name in ("layers.0.up.weight", "embed.weight"):
        assert not weights.get(name).flags.owndata and not weights.get(name).flags.writeable


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_token_ids_equal_transformers(pre: str, tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    path = write_gguf(
        tiny_checkpoint("llama"),
        tmp_path / "m.gguf",
        **{"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False},
    )
    files = open_checkpoint(path).tokenizer_files()
    ours = Tokenizer.from_str(files["tokenizer.json"].decode())
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    if pre == "gpt-2":  # the tokenizer that the file was made from
        original = Tokenizer.from_file(str(tiny_checkpoint("llama") / "tokenizer.json"))
        assert [ours.encode(t).ids for t in TEXTS] == [original.encode(t).ids for t in TEXTS]


def test_bos_and_the_small_files(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    path = write_gguf(
        tiny_checkpoint("llama"),
        tmp_path / "m.gguf",
        **{"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.eot_token_id": 0},
    )
    checkpoint = open_checkpoint(path)
    files = {name: json.loads(content) for name, content in checkpoint.tokenizer_files().items()}
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert files["tokenizer_config.json"]["chat_template"] == CHAT_TEMPLATE
    assert files["tokenizer_config.json"]["eos_token"] == "<|im_end|>"
    assert files["generation_config.json"] == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0}
    assert checkpoint.spec.eos_token_ids == (2, 0)
    ids = Tokenizer.from_str(json.dumps(files["tokenizer.json"])).encode("the").ids
    assert ids[0] == 1 and 1 not in ids[1:]


@pytest.mark.parametrize("scaling", ["linear", "yarn"])
def test_rope_scaling(scaling: str, tmp_path: Path) -> None:
    family = {"linear": "llama_linear", "yarn": "llama_yarn"}[scaling]
    source = make_tiny(family, tmp_path / "m")
    rope = json.loads((source / "config.json").read_text())["rope_parameters"]
    meta = {"llama.rope.scaling.type": scaling, "llama.rope.scaling.factor": rope["factor"]}
    if scaling == "yarn":  # GGUF holds no betas: the defaults
        source = make_tiny(
            family, tmp_path / "d", rope_parameters={**rope, "beta_fast": 32.0, "beta_slow": 1.0}
        )
        meta["llama.rope.scaling.original_context_length"] = 64
    got = open_checkpoint(write_gguf(source, tmp_path / "m.gguf", **meta))
    assert got.spec == open_checkpoint(source).spec


def test_llama3_rope_factors(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    """The scaling is a tensor of divisors; the file that converters write gives transformers' frequencies."""
    source = tiny_checkpoint("llama3")
    want = open_checkpoint(source).spec.ropes[0]
    plain = 1.0 / 500000.0 ** (np.arange(0, 32, 2) / 32)
    factors = (plain / np.array(want.inv_freq)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        original = gguf.GGUFWriter.write_header_to_file

        def with_factors(self: gguf.GGUFWriter) -> None:
            self.add_tensor("rope_freqs.weight", factors)
            original(self)

        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
        path = write_gguf(source, tmp_path / "m.gguf")
    got = open_checkpoint(path).spec.ropes[0]
    assert got.kind == "llama3" and factors.max() == pytest.approx(8.0)
    np.testing.assert_allclose(got.inv_freq, want.inv_freq, rtol=1e-6)
    with pytest.raises(CheckpointError, match="rope scaling as numbers"):
        gguf_to_directory(path, tmp_path / "out")


def test_gguf_to_directory(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "m")
    path = write_gguf(source, tmp_path / "m.gguf", "q8_0")
    gguf_to_directory(path, tmp_path / "out")
    a, b = open_checkpoint(path), open_checkpoint(tmp_path / "out")
    assert a.spec == b.spec
    for name in a.weights.names():
        np.testing.assert_array_equal(a.weights.get(name), b.weights.get(name))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    got = model.state_dict()["model.layers.1.self_attn.q_proj.weight"].numpy()
    np.testing.assert_array_equal(got, a.weights.get("layers.1.q.weight"))


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"general.architecture": "gemma2"}, ["architecture 'gemma2'", "llama, qwen2, qwen3"]),
        ({"llama.expert_count": 8}, ["mixture of experts", "8"]),
        ({"llama.attention.sparkle": 1}, ["does not know", "attention.sparkle"]),
        ({"llama.block_count": None}, ["lacks", "llama.block_count"]),
        ({"llama.block_count": 3}, ["missing", "model.layers.2"]),
        ({"llama.embedding_length": 32}, ["shape", "[320, 64]", "[320, 32]"]),
        ({"llama.rope.dimension_count": 16}, ["rope.dimension_count 16", "32"]),
        ({"llama.rope.scaling.type": "longrope"}, ["longrope", "yarn"]),
        ({"llama.rope.scaling.type": "linear"}, ["linear", "factor"]),
        ({"tokenizer.ggml.model": "llama"}, ["tokenizer of model 'llama'", "gpt2"]),
        ({"tokenizer.ggml.model": None}, ["tokenizer of model None"]),
        ({"tokenizer.ggml.pre": "falcon"}, ["'falcon'", "smollm", "llama-bpe"]),
        ({"tokenizer.ggml.pre": None}, ["pre-tokenizer None"]),
        ({"tokenizer.ggml.merges": None}, ["tokenizer.ggml.merges", "missing"]),
        ({"tokenizer.ggml.token_type": [1]}, ["token_type", "320"]),
        ({"tokenizer.ggml.merges": ["ab"]}, ["no pair"]),
        ({"tokenizer.ggml.merges": ["zzz yyy"]}, ["cannot be built"]),
        ({"tokenizer.ggml.tokens": ["a", "a", "b"]}, ["a token twice"]),
        (
            {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.bos_token_id": 7},
            ["bos_token_id is 7", "1 tokens"],
        ),
        (
            {"tokenizer.ggml.tokens": [f"t{n}" for n in range(321)], "tokenizer.ggml.merges": ["t1 t2"]},
            ["built"],
        ),
    ],
)
def test_metadata_errors(
    meta: dict[str, Any], words: list[str], tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    path = write_gguf(tiny_checkpoint("llama"), tmp_path / "m.gguf", **meta)
    with pytest.raises(CheckpointError) as e:
        open_checkpoint(path)
    for word in [str(path), *words]:
        assert word in str(e.value), str(e.value)


def test_tokenizer_larger_than_the_table(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    tokens = json.loads((tiny_checkpoint("llama") / "tokenizer.json").read_text())["model"]["vocab"]
    more = [*sorted(tokens, key=tokens.get), "one", "two"]
    meta = {"tokenizer.ggml.tokens": more, "tokenizer.ggml.token_type": [1] * 322}
    path = write_gguf(tiny_checkpoint("llama"), tmp_path / "m.gguf", **meta)
    with pytest.raises(CheckpointError, match=r"ids up to 321.*320"):
        open_checkpoint(path)


def test_container_errors(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    good = write_gguf(tiny_checkpoint("llama"), tmp_path / "m.gguf").read_bytes()
    for content, word in [
        (b"GGUX" + good[4:], "no GGUF file"),
        (good[:4] + (1).to_bytes(4, "little") + good[8:], "version 1"),
        (good[:4] + (3).to_bytes(4, "big") + good[8:], "little-endian"),
        (good[:40], "truncated"),
        (good[:-100_000], "truncated"),
        (good[:16] + (1 << 60).to_bytes(8, "little") + good[24:], "truncated"),
    ]:
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=word):
            GgufFile(tmp_path / "bad.gguf")


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    directory = tmp_path_factory.mktemp("gguf")
    writer = gguf.GGUFWriter(directory / "s.gguf", "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_float32("f", 1.0)
    writer.add_tensor("w", np.ones((2, 32), np.float32))
    add_tensor(writer, "q", np.ones((2, 32), np.float32), "q8_0")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return directory / "bad.gguf", (directory / "s.gguf").read_bytes()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files_raise_checkpoint_errors_only(
    data: st.DataObject, small_gguf: tuple[Path, bytes]
) -> None:
    path, good = small_gguf
    content = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(4, min(len(content), 420) - 1))
        if data.draw(st.booleans()):
            content[at] = data.draw(st.sampled_from([0, 1, 2, 7, 8, 9, 31, 127, 128, 255]))
        else:
            del content[at : at + data.draw(st.integers(1, 40))]
    path.write_bytes(content)
    try:
        file = GgufFile(path)
        for name in file.names():
            assert file.get(name).shape == file.shape(name)
    except CheckpointError as e:
        assert str(path) in str(e)
