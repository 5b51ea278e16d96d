"""Texts and words to the tensors that the engine's model takes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plansmith.runtime.errors import InvalidArgumentError, ShapeError, UnsupportedError
from plansmith.runtime.tokenizer import Tokenizer
from plansmith.serving.triton import text_encoder
from plansmith.serving.triton.text_encoder import TextEncoder
from plansmith.serving.triton.text_settings import TextSettings
from plansmith.serving.triton.word_lists import read_word_list
from toy_tokenizers import MAKERS

CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def texts(*rows: str | list[str]) -> np.ndarray[Any, Any]:
    """Return (B, n) BYTES as they come from the wire."""
    lists = [[row] if isinstance(row, str) else row for row in rows]
    longest = max(map(len, lists))
    array = np.empty((len(lists), longest), object)
    for i, row in enumerate(lists):
        array[i] = [text.encode() for text in row] + [b""] * (longest - len(row))
    return array


def lengths(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32).reshape(-1, 1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(MAKERS["byte_level"](), config=CONFIG)


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> TextEncoder:
    return TextEncoder(tokenizer)


def request(**more: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {"QUERY": texts("the dog"), "REQUEST_OUTPUT_LEN": lengths(5), **more}


def test_one_prompt(encoder: TextEncoder, tokenizer: Tokenizer) -> None:
    """Every output that a text model has, of the documented type and shape."""
    outputs = encoder.encode(request())
    ids = tokenizer.encode("the dog")
    assert ids[0] == tokenizer.token_to_id("<s>")
    assert outputs["INPUT_ID"].tolist() == [ids]
    shapes = {name: (array.dtype.name, list(array.shape)) for name, array in outputs.items()}
    n = len(ids)
    assert shapes == {
        "INPUT_ID": ("int32", [1, n]),
        "REQUEST_INPUT_LEN": ("int32", [1, 1]),
        "DECODER_INPUT_ID": ("int32", [1, 1]),
        "REQUEST_DECODER_INPUT_LEN": ("int32", [1, 1]),
        "BAD_WORDS_IDS": ("int32", [1, 2, 0]),
        "STOP_WORDS_IDS": ("int32", [1, 2, 0]),
        "EMBEDDING_BIAS": ("float32", [1, 0]),
        "REQUEST_OUTPUT_LEN": ("int32", [1, 1]),
        "OUT_END_ID": ("int32", [1, 1]),
        "OUT_PAD_ID": ("int32", [1, 1]),
        "OUT_PROMPT_TABLE_EXTRA_IDS": ("uint64", [1, n]),
    }
    assert outputs["OUT_END_ID"].item() == tokenizer.token_to_id("</s>")
    assert outputs["OUT_PAD_ID"].item() == tokenizer.token_to_id("<pad>")


def test_a_batch_is_padded(encoder: TextEncoder, tokenizer: Tokenizer) -> None:
    """Rows of different lengths, each with its own words, end and pad ids."""
    outputs = encoder.encode(
        {
            "QUERY": texts("the dog", "the quick brown fox", ""),
            "REQUEST_OUTPUT_LEN": lengths(5, 6, 7),
            "STOP_WORDS_DICT": texts(["fox", "dog"], [], ["fox"]),
            "END_ID": lengths(9, -1, 3),
        }
    )
    rows = [tokenizer.encode(text) for text in ("the dog", "the quick brown fox", "")]
    assert outputs["REQUEST_INPUT_LEN"].ravel().tolist() == [len(row) for row in rows]
    for ids, made in zip(rows, outputs["INPUT_ID"], strict=True):
        assert made[: len(ids)].tolist() == ids
        assert set(made[len(ids) :]) <= {tokenizer.token_to_id("<pad>")}
    assert outputs["OUT_END_ID"].ravel().tolist() == [9, -1, 3]
    assert outputs["REQUEST_OUTPUT_LEN"].ravel().tolist() == [5, 6, 7]
    words = [read_word_list(one) for one in outputs["STOP_WORDS_IDS"]]
    assert words[1] == [] and words[2] and words[0][: len(words[2])] == words[2]


@pytest.mark.parametrize("name", ["byte_level", "llama", "gemma", "unigram"])
@pytest.mark.parametrize("text", ["the dog", "dog", "a dog,", "hotdog", "\ndog"])
def test_words_are_found_wherever_they_are(name: str, text: str) -> None:
    """One of a word's sequences is in the ids of every text that has it, at the beginning of a word or inside one."""
    tokenizer = Tokenizer(MAKERS[name](), config=CONFIG)
    words = TextEncoder(tokenizer).encode(request(STOP_WORDS_DICT=texts("dog")))["STOP_WORDS_IDS"]
    ids = tokenizer.encode(text)
    found = read_word_list(words[0])
    if "<unk>" in tokenizer.decode(ids, skip_special_tokens=False):
        pytest.skip("the toy vocabulary cannot write this text")
    assert any(ids[i : i + len(word)] == word for word in found for i in range(len(ids)))


