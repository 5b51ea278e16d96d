"""Reads one tool call's JSON as it is generated: its name, then its arguments in pieces."""

from __future__ import annotations

import json

_ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class ValueEnd:
    """Finds where a JSON value ends. It is not checked further."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._begun = False

    def take(self, char: str) -> str:
        """Return "more" for a character of the value, "last" for its last one, "behind" for one that follows it."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                return "more" if self._depth else "last"
            return "more"
        if not self._depth and self._begun and char in ",}] \t\r\n":
            return "behind"  # a number or a word
        self._begun = True
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return "more" if self._depth > 0 else "last"
        return "more"


class CallScanner:
    """One {"name": ..., "arguments": {...}}, fed from its opening brace on.

    name : None until it is known
    pieces : of the arguments' JSON, what is new since they were taken
    done : the closing brace was read
    failed : it is no such object
    """

    def __init__(self, name: str | None = None) -> None:
        """Begin. name : given where only the arguments follow, as in NAME[ARGS]{...}."""
        self.name = name
        self.done = False
        self.failed = False
        self._bare = name is not None
        self._state = "value" if self._bare else "open"
        self._key = "arguments" if self._bare else ""
        self._text = ""
        self._value = ValueEnd()
        self._waiting = ""
        self._has_arguments = False

    def feed(self, text: str) -> int:
        """Take characters up to the end of the call and return how many were taken."""
        for i, char in enumerate(text):
            if self.done or self.failed:
                return i
            self._take(char)
        return len(text)

    def take_pieces(self) -> str:
        """Return new text of the arguments; none before the name is known."""
        if self.name is None:
            return ""
        pieces, self._waiting = self._waiting, ""
        if self.done and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        return pieces

    def _take(self, char: str) -> None:
        step = getattr(self, f"_in_{self._state}")
        step(char)

    def _in_open(self, char: str) -> None:
        self._expect(char, {"{": "key"})

    def _in_key(self, char: str) -> None:
        if char == "}":
            self._end()
        elif char == '"':
            self._state, self._text, self._value = "name", char, ValueEnd()
            self._value.take(char)
        elif char != ",":
            self._expect(char, {})

    def _in_name(self, char: str) -> None:
        self._text += char
        if self._value.take(char) == "last":
            self._key = str(_loads(self._text))
            self._state = "colon"

    def _in_colon(self, char: str) -> None:
        self._expect(char, {":": "value"})
        self._text, self._value = "", ValueEnd()

    def _in_value(self, char: str) -> None:
        if not self._text and char in _SPACE:
            return
        what = self._value.take(char)
        if what != "behind":
            self._note(char)
        if what == "more":
            return
        self._end_value()
        if what == "behind" and not self.done:
            self._take(char)

    def _note(self, char: str) -> None:
        """Take a character of the value. Arguments that are objects come out at once, all else when it is whole."""
        self._text += char
        if self._key in _ARGUMENT_KEYS and self._text[0] == "{":
            self._has_arguments = True
            self._waiting += char

    def _end_value(self) -> None:
        self._state = "key"
        value = _loads(self._text)
        if self._key == "name":
            self.name = value if isinstance(value, str) else None
        elif self._key in _ARGUMENT_KEYS and self._text[0] == '"' and isinstance(value, str):
            whole = value.encode("utf-8", "replace").decode()  # an escape may be half a character
            self._waiting, self._has_arguments = whole or "{}", True  # JSON inside a text
        if self._bare:
            self._end()

    def _end(self) -> None:
        self.done = True
        self.failed = self.name is None

    def _expect(self, char: str, then: dict[str, str]) -> None:
        if char in then:
            self._state = then[char]
        elif char not in _SPACE:
            self.failed = True


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
