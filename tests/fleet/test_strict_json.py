"""JSON into dataclasses: what comes back is what went in, and every violated rule has its error."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from plansmith.builder.scheme import Quantization, Scheme
from plansmith.builder.spec import DecoderSpec, LayerSpec, RopeSpec
from plansmith.fleet.strict_json import read_as
from plansmith.runtime.errors import EngineFileError


@dataclasses.dataclass(frozen=True)
class Inner:
    kind: Literal["a", "b"]
    pair: tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Outer:
    count: int
    share: float
    is_on: bool
    name: str
    maybe: int | None
    inner: Inner | None
    many: tuple[Inner, ...]


GOOD: dict[str, Any] = {
    "count": 3,
    "share": 0.1,
    "is_on": True,
    "name": "x",
    "maybe": None,
    "inner": {"kind": "a", "pair": ["p", 1]},
    "many": [{"kind": "b", "pair": ["q", 2]}],
}

SPEC = DecoderSpec(
    family="llama",
    architecture="LlamaForCausalLM",
    vocab_size=8,
    hidden_size=4,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    max_position_embeddings=16,
    norm_eps=1e-05,
    activation="silu",
    ropes=(RopeSpec((0.1,), 2),),
    layers=(LayerSpec(),),
    attn_scale=2**-0.5,
    tie_embeddings=True,
    eos_token_ids=(1, 2),
)
QUANTIZATION = Quantization(
    "fp8", "modelopt 0.47.0", (("layers.0.q", Scheme("fp8", -1, input="fp8")),), "fp8"
)


def test_what_comes_back() -> None:
    found = read_as(Outer, GOOD, "it")
    assert found == Outer(3, 0.1, True, "x", None, Inner("a", ("p", 1)), (Inner("b", ("q", 2)),))


@pytest.mark.parametrize("value", [SPEC, QUANTIZATION, dataclasses.replace(SPEC, bos_token_id=5, ropes=())])
def test_there_and_back(value: Any) -> None:
    told = json.loads(json.dumps(dataclasses.asdict(value)))
    found = read_as(type(value), told, "it")
    assert found == value
    assert json.dumps(dataclasses.asdict(found)) == json.dumps(dataclasses.asdict(value))


def test_whole_numbers_stay_what_they_are() -> None:
    """A digest over 1 is another than that over 1.0."""
    assert type(read_as(Outer, {**GOOD, "share": 1}, "it").share) is int


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("count", 3.0, "it.count is 3.0, wanted is a whole number"),
        ("count", True, "it.count is True, wanted is a whole number"),
        ("count", 1 << 63, "it.count is"),
        ("share", "1", "it.share is '1', wanted is a number"),
        ("share", float("nan"), "it.share is nan, wanted is a number"),
        ("share", float("inf"), "it.share is inf"),
        ("share", 10**400, "it.share is 1000"),
        ("share", False, "it.share is False"),
        ("is_on", 1, "it.is_on is 1, wanted is true or false"),
        ("name", None, "it.name is None, wanted is a text"),
        ("maybe", "3", "it.maybe is '3', wanted is a whole number"),
        ("inner", [], "it.inner is [], wanted is an object"),
        ("inner", {"kind": "a"}, "it.inner has no field 'pair'"),
        ("inner", {"kind": "c", "pair": ["p", 1]}, "it.inner.kind is 'c', wanted is one of a, b"),
        ("inner", {"kind": ["a"], "pair": ["p", 1]}, "it.inner.kind is ['a']"),
        ("inner", {"kind": "a", "pair": ["p"]}, "it.inner.pair is ['p'], wanted is a list of 2"),
        ("inner", {"kind": "a", "pair": ["p", "q"]}, "it.inner.pair[1] is 'q'"),
        ("many", {}, "it.many is {}, wanted is a list"),
        ("many", ["b"], "it.many[0] is 'b', wanted is an object"),
        ("other", 1, "it has a field 'other', which is not known"),
    ],
)
def test_one_error_a_rule(field: str, value: Any, words: str) -> None:
    with pytest.raises(EngineFileError) as error:
        read_as(Outer, {**GOOD, field: value}, "it")
    assert words in str(error.value)


@pytest.mark.parametrize("field", list(GOOD))
def test_a_field_that_is_missing(field: str) -> None:
    with pytest.raises(EngineFileError, match=f"it has no field '{field}'"):
        read_as(Outer, {name: one for name, one in GOOD.items() if name != field}, "it")


@pytest.mark.parametrize("value", [None, 3, "x", [GOOD]])
def test_what_is_no_object(value: Any) -> None:
    with pytest.raises(EngineFileError, match="wanted is an object"):
        read_as(Outer, value, "it")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to everything in a JSON value."""
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in pairs:
        yield from places(one, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    whole = copy.deepcopy(value)
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return whole


@pytest.mark.parametrize("value", [SPEC, QUANTIZATION])
def test_mutations(value: Any) -> None:
    """Whatever stands anywhere, it is refused by its name, or is what it says."""
    told = json.loads(json.dumps(dataclasses.asdict(value)))
    refused = 0
    for path in places(told):
        for new in (None, True, -1, 1.5, "x", [], [None], {}, {"x": 1}):
            one = changed(told, path, new)
            try:
                found = read_as(type(value), one, "it")
            except EngineFileError as error:
                assert str(error).startswith("it"), error
                refused += 1
            else:
                assert json.loads(json.dumps(dataclasses.asdict(found))) == one
    assert refused > 100
