"""Tokenizer files as checkpoints have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import toy_tokenizers
from plansmith.runtime.errors import EngineFileError, InvalidArgumentError
from plansmith.runtime.tokenizer import Tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    toy_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def test_a_tokenizer_alone_is_enough(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.eos_token_ids == () and tokenizer.chat_template is None
    ids = tokenizer.encode("the dog")
    assert ids[0] == tokenizer.token_to_id("<s>")
    assert tokenizer.decode(ids) == "the dog"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>the dog"


def test_it_gives_the_ids_and_the_text_of_transformers(directory: Path) -> None:
    import transformers

    write(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ours = Tokenizer.from_directory(directory)
    for text in [*toy_tokenizers.TEXT, "", " ", "<think></s> größe 😀"]:
        assert ours.encode(text) == theirs(text)["input_ids"]
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("generation", "eos", "expected"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": [2, 0]}, None, (2, 0)),
        ({}, "</s>", (1,)),
        ({"eos_token_id": [2, 1]}, "</s>", (2, 1)),
        ({"eos_token_id": 2}, {"content": "</s>", "lstrip": False}, (2, 1)),
        ({"eos_token_id": None}, "not a token", ()),
    ],
)
def test_end_ids(directory: Path, generation: Any, eos: Any, expected: tuple[int, ...]) -> None:
    write(directory / "generation_config.json", generation)
    write(directory / "tokenizer_config.json", {"eos_token": eos})
    assert Tokenizer.from_directory(directory).eos_token_ids == expected


def test_templates_of_the_config_and_of_the_file(directory: Path) -> None:
    def rendered() -> str:
        template = Tokenizer.from_directory(directory).chat_template
        assert template is not None
        return template.render([{"role": "user", "content": "x"}])

    config: dict[str, Any] = {"bos_token": "<s>", "chat_template": "config {{ bos_token }}"}
    write(directory / "tokenizer_config.json", config)
    assert rendered() == "config <s>"
    config["chat_template"] = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "named"},
    ]
    write(directory / "tokenizer_config.json", config)
    assert rendered() == "named"
    (directory / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    assert rendered() == "file x"


def test_padding_and_truncation_in_the_file_are_switched_off(tmp_path: Path) -> None:
    backend = toy_tokenizers.byte_level()
    backend.enable_padding(length=32)
    backend.enable_truncation(max_length=4)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    text = "the quick brown fox jumps over the lazy dog"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_missing_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(EngineFileError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_a_damaged_file_is_named(directory: Path, name: str, content: str) -> None:
    (directory / name).write_text(content)
    with pytest.raises(EngineFileError, match=name):
        Tokenizer.from_directory(directory)


def test_half_a_character_is_refused(directory: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="half of a character"):
        Tokenizer.from_directory(directory).encode("a\ud800b")


def test_templates_that_are_no_text_are_refused_or_left_out(directory: Path) -> None:
    write(directory / "tokenizer_config.json", {"chat_template": [{"x": 1}, 3]})
    assert Tokenizer.from_directory(directory).chat_template is None
    (directory / "chat_template.jinja").write_bytes(b"{{ \xff }}")
    with pytest.raises(EngineFileError, match=r"chat_template\.jinja is not UTF-8"):
        Tokenizer.from_directory(directory)
