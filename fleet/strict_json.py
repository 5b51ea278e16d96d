"""From JSON back to frozen dataclasses of plain values, by the types of their fields; whatever else is refused."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Hashable
from typing import Any, TypeVar, cast

from ..runtime.errors import EngineFileError

T = TypeVar("T")

_MAX_INTEGER = (1 << 63) - 1
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def read_as(kind: type[T], value: Any, where: str) -> T:
    """Return the object whose fields a JSON value has, all of them and no others.

    kind : a dataclass of numbers, texts, Literals, optional values, tuples and such dataclasses
    where : how errors call the value
    raises EngineFileError naming the field, what it is and what it has to be
    """
    return cast("T", _read(kind, value, where))


def _read(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _object(cast("type[Any]", hint), value, where)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if not isinstance(value, str) or value not in args:
            raise _refuse(value, where, f"one of {', '.join(args)}")
        return value
    if origin in (typing.Union, types.UnionType):
        (inner,) = (one for one in args if one is not type(None))
        return None if value is None else _read(inner, value, where)
    if origin is tuple:
        return _tuple(args, value, where)
    return _plain(hint, value, where)


def _object(kind: type[Any], value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _refuse(value, where, "an object")
    hints = _hints(cast("Hashable", kind))
    for name in value:
        if name not in hints:
            raise EngineFileError(f"{where} has a field {name[:60]!r}, which is not known")
    for name in hints:
        if name not in value:
            raise EngineFileError(f"{where} has no field {name!r}")
    return kind(**{name: _read(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})


@functools.cache
def _hints(kind: Hashable) -> dict[str, Any]:
    """Return the types of a dataclass's fields."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(cast("Any", kind))}


def _tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _refuse(value, where, "a list")
    if len(args) == 2 and args[1] is Ellipsis:
        args = args[:1] * len(value)
    elif len(value) != len(args):
        raise _refuse(value, where, f"a list of {len(args)}")
    return tuple(
        _read(hint, one, f"{where}[{idx}]") for idx, (hint, one) in enumerate(zip(args, value, strict=True))
    )


def _plain(hint: Any, value: Any, where: str) -> Any:
    """Return a number, a truth value or a text as it is: a digest over them tells 1 from 1.0."""
    good = type(value) is hint or (hint is float and type(value) is int)
    if good and type(value) is int:
        good = abs(value) <= _MAX_INTEGER
    if good and type(value) is float:
        good = math.isfinite(value)
    if not good:
        raise _refuse(value, where, _WORDS[hint])
    return value


def _refuse(value: Any, where: str, wanted: str) -> EngineFileError:
    got = repr(value)
    return EngineFileError(f"{where} is {got if len(got) <= 60 else f'{got[:57]}...'}, wanted is {wanted}")