def test_a_word_that_cannot_be_written_stands_for_no_other() -> None:
    """The unknown token is no word: it would stop, or forbid, whatever is unknown."""
    encoder = TextEncoder(Tokenizer(MAKERS["word_level"](), config=CONFIG))
    outputs = encoder.encode(request(STOP_WORDS_DICT=texts(["User:", "dog"]), BAD_WORDS_DICT=texts("User:")))
    assert len(read_word_list(outputs["STOP_WORDS_IDS"][0])) == 1
    assert read_word_list(outputs["BAD_WORDS_IDS"][0]) == []


def test_bias(encoder: TextEncoder, tokenizer: Tokenizer) -> None:
    """Weights of a row's words, each on all its tokens, over the tokenizer's vocabulary."""
    outputs = encoder.encode(
        {
            "QUERY": texts("a", "b"),
            "REQUEST_OUTPUT_LEN": lengths(1, 1),
            "EMBEDDING_BIAS_WORDS": texts([" dog", " the"], ["", " dog"]),
            "EMBEDDING_BIAS_WEIGHTS": np.array([[1.5, -2], [9, 3]], np.float32),
        }
    )
    bias = outputs["EMBEDDING_BIAS"]
    dog, the = (tokenizer.encode(word, add_special_tokens=False)[0] for word in (" dog", " the"))
    assert bias.shape == (2, tokenizer.vocab_size) and bias.dtype == np.float32
    assert (bias[0, dog], bias[0, the], bias[1, dog]) == (1.5, -2, 3)
    assert np.count_nonzero(bias) == 3


def test_without_batches() -> None:
    """A model of max_batch_size 0 has no batch dimension, in or out."""
    tokenizer = Tokenizer(MAKERS["llama"](), config=CONFIG)
    outputs = TextEncoder(tokenizer, add_special_tokens=False).encode(
        {
            "QUERY": np.array([b"the dog"], object),
            "REQUEST_OUTPUT_LEN": np.array([5], np.int32),
            "STOP_WORDS_DICT": np.array([b"dog", b"fox"], object),
        }
    )
    assert outputs["INPUT_ID"].tolist() == tokenizer.encode("the dog", add_special_tokens=False)
    assert outputs["REQUEST_OUTPUT_LEN"].tolist() == [5]
    assert outputs["STOP_WORDS_IDS"].ndim == 2 and len(read_word_list(outputs["STOP_WORDS_IDS"])) >= 2


@pytest.mark.parametrize(
    ("more", "kind", "words"),
    [
        ({"QUERY": np.array([[b"\xff\xfe"]], object)}, InvalidArgumentError, ["QUERY", "UTF-8", "byte 0"]),
        (
            {"STOP_WORDS_DICT": np.array([[b"a\x80"]], object)},
            InvalidArgumentError,
            ["STOP_WORDS_DICT", "byte 1"],
        ),
        ({"QUERY": np.empty((1, 0), object)}, InvalidArgumentError, ["QUERY", "empty"]),
        ({"IMAGE_URL": texts("http://x")}, UnsupportedError, ["IMAGE_URL", "text only"]),
        ({"IMAGE_BYTES": np.zeros((1, 1, 2, 2, 3), np.uint8)}, UnsupportedError, ["IMAGE_BYTES"]),
        (
            {"EMBEDDING_BIAS_WORDS": texts("dog")},
            ShapeError,
            ["EMBEDDING_BIAS_WEIGHTS", "1 words", "0 weights"],
        ),
        ({"EMBEDDING_BIAS_WEIGHTS": np.ones((1, 2), np.float32)}, ShapeError, ["EMBEDDING_BIAS_WORDS"]),
        (
            {
                "QUERY": texts("a", "b"),
                "REQUEST_OUTPUT_LEN": lengths(1, 1),
                "BAD_WORDS_DICT": texts("x", "y", "z"),
            },
            ShapeError,
            ["BAD_WORDS_DICT", "2 rows"],
        ),
    ],
)
def test_what_is_wrong_is_named(
    encoder: TextEncoder, more: dict[str, Any], kind: type[Exception], words: list[str]
) -> None:
    with pytest.raises(kind) as caught:
        encoder.encode(request(**more))
    assert all(word in str(caught.value) for word in words)


