"""Patterns of a config: those that people write match as `re` does, those that would never end are refused at once."""

from __future__ import annotations

import fnmatch
import re
import time

import pytest
from plansmith.builder.checkpoint.quantized.patterns import compile_pattern

NAMES = [
    f"model.layers.{n}.{module}"
    for n in (0, 3, 10, 31)
    for module in ("self_attn.q_proj", "self_attn.qkv_proj", "mlp.gate_proj", "mlp.down_proj")
] + ["lm_head"]


@pytest.mark.parametrize(
    "text",
    [
        ".*",
        ".*lm_head",
        ".*self_attn.*",
        r".*\.mlp\.(gate|up|down)_proj$",
        r"model\.layers\.\d+\.self_attn\.(q|k|v|o)_proj",
        r"^model\.layers\.(" + "|".join(map(str, range(32))) + r")\..*\.(q|k|v|o)_proj.*",
        r"(?:model\.)?layers\.[0-9]{1,2}\.mlp.*?_proj",
        r"model\.layers\.(?!0\.).*",
        r".*(?<!gate)_proj",
        r"(?P<stem>model|language_model)\..*[+*?(|)]?.*",
        r".*layers\.[^\]]+_proj",
    ],
)
def test_patterns_that_people_write(text: str) -> None:
    pattern = compile_pattern(text)
    for name in NAMES:
        assert (pattern.match(name) is None) == (re.match(text, name) is None)


HOSTILE = [
    r"(.+)+x",
    r"((\w*\.*)*)*!",
    r"(?:[a-z_.]+)*!",
    r"(\w|\w\w){1,60}!",
    r"(?i:(.*)*)x",
    r"(.*)\1\1\1x(.*)*!",
    ".*" * 12 + "!",
    ".*?" * 12 + "!",
    "[a-z._]+" * 9 + "!",
    ".?" * 40 + "!" * 40,
    "(.|.)" * 40 + "!",
    "(|.)" * 40 + "!",
    ".{0,60}" * 8 + "!",
    "a" * 100_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=[text[:12] for text in HOSTILE])
def test_patterns_that_would_not_end(text: str) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"may take hours|at most 1000"):
        compile_pattern(text)
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("text", [r".*.*.*.*!", r"(.|.)(.|.).*.*.*!"])
def test_the_worst_that_is_taken_is_quick(text: str) -> None:
    pattern = compile_pattern(text)
    began = time.monotonic()
    assert pattern.match("model.layers.10.self_attn.down_projection_of_a_long_name") is None
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("text", ["(", "*a", "[z-a]", "a{3,2}", "(?<=.*)a", "(" * 300])
def test_no_patterns(text: str) -> None:
    with pytest.raises(ValueError, match="no regular expression"):
        compile_pattern(text)


def test_stars_of_modelopt_s_patterns_end() -> None:
    """fnmatch, which reads those, tries each star once."""
    began = time.monotonic()
    assert not fnmatch.fnmatchcase("a" * 60, "*a" * 30 + "*b")
    assert time.monotonic() - began < 1
