"""What is said of a command line that is not understood: one sentence, with the words as they were typed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from . import legacy

# What Typer says is wanted -> what we say.
_WANTED = (
    (r"Input should be a valid integer.*", "a whole number"),
    (r"Input should be a valid number.*", "a number"),
    (r"Input should be (.*)", r"\1"),
    (r"it must be (.*)", r"\1"),
)


def is_usage_error(error: Exception) -> bool:
    """Return whether `error` is Typer's, for the user; it is not always click's class, Typer may carry its own."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def usage_sentence(error: Any, typed: Sequence[str]) -> str:
    """Return what is wrong, what was given, what is wanted, and where the help is.

    typed : the command line, before names of options were normalized
    """
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else _command(typed)
    return f"{_what(error, typed)}; see: {command} --help"


def _command(typed: Sequence[str]) -> str:
    """Return the command that was asked for, where the parser does not say."""
    return " ".join(["plansmith", *(word for word in typed[:1] if not word.startswith("-"))])


def _what(error: Any, typed: Sequence[str]) -> str:
    kind, message = type(error).__name__, str(error.format_message()).rstrip(".")
    if kind == "NoSuchOption":
        near = ", ".join(error.possibilities or ())
        return f"there is no option {_find([error.option_name], typed)[0]}" + (
            f", did you mean {near}?" if near else ""
        )
    if kind == "MissingParameter":
        return f"{_name(error.param, typed)} is missing"
    if kind == "BadOptionUsage":
        name = _find([error.option_name], typed)[0]
        return f"{name} takes no value" if "not take" in message else f"{name} has no value, give one"
    if kind == "BadParameter":
        return _bad_value(error, typed)
    unknown = re.match(r"No such command '(.*?)'\.?\s*(.*)", message)
    if unknown:
        near = unknown[2][:1].lower() + unknown[2][1:]
        return f"there is no command {unknown[1]!r}" + (f", {near}" if near else "")
    extra = re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", message)
    if extra:
        return f"{extra[1]!r} is more than this command takes; leave it out"
    return message[:1].lower() + message[1:]


def _bad_value(error: Any, typed: Sequence[str]) -> str:
    hint = error.param_hint or (error.param.opts if error.param is not None else None)
    if hint is None:
        return str(error.message)
    names = [hint] if isinstance(hint, str) else list(hint)
    name, value = _find(names, typed)
    given = "" if value is None else f" is {value!r}"
    for pattern, replacement in _WANTED:
        match = re.fullmatch(pattern, error.message)
        if match:
            return f"{name}{given}, it must be {match.expand(replacement)}"
    return f"{name}{given}: {str(error.message).rstrip('.')}"


def _name(param: Any, typed: Sequence[str]) -> str:
    """Return a parameter's name: of an option as typed, of an argument in capitals."""
    if param is None:
        return "an argument"
    if param.param_type_name == "argument":
        return str(param.metavar or param.name).upper()
    return _find(param.opts, typed)[0]


def _find(names: Sequence[str], typed: Sequence[str]) -> tuple[str, str | None]:
    """Return an option's name and value as typed, the last time it is given; its long name and None without."""
    found: tuple[str, str | None] = (max(names, key=len), None)
    for n, word in enumerate(typed):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if legacy.normalize([name])[0] in names:
            found = (name, value if equals else next(iter(typed[n + 1 : n + 2]), None))
    return found
