"""GitHub's expressions, as far as deploy/ci uses them: literals, contexts, comparisons, logic, a few functions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Functions = Mapping[str, Callable[..., Any]]

_TOKEN = re.compile(
    r"\s*(?:(?P<text>'(?:[^']|'')*')|(?P<number>-?\d+(?:\.\d+)?)"
    r"|(?P<name>[A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)*)|(?P<sign>==|!=|&&|\|\||[!(),]))"
)
_CONSTANTS = {"true": True, "false": False, "null": None}
_HOLE = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
STATUS = ("success", "failure", "always", "cancelled")


def evaluate(expression: str, contexts: Mapping[str, Any], functions: Functions) -> Any:
    """Return an expression's value; raises ValueError for what is not understood."""
    reader = _Reader(
        _tokens(expression), contexts, {"contains": _contains, "fromJSON": json.loads, **functions}
    )
    value = reader.either()
    if reader.tokens:
        raise ValueError(f"{expression!r} goes on with {reader.tokens[0][1]!r}")
    return value


def fill(text: Any, contexts: Mapping[str, Any], functions: Functions) -> Any:
    """Return a value of a workflow with its expressions evaluated; one that is nothing else keeps its kind."""
    if not isinstance(text, str):
        return text
    if (whole := _HOLE.fullmatch(text)) is not None:
        return evaluate(whole[1], contexts, functions)
    return _HOLE.sub(lambda hole: as_text(evaluate(hole[1], contexts, functions)), text)


def condition(text: Any, contexts: Mapping[str, Any], functions: Functions) -> bool:
    """Return whether an `if` holds; one that asks for no status asks for success()."""
    inner = str("success()" if text is None else text).strip()
    inner = inner[3:-2] if inner.startswith("${{") else inner
    if not any(f"{name}(" in inner for name in STATUS):
        inner = f"success() && ({inner})"
    return bool(evaluate(inner, contexts, functions))


def as_text(value: Any) -> str:
    """Return a value as GitHub prints it."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


class _Reader:
    """Reads tokens from the left; each method takes what binds at least as tightly as it says."""

    def __init__(
        self, tokens: list[tuple[str, str]], contexts: Mapping[str, Any], functions: Functions
    ) -> None:
        self.tokens = tokens
        self._contexts = contexts
        self._functions = functions

    def either(self) -> Any:
        value = self._both()
        while self._take("||"):
            other = self._both()
            value = value or other
        return value

    def _both(self) -> Any:
        value = self._compared()
        while self._take("&&"):
            other = self._compared()
            value = value and other
        return value

    def _compared(self) -> Any:
        value = self._one()
        for sign, wanted in (("==", True), ("!=", False)):
            if self._take(sign):
                return (_folded(value) == _folded(self._one())) is wanted
        return value

    def _one(self) -> Any:
        if self._take("!"):
            return not self._one()
        if self._take("("):
            value = self.either()
            self._want(")")
            return value
        kind, token = self.tokens.pop(0)
        if kind == "text":
            return token[1:-1].replace("''", "'")
        if kind == "number":
            return float(token)
        if kind != "name":
            raise ValueError(f"{token!r} is no value")
        if self._take("("):
            return self._call(token)
        return _CONSTANTS[token] if token in _CONSTANTS else self._look_up(token)

    def _call(self, name: str) -> Any:
        arguments: list[Any] = []
        while not self._take(")"):
            arguments.append(self.either())
            self._take(",")
        if name not in self._functions:
            raise ValueError(f"{name}() is not known here")
        return self._functions[name](*arguments)

    def _look_up(self, path: str) -> Any:
        first, *names = path.split(".")
        if first not in self._contexts:
            raise ValueError(f"the context {first} is not there")
        value = self._contexts[first]
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def _take(self, sign: str) -> bool:
        found = bool(self.tokens) and self.tokens[0] == ("sign", sign)
        if found:
            del self.tokens[0]
        return found

    def _want(self, sign: str) -> None:
        if not self._take(sign):
            raise ValueError(f"{sign!r} is missing")


def _tokens(expression: str) -> list[tuple[str, str]]:
    found, at = [], 0
    text = expression.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise ValueError(f"{text[at:]!r} is not understood")
        found.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return found


def _contains(where: Any, what: Any) -> bool:
    if isinstance(where, str):
        return str(what).lower() in where.lower()
    return _folded(what) in [_folded(one) for one in where or ()]


def _folded(value: Any) -> Any:
    """Return a value as == compares it: text without regard to case, nothing as empty text."""
    return "" if value is None else value.lower() if isinstance(value, str) else value
