"""Typed, strict reading of JSON into dataclasses, for manifest.py. Standard library only.

A dataclass field carries its reader; `Fields.read` refuses what is missing, unknown or out of range, and names it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import EngineFileError

Reader = Callable[[Any, str], Any]
F = TypeVar("F", bound="Fields")

MAX_TEXT = 4096
MAX_LONG_TEXT = 1 << 16
MAX_INTEGER = (1 << 63) - 1
REBUILD = "build the engine again"
# Plain names only: no "..", no absolute path, no drive, no surprises in a shell.
PATH_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*(/[A-Za-z0-9_][A-Za-z0-9_.+-]*)*")
TIME_PATTERN = re.compile(r"[0-9]{4}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-6][0-9]Z")


def _refuse(where: str, value: Any, wanted: str) -> EngineFileError:
    got = repr(value)
    got = got if len(got) <= 60 else got[:57] + "..."
    return EngineFileError(f"{where} is {got}, it must be {wanted}; {REBUILD}")


class Fields:
    """Base of the manifest's dataclasses."""

    @classmethod
    def read(cls: type[F], value: Any, where: str) -> F:
        """Return the object of a JSON value; `where` names it in errors. Raises EngineFileError."""
        if not isinstance(value, dict):
            raise _refuse(where, value, "an object")
        readers: dict[str, Reader] = {
            field.name: field.metadata["read"]
            for field in dataclasses.fields(cls)  # type: ignore[arg-type]
            if "read" in field.metadata
        }
        for name in value:
            if name not in readers:
                raise EngineFileError(
                    f"{where} has a field {name[:60]!r} that this plansmith does not know; upgrade plansmith, "
                    f"or {REBUILD}"
                )
        optional = {field.name for field in dataclasses.fields(cls) if "optional" in field.metadata}  # type: ignore[arg-type]
        for name in readers:
            if name not in value and name not in optional:
                raise EngineFileError(f"{where} lacks the field {name!r}; {REBUILD}")
        separator = ": " if where.endswith(".json") else "."
        return cls(
            **{
                name: reader(value[name], f"{where}{separator}{name}")
                for name, reader in readers.items()
                if name in value
            }
        )


def _field(reader: Reader) -> Any:
    return dataclasses.field(metadata={"read": reader})


def integer(low: int, high: int = MAX_INTEGER) -> Any:
    """Field: an integer, low..high inclusive."""
    return _field(lambda value, where: _integer(value, where, low, high))


def _integer(value: Any, where: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _refuse(where, value, f"an integer from {low} to {high}")
    return value


def optional_integer(low: int, high: int) -> Any:
    """Field: an integer or null."""
    return _field(lambda value, where: None if value is None else _integer(value, where, low, high))


def number(low: float) -> Any:
    """Field: a finite number, at least low."""

    def reader(value: Any, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= 1e300:
            raise _refuse(where, value, f"a number of at least {low}")
        return float(value)

    return _field(reader)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value or len(value) > MAX_TEXT or not value.isprintable():
        raise _refuse(where, value, f"a text of 1 to {MAX_TEXT} printable characters")
    return value


def text() -> Any:
    """Field: one line of text, not empty."""
    return _field(_text)


def one_of(*choices: str) -> Any:
    """Field: one of some texts."""

    def reader(value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in choices:
            raise _refuse(where, value, " or ".join(repr(choice) for choice in choices))
        return value

    return _field(reader)


def _matching(pattern: re.Pattern[str], wanted: str) -> Reader:
    def reader(value: Any, where: str) -> str:
        if not isinstance(value, str) or len(value) > MAX_TEXT or not pattern.fullmatch(value):
            raise _refuse(where, value, wanted)
        return value

    return reader


def relative_path() -> Any:
    """Field: a path inside the engine directory."""
    return _field(
        _matching(PATH_PATTERN, "a relative path inside the engine directory, of plain names without '..'")
    )


def sha256() -> Any:
    """Field: 64 hex digits."""
    return _field(_matching(re.compile(r"[0-9a-f]{64}"), "a sha256 of 64 hex digits"))


def time() -> Any:
    """Field: a UTC time to the second."""
    return _field(_matching(TIME_PATTERN, "a UTC time such as 2026-01-31T12:00:00Z"))


def _list(item: Reader) -> Any:
    def reader(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _refuse(where, value, "a list")
        return tuple(item(one, f"{where}[{n}]") for n, one in enumerate(value))

    return _field(reader)


def integers(low: int, high: int) -> Any:
    """Field: a list of integers."""
    return _list(lambda value, where: _integer(value, where, low, high))


def texts() -> Any:
    """Field: a list of texts."""
    return _list(_text)


def entry(kind: type[Fields]) -> Any:
    """Field: an object of another dataclass."""
    return _field(kind.read)


def optional_entry(kind: type[Fields]) -> Any:
    """Field: an object of another dataclass, or None, which is not written: files from before the field have none."""
    return dataclasses.field(default=None, metadata={"read": kind.read, "optional": True})


def entries(kind: type[Fields]) -> Any:
    """Field: a list of such objects."""
    return _list(kind.read)


def entry_map(kind: type[Fields]) -> Any:
    """Field: such objects by name."""

    def reader(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _refuse(where, value, "an object")
        for name in value:
            if not re.fullmatch(r"[a-z][a-z0-9_-]{0,63}", name):
                raise _refuse(f"a name in {where}", name, "lower-case letters, digits, '_' and '-'")
        return {name: kind.read(one, f"{where}.{name}") for name, one in value.items()}

    return _field(reader)


def texts_by_name() -> Any:
    """Field: texts by name, which may be empty; names are those of options, settings and weights."""

    def reader(value: Any, where: str) -> dict[str, str]:
        if not isinstance(value, dict):
            raise _refuse(where, value, "an object")
        for name, one in value.items():
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,255}", name):
                raise _refuse(f"a name in {where}", name, "letters, digits, '_', '.', '+', '/' and '-'")
            if not isinstance(one, str) or len(one) > MAX_LONG_TEXT or not one.isprintable():
                raise _refuse(
                    f"{where}.{name[:60]}", one, f"a text of up to {MAX_LONG_TEXT} printable characters"
                )
        return dict(value)

    return _field(reader)


def to_json(value: Any) -> Any:
    """Return a Fields object as plain JSON values, in the order of its fields."""
    if isinstance(value, Fields):
        fields = dataclasses.fields(value)  # type: ignore[arg-type]
        present = {f.name: getattr(value, f.name) for f in fields if "read" in f.metadata}
        left_out = {f.name for f in fields if "optional" in f.metadata and present[f.name] is None}
        return {name: to_json(one) for name, one in present.items() if name not in left_out}
    if isinstance(value, dict):
        return {key: to_json(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(one) for one in value]
    return value


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in `data`; EngineFileError for anything else, repeated names included."""
    try:
        content = json.loads(data.decode(), object_pairs_hook=_no_repeats, parse_constant=_no_constants)
    except (ValueError, RecursionError) as error:
        raise EngineFileError(
            f"{where} is not valid JSON ({error}); copy the engine again, or {REBUILD}"
        ) from error
    if not isinstance(content, dict):
        raise _refuse(where, content, "a JSON object")
    return content


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {repeated[:60]!r} appears twice in one object")
    return dict(pairs)


def _no_constants(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
