"""From entries to engines: which limits win, who shares a directory, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from plansmith.fleet.engines import FleetEngine, engines_of
from plansmith.fleet.fleet_file import read_fleet
from plansmith.runtime.errors import InvalidArgumentError

HEAD = """\
version: 1
name: chat
limits: {max_batch_size: 1, max_num_tokens: 1, max_input_len: 1, max_seq_len: 1, tokens_per_block: 8}
models:
  a: {checkpoint: c, limits: {max_num_tokens: 2, max_input_len: 2, max_seq_len: 2, tokens_per_block: 16}}
  b: d
recipes:
  int8: {limits: {max_input_len: 3, max_seq_len: 3, tokens_per_block: 32}}
  fp16:
skus:
  cpu:
  l4:
  l40s: {limits: {tokens_per_block: 128}}
"""


def engines(tmp_path: Path, more: str = "") -> dict[str, FleetEngine]:
    (tmp_path / "plansmith.yaml").write_text(HEAD + more)
    return {one.name: one for one in engines_of(read_fleet(tmp_path))}


def values(engine: FleetEngine) -> list[int]:
    return [one.value for _, one in sorted(engine.limits.items())]


def test_all_combinations(tmp_path: Path) -> None:
    found = engines(tmp_path)
    assert list(found) == [
        "a-int8",
        "a-int8-l40s",
        "a-fp16",
        "a-fp16-l40s",
        "b-int8",
        "b-int8-l40s",
        "b-fp16",
        "b-fp16-l40s",
    ]
    shared, own = found["a-int8"], found["a-int8-l40s"]
    assert [sku.name for sku in shared.skus] == ["cpu", "l4"]
    assert [target.name for target in shared.targets] == ["cpu", "sm89"]
    assert [sku.name for sku in own.skus] == ["l40s"]
    assert (shared.own_sku, own.own_sku) == ("", "l40s")
    assert own.member(own.skus[0]) == "a/int8/l40s"


def test_the_most_special_limit_wins(tmp_path: Path) -> None:
    entry = "engines: [{model: a, recipe: int8, limits: {max_seq_len: 4, tokens_per_block: 64}}]\n"
    found = engines(tmp_path, entry)
    # In order: max_batch_size, max_input_len, max_num_tokens, max_seq_len, tokens_per_block.
    assert values(found["a-int8"]) == [1, 3, 2, 4, 64]
    assert values(found["a-int8-l40s"]) == [1, 3, 2, 4, 128]
    lines = {name: int(one.where.rpartition(":")[2]) for name, one in found["a-int8-l40s"].limits.items()}
    assert lines == {
        "max_batch_size": 3,
        "max_num_tokens": 5,
        "max_input_len": 8,
        "max_seq_len": 14,
        "tokens_per_block": 13,
    }


def test_entries_of_one_engine_are_joined(tmp_path: Path) -> None:
    found = engines(
        tmp_path,
        "engines:\n  - {model: a, recipe: int8, skus: [cpu]}\n  - {model: a, recipe: int8, skus: l4}\n",
    )
    assert [sku.name for sku in found["a-int8"].skus] == ["cpu", "l4"]


def test_a_name_of_its_own(tmp_path: Path) -> None:
    entries = """\
engines:
  - {model: a, recipe: int8, skus: [cpu]}
  - {model: a, recipe: int8, skus: [l4, l40s], limits: {max_batch_size: 9}, name: a-large}
"""
    assert list(engines(tmp_path, entries)) == ["a-int8", "a-large", "a-large-l40s"]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (
            "  - {model: a, recipe: int8, skus: [cpu, l4]}\n  - {model: a, recipe: [fp16, int8], skus: [l4]}\n",
            ":16: a/int8/l4 is in the entry of",
        ),
        (
            "  - {model: a, recipe: int8, skus: [cpu]}\n"
            "  - {model: a, recipe: int8, skus: [l4], limits: {max_batch_size: 9}}\n",
            ":16: the engine a-int8 is that of",
        ),
        (
            "  - {model: a, recipe: int8, skus: [cpu], name: x}\n  - {model: b, recipe: int8, skus: [l4], name: x}\n",
            "with another model",
        ),
        (
            "  - {model: a, recipe: int8, skus: [cpu], name: x}\n  - {model: a, recipe: fp16, skus: [l4], name: x}\n",
            "with another recipe",
        ),
    ],
)
def test_what_cannot_be(tmp_path: Path, entries: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        engines(tmp_path, "engines:\n" + entries)
    assert words in str(error.value)
    assert ":15" in str(error.value)  # the entry that came first


def test_names_that_meet(tmp_path: Path) -> None:
    text = "version: 1\nname: x\nmodels: {a: c, a-b: d}\nrecipes: {b-int8: {precision: int8}, int8: }\nskus: [cpu]\n"
    (tmp_path / "plansmith.yaml").write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"the engine a-b-int8 is that of .* with another model"):
        engines_of(read_fleet(tmp_path))
