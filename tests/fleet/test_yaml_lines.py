"""YAML with lines: values, where they come from, and every way in which a file can be wrong or hostile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plansmith.fleet.yaml_lines import MAX_BYTES, Document, read_yaml
from plansmith.runtime.errors import InvalidArgumentError


def read(tmp_path: Path, content: str | bytes) -> Document:
    path = tmp_path / "f.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_yaml(path, "f.yaml")


def test_values_and_lines(tmp_path: Path) -> None:
    document = read(
        tmp_path, "# a fleet\na: 1\nb:\n  c: [x, 2.5,\n      true]\n  d: null\n  e: '8'\nf: 2026-01-31\n"
    )
    assert document.value == {
        "a": 1,
        "b": {"c": ["x", 2.5, True], "d": None, "e": "8"},
        "f": "2026-01-31",
    }
    lines = {("a",): 2, ("b",): 3, ("b", "c"): 4, ("b", "c", 0): 4, ("b", "c", 2): 5, ("b", "e"): 7}
    assert {spot: document.lines[spot] for spot in lines} == lines
    assert document.where(("b", "d")) == "f.yaml:6"
    assert document.where(("b", "nowhere", 3)) == "f.yaml:3"
    assert document.where(()) == "f.yaml:2"


def test_names_are_texts(tmp_path: Path) -> None:
    assert read(tmp_path, "{8: a, 1.5: b, true: c, ~: d}").value == {
        "8": "a",
        "1.5": "b",
        "true": "c",
        "~": "d",
    }


def test_aliases_and_merges(tmp_path: Path) -> None:
    document = read(
        tmp_path,
        "base: &b\n  x: 1\n  y: 2\nmore: &m {<<: *b, z: 3}\none: *b\ntwo:\n  <<: [*m, {x: 9, w: 4}]\n  y: 7\n",
    )
    assert document.value["one"] == {"x": 1, "y": 2}
    assert document.value["two"] == {"x": 1, "y": 7, "z": 3, "w": 4}
    assert document.lines["two", "y"] == 8
    assert document.lines["one", "y"] == 3


def test_earlier_merges_win(tmp_path: Path) -> None:
    document = read(tmp_path, "a: &a {x: 1}\nb: &b {x: 2, y: 3}\nc: {<<: [*a, *b]}\n")
    assert document.value["c"] == {"x": 1, "y": 3}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ("f.yaml is empty",)),
        ("# nothing\n", ("f.yaml is empty",)),
        ("a: 1\nb: 2\na: 3\n", ("f.yaml:3", "'a' a second time", "line 1")),
        ("a:\n  b: 1\n  'b': 2\n", ("f.yaml:3", "a second time")),
        ("a:\n\tb: 1\n", ("f.yaml:2", "tab", "spaces")),
        ("a: [1, 2\nb: 3\n", ("f.yaml:2", "is not YAML")),
        ("a: 'x\n", ("f.yaml:", "is not YAML")),
        ("a: b: c\n", ("f.yaml:1", "is not YAML")),
        ("a: 1\n---\nb: 2\n", ("f.yaml:2", "second document")),
        ("a: *gone\n", ("f.yaml:1", "is not YAML", "gone")),
        (b"a: 1\nb: \xff\xfe\n", ("f.yaml:2", "not UTF-8", "0xff")),
        ("a: 1\nb: \x07\n", ("f.yaml:2", "does not allow")),
        ("a: !!python/object/apply:os.system [echo]\n", ("f.yaml:1", "tag", "plain values")),
        ("a: !custom x\n", ("f.yaml:1", "'!custom'")),
        ("a: !!binary aGVsbG8=\n", ("f.yaml:1", "binary")),
        ("a: !!set {x}\n", ("f.yaml:1", "set")),
        ("a: !!int x\n", ("f.yaml:1", "'x'", "a number")),
        ("a: .inf\n", ("f.yaml:1", "'.inf'", "finite")),
        ("a: .nan\n", ("f.yaml:1", "finite")),
        ("? [1, 2]\n: 3\n", ("f.yaml:1", "a name that is a list")),
        ("a: &a [*a]\n", ("aliases hold themselves",)),
        ("a: &a {b: *a}\n", ("aliases hold themselves",)),
        ("a: &a {<<: *a}\n", ("aliases hold themselves",)),
        ("a: {<<: 3}\n", ("f.yaml:1", "'<<'")),
        ("[" * 5000, ("nested too deeply",)),
        ("a: " + "{a: " * 3000, ("nested too deeply",)),
    ],
)
def test_refused(tmp_path: Path, content: str | bytes, words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        read(tmp_path, content)
    for word in words:
        assert word in str(error.value)


def test_an_alias_bomb_is_refused_before_it_goes_off(tmp_path: Path) -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(InvalidArgumentError, match="more than 50000 values"):
        read(tmp_path, "\n".join(rows))


def test_a_bomb_of_merges_is_refused_too(tmp_path: Path) -> None:
    rows = ["a0: &a0 {x: 1}"]
    rows += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 12)]
    with pytest.raises(InvalidArgumentError, match="more than 50000 values"):
        read(tmp_path, "\n".join(rows))


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="more than 256 KiB"):
        read(tmp_path, "# " + "x" * MAX_BYTES)


def test_a_byte_order_mark_is_no_matter(tmp_path: Path) -> None:
    assert read(tmp_path, b"\xef\xbb\xbfa: 1\n").value == {"a": 1}


@pytest.mark.parametrize("kind", ["missing", "directory", "pipe"])
def test_what_is_no_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "f.yaml"
    if kind == "directory":
        path.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(InvalidArgumentError, match=r"is missing|not a file"):
        read_yaml(path, "f.yaml")


@given(st.text(alphabet="ab01:,-[]{}&*<!'\"#|>%@? \n\t\\~.", max_size=60) | st.binary(max_size=40))
def test_any_bytes_give_a_document_or_the_error(
    tmp_path_factory: pytest.TempPathFactory, content: str | bytes
) -> None:
    try:
        read(tmp_path_factory.getbasetemp(), content)
    except InvalidArgumentError as error:
        assert "f.yaml" in str(error)
