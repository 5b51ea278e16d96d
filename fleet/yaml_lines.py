"""YAML as plain values, with the line that each one comes from; never more than the file's own size of work.

Nothing of a file is run or built: values are null, truths, numbers, texts, lists and mappings with texts as names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ..runtime.errors import InvalidArgumentError
from ..runtime.file_kind import MISSING, no_file

MAX_BYTES = 256 << 10  # some thousands of models
MAX_VALUES = 50_000  # with every alias written out
_MERGE = "tag:yaml.org,2002:merge"
_MAP, _SEQ = "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"
_TEXTS = {"tag:yaml.org,2002:str", "tag:yaml.org,2002:timestamp"}  # a date is no kind of value here
_SCALARS = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float")}

Spot = tuple[str | int, ...]
"""The way to a value: names of mappings and positions in lists."""


@dataclasses.dataclass(frozen=True)
class Document:
    """A file that was read.

    name : how errors call it
    value : what it holds
    lines : of every value, by its spot, from 1; of a mapping's entry that of its name
    """

    name: str
    value: Any
    lines: Mapping[Spot, int]

    def where(self, spot: Spot) -> str:
        """Return "plansmith.yaml:12", the line of a value, or of what would hold it where it is not there."""
        while spot and spot not in self.lines:
            spot = spot[:-1]
        return f"{self.name}:{self.lines.get(spot, 1)}"


def read_yaml(path: Path, name: str) -> Document:
    """Return a file's document; InvalidArgumentError where it is none, or one that is not wanted here."""
    text = _text(path, name)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            raise InvalidArgumentError(f"{name} is empty; write what the fleet has (see docs/fleet.md)")
        reader = _Reader(name)
        reader.check_size(node)
        return Document(name, reader.read(node, ()), reader.lines)
    except RecursionError:
        raise InvalidArgumentError(f"{name} is nested too deeply; a fleet needs six levels") from None
    except yaml.MarkedYAMLError as error:
        raise InvalidArgumentError(_syntax(name, text, error)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InvalidArgumentError(
            f"{name}:{line}: has the character {chr(int(error.character))!r}, which YAML does not allow; remove it"
        ) from None


def _text(path: Path, name: str) -> str:
    """Return the file's text."""
    try:
        if (wrong := no_file(path)) is not None:
            fix = "write one, or name yours with -f" if wrong == MISSING else "give a fleet file"
            raise InvalidArgumentError(f"{name} {wrong}; {fix} (see docs/fleet.md)")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidArgumentError(f"{name} cannot be read ({error.strerror}); check its rights") from error
    if len(data) > MAX_BYTES:
        raise InvalidArgumentError(
            f"{name} has more than {MAX_BYTES >> 10} KiB, which no fleet file needs; give another, or split the fleet"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidArgumentError(
            f"{name}:{line}: is not UTF-8 (byte {data[error.start]:#04x}); save the file as UTF-8"
        ) from None


def _syntax(name: str, text: str, error: yaml.MarkedYAMLError) -> str:
    """Return the sentence of a file that is not YAML."""
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return f"{name}: is not YAML ({error}); correct it"
    where, row = f"{name}:{mark.line + 1}", text.split("\n")[mark.line : mark.line + 1]
    if row and "\t" in row[0][: mark.column + 1]:
        return f"{where}: has a tab where YAML wants spaces; indent with spaces"
    if "single document" in str(error.context):
        return f"{where}: begins a second document; a fleet is one, remove the '---' and what is behind it"
    problem = (error.problem or "").replace("\n", " ")
    return f"{where}: is not YAML ({problem}, column {mark.column + 1}); correct it"


class _Reader:
    """Takes values out of composed nodes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._scalars = yaml.constructor.SafeConstructor()
        self.lines: dict[Spot, int] = {}

    def check_size(self, root: yaml.Node) -> None:
        """Refuse aliases that hold themselves, or that would write out more than a file can."""
        sizes: dict[int, float] = {}

        def size(node: yaml.Node) -> float:
            if id(node) not in sizes:
                sizes[id(node)] = math.inf  # a node that is met inside itself
                sizes[id(node)] = 1.0 + sum(size(child) for child in _children(node))
            return sizes[id(node)]

        if (total := size(root)) > MAX_VALUES:
            what = "hold themselves" if math.isinf(total) else f"make more than {MAX_VALUES} values of it"
            raise InvalidArgumentError(f"{self._name}: its aliases {what}; write out what they stand for")

    def read(self, node: yaml.Node, spot: Spot) -> Any:
        """Return a node's value and note the lines of all that is in it."""
        self.lines.setdefault(spot, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode) and node.tag == _MAP:
            return self._mapping(node, spot)
        if isinstance(node, yaml.SequenceNode) and node.tag == _SEQ:
            return [self.read(one, (*spot, idx)) for idx, one in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag in _TEXTS:
            return node.value
        if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
            return self._scalar(node)
        raise self._refuse(node, f"has the tag {node.tag!r}; give plain values, lists and mappings")

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            value = self._scalars.construct_object(node)
        except ValueError:
            value = math.nan
        if isinstance(value, float) and not math.isfinite(value):
            raise self._refuse(node, f"has {node.value!r}, wanted a number that is finite; correct it")
        return value

    def _mapping(self, node: yaml.MappingNode, spot: Spot) -> dict[str, Any]:
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        inherited: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if key.tag == _MERGE:
                for one in self._merged(value):
                    inherited.setdefault(one[0].value, one)
                continue
            name = self._key(key)
            if name in own:
                first = own[name][0].start_mark.line + 1
                raise self._refuse(
                    key, f"has {name!r} a second time, it is in line {first} already; keep one"
                )
            own[name] = (key, value)
        result = {}
        for name, (key, value) in {**inherited, **own}.items():
            inner = (*spot, name)
            self.lines[inner] = key.start_mark.line + 1
            result[name] = self.read(value, inner)
        return result

    def _merged(self, value: yaml.Node) -> Iterator[tuple[yaml.Node, yaml.Node]]:
        """Return the entries behind "<<:", those that go first in front."""
        for one in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            if not isinstance(one, yaml.MappingNode):
                raise self._refuse(
                    one, "has '<<' with something else than a mapping; give it an alias of one"
                )
            nested = [(key, inner) for key, inner in one.value if key.tag == _MERGE]
            for key, inner in one.value:
                if key.tag != _MERGE:
                    self._key(key)
                    yield key, inner
            for _, inner in nested:
                yield from self._merged(inner)

    def _key(self, key: yaml.Node) -> str:
        if not isinstance(key, yaml.ScalarNode):
            raise self._refuse(key, "has a name that is a list or a mapping; give a word")
        return str(key.value)

    def _refuse(self, node: yaml.Node, what: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self._name}:{node.start_mark.line + 1}: {what}")


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value
