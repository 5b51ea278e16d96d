"""Damaged configurations: whatever is done to one, it is read, or the error is ours and names the file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from old_repos import FILLED, MODELS, config_text, fill, write_old
from plansmith.runtime.errors import InvalidArgumentError
from plansmith.serving.repository.carry import carry_over
from plansmith.serving.repository.model_config import MAX_CONFIG_BYTES, parse_config, read_config
from plansmith.serving.repository.old_repository import read_repository
from plansmith.serving.repository.plan import Overrides

PIECES = (
    "{",
    "}",
    "[",
    "]",
    '"',
    "'",
    "#",
    ":",
    ",",
    "${",
    "${x}",
    "\x00",
    "\\",
    "9" * 30,
    "-1",
    "true",
    "é",
    "\n",
)


def mutated(text: str, chance: random.Random) -> str:
    """Return a text with a span cut, doubled, or replaced by something that matters to the syntax."""
    start = chance.randrange(len(text))
    end = min(len(text), start + chance.choice((0, 1, 3, 20, 200)))
    kind = chance.randrange(4)
    if kind == 0:
        return text[:start] + text[end:]
    if kind == 1:
        return text[:end] + text[start:]
    if kind == 2:
        return text[:start]
    return text[:start] + chance.choice(PIECES) + text[end:]


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_a_damaged_file_is_read_or_named(tmp_path: Path, engine_dir: Path, model: str, filled: bool) -> None:
    chance = random.Random(f"{model}{filled}")
    old = write_old(tmp_path / "old", FILLED if filled else None)
    path = old / model / "config.pbtxt"
    whole = path.read_text()
    refused = 0
    for _ in range(30):
        path.write_text(mutated(whole, chance))
        try:
            carry_over(read_repository(old), engine_dir, Overrides())
        except InvalidArgumentError as error:
            assert str(path) in str(error) or str(old) in str(error)
            assert "\n" not in str(error) and "\x00" not in str(error)
            refused += 1
    assert refused > 5  # the damage was damage


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", None),
        (b"\xff\xfe\x00", "line 1: not UTF-8"),
        (b'name: "a"\nname: "\x80"\n', "line 2: not UTF-8"),
        (b"{" * 20_000, "line 1"),
        (b"#" * (MAX_CONFIG_BYTES + 1), "larger than"),
        (b"parameters {" * 3000, "line 1"),
    ],
)
def test_files_that_are_no_text_of_ours(tmp_path: Path, data: bytes, says: str | None) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_bytes(data)
    if says is None:
        assert not read_config(path).message.name
        return
    with pytest.raises(InvalidArgumentError, match=says):
        read_config(path)


def test_a_variable_where_no_value_belongs() -> None:
    with pytest.raises(InvalidArgumentError, match=r"line 2: \${x} stands where no value belongs"):
        parse_config('name: "a"\n${x}\n', Path("config.pbtxt"))


def test_variables_are_told_from_strings_and_comments() -> None:
    config = parse_config(fill(config_text("tensorrt_llm"), {"logits_datatype": "TYPE_FP32"}), Path("c"))
    assert config.unfilled == {
        "max_batch_size", "decoupled", "preferred_batch_size", "max_queue_delay_microseconds", "max_queue_size",
        "data_type",
    }  # fmt: skip
    assert config.parameters()["gpt_model_path"] == "${engine_dir}"