def model_config(**parameters: str) -> dict[str, Any]:
    return {
        "name": "preprocessing",
        "parameters": {key: {"string_value": text} for key, text in parameters.items()},
    }


def test_parameters(tmp_path: Path) -> None:
    """Defaults, switches, and a tokenizer directory beside the models."""
    settings = TextSettings.read(model_config(tokenizer_dir="tok", add_special_tokens="False"), tmp_path)
    assert settings == TextSettings(tmp_path / "tok", add_special_tokens=False)
    (tmp_path / "tok").mkdir()
    MAKERS["gemma"]().save(str(tmp_path / "tok" / "tokenizer.json"))
    assert settings.open_tokenizer().encode("the")


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"tokenizer_dir": "${tokenizer_dir}"}, ["tokenizer_dir", "preprocessing", "not filled"]),
        ({"tokenizer_dir": ""}, ["tokenizer_dir", "empty"]),
        (
            {"tokenizer_dir": "x", "add_special_tokens": "maybe"},
            ["add_special_tokens", "maybe", "true or false"],
        ),
        ({"tokenizer_dir": "x", "skip_special_tokens": "${skip_special_tokens}"}, ["skip_special_tokens"]),
    ],
)
def test_a_bad_parameter_is_named(parameters: dict[str, str], words: list[str]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        TextSettings.read(model_config(**parameters))
    assert all(word in str(caught.value) for word in words)


def test_many_words_take_a_time_that_grows_as_their_number(
    encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is one process: what a request with a book of words takes, all others wait."""
    monkeypatch.setattr(text_encoder, "word_ids", lambda word, _: [[int(word)], [0, int(word)]])
    words = [str(i) for i in range(1, 20_000)]
    start = time.process_time()
    made = encoder.encode(request(STOP_WORDS_DICT=texts([*words, *words])))["STOP_WORDS_IDS"]
    assert time.process_time() - start < 3  # 0.1 s; each compared with all others 20 and more
    assert read_word_list(made[0]) == [ids for i in range(1, 20_000) for ids in ([i], [0, i])]


@pytest.mark.parametrize("name", ["QUERY", "STOP_WORDS_DICT", "BAD_WORDS_DICT", "EMBEDDING_BIAS_WORDS"])
def test_more_text_than_any_prompt_has_is_refused_before_it_is_encoded(
    tokenizer: Tokenizer, name: str
) -> None:
    encoder = TextEncoder(tokenizer, max_text_bytes=100)
    weights = {"EMBEDDING_BIAS_WEIGHTS": np.ones((1, 2), np.float32)} if name.startswith("EMBED") else {}
    others = 0 if name == "QUERY" else len("the dog")
    encoder.encode(request(**{name: texts(["a" * 40, "b" * (60 - others)]), **weights}))
    with pytest.raises(ShapeError, match=rf"{name} has 1\d\d bytes, .* the most is 100"):
        encoder.encode(request(**{name: texts(["a" * 50, "b" * 51]), **weights}))


def test_the_limit_of_text_is_that_of_the_engine_around_the_tokenizer(tmp_path: Path) -> None:
    settings = TextSettings(tmp_path / "tokenizer")
    assert settings.max_text_bytes() == 4 << 20
    manifest = tmp_path / "manifest.json"
    for text in ("{", "[]", '{"limits": {}}', '{"limits": {"max_input_len": null}}'):
        manifest.write_text(text)
        assert settings.max_text_bytes() == 4 << 20
    manifest.write_text('{"limits": {"max_input_len": 100000}}')
    assert settings.max_text_bytes() == TextSettings(tmp_path).max_text_bytes() == 3_200_000
    manifest.write_text('{"limits": {"max_input_len": 128}}')
    assert settings.max_text_bytes() == 1 << 20
