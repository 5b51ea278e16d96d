"""Flags that say what the text must be, and adapters given as NAME=DIR."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..runtime.engine_base import EngineBase
from ..runtime.errors import InvalidArgumentError
from ..runtime.guided import GuidedParams


def guided_params(
    json_schema: str | None, regex: str | None, ebnf: str | None, choice: Sequence[str], json_object: bool
) -> GuidedParams | None:
    """Return what --json-schema, --regex, --ebnf, --choice and --json-object ask for; None when none is given.

    json_schema, ebnf : the text itself, or the name of a file that holds it
    raises InvalidArgumentError for more than one, and a file that cannot be read
    """
    flags = {
        "--json-schema": json_schema,
        "--regex": regex,
        "--ebnf": ebnf,
        "--choice": choice or None,
        "--json-object": json_object or None,
    }
    given = [name for name, value in flags.items() if value is not None]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidArgumentError(f"{' and '.join(given)} say different things of the text; use one of them")
    return GuidedParams(
        json_schema=None if json_schema is None else _text_or_file("--json-schema", json_schema, "{"),
        regex=regex,
        ebnf=None if ebnf is None else _text_or_file("--ebnf", ebnf, "::=", ":"),
        choice=tuple(choice) or None,
        json=json_object,
    )


def _text_or_file(flag: str, value: str, *marks: str) -> str:
    """Return the text of a flag, which names a file unless it has a mark of the text itself."""
    if any(mark in value for mark in marks) and not _is_file(value):
        return value
    if not _is_file(value):
        raise InvalidArgumentError(f"{flag} {value!r} is no file and no text of that kind; give one of them")
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{flag} {value} cannot be read: {error}; give a text file") from error


def _is_file(value: str) -> bool:
    try:
        return Path(value).is_file()
    except (OSError, ValueError):  # a text may be too long for a name
        return False


def load_adapters(engine: EngineBase, assignments: Sequence[str]) -> None:
    """Load each NAME=DIR of --lora. Raises InvalidArgumentError for another form, and what load_adapter raises."""
    for assignment in assignments:
        name, separator, path = assignment.partition("=")
        if not separator or not name or not path:
            raise InvalidArgumentError(
                f"--lora is {assignment!r}, it must be NAME=DIR, e.g. sql=adapters/sql"
            )
        engine.load_adapter(name, path)
