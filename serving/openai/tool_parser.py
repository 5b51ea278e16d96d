"""A model's text, as it comes, taken apart into what it says and the tools it calls."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection

from .call_scanner import CallScanner
from .tools import ToolFormat

_PYTHON_TAG = "<|python_tag|>"
_NAMED = re.compile(r"([A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?\s*(?=\{)")
_MAX_NAME = 200


@dataclasses.dataclass(frozen=True)
class Said:
    """Text of the answer."""

    text: str


@dataclasses.dataclass(frozen=True)
class Called:
    """A call begins, or goes on: `arguments` is what is new of their JSON.

    id, name : with the first piece of a call only
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


Event = Said | Called


class ToolParser:
    """One choice of an answer. What looks like a call and is none, or calls what is not there, is text.

    names : of the tools that were given
    most : calls; what follows them is dropped, as a model asked for one call may not stop after it
    """

    def __init__(self, form: ToolFormat, names: Collection[str], most: int | None = None) -> None:
        self.num_calls = 0
        self._form = form
        self._names = frozenset(names)
        self._most = most
        self._buffer = ""
        self._raw = ""  # of a call that may still turn out to be text
        self._space = ""  # before the answer's first word; if only calls follow it is no text
        self._said = False
        self._told = False  # of the call that is read: its name is out
        self._in_list = False
        self._scanner = CallScanner()
        self._step: Callable[[list[Event]], bool] = self._text if form.opening else self._begin

    def feed(self, text: str) -> list[Event]:
        """Take new text and return what is certain now."""
        self._buffer += text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """Return the rest: the text has ended."""
        events: list[Event] = []
        rest, self._buffer = self._raw + self._buffer, ""
        is_dropped = self._step == self._call and self._is_beyond
        if not self._told and not is_dropped and (self._step != self._between or rest.strip()):
            self._say(events, rest)
        self._raw = ""
        return events

    def _text(self, events: list[Event]) -> bool:
        """Between words: look for the marker, and keep what may be its beginning."""
        marker = self._form.opening
        if not marker:
            self._say(events, self._buffer)
            self._buffer = ""
            return False
        at = self._buffer.find(marker)
        if at < 0:
            kept = _overlap(self._buffer, marker)
            cut = len(self._buffer) - kept
            self._say(events, self._buffer[:cut])
            self._buffer = self._buffer[cut:]
            return False
        self._say(events, self._buffer[:at])
        self._move(0, skip=at + len(marker))
        self._raw = marker
        self._step = self._open
        return True

    def _begin(self, events: list[Event]) -> bool:
        """At the beginning of an answer whose calls have no marker: an object is one."""
        self._raw += self._strip()
        if _PYTHON_TAG.startswith(self._buffer[: len(_PYTHON_TAG)]) and self._buffer != "":
            if len(self._buffer) < len(_PYTHON_TAG):
                return False
            self._raw += self._move(len(_PYTHON_TAG))
            return True
        return self._open(events)

    def _open(self, events: list[Event]) -> bool:
        """Where a call may begin."""
        self._raw += self._strip()
        if not self._buffer:
            return False
        first = self._buffer[0]
        if first == "{":
            self._scanner = CallScanner()
            self._step = self._call
            return True
        if self._form.name == "mistral" and first == "[" and not self._in_list:
            self._in_list = True
            self._raw += self._move(1)
            return True
        if self._form.name == "mistral" and not self._in_list:
            return self._named(events)
        return self._give_up(events)

    def _named(self, events: list[Event]) -> bool:
        """NAME[ARGS]{...}: the name stands before the object."""
        match = _NAMED.match(self._buffer)
        if match is None:
            if len(self._buffer) < _MAX_NAME and "{" not in self._buffer:
                return False
            return self._give_up(events)
        self._raw += self._move(match.end())
        self._scanner = CallScanner(match[1])
        self._step = self._call
        return True

    def _call(self, events: list[Event]) -> bool:
        """Inside a call's JSON."""
        scanner = self._scanner
        self._raw += self._move(scanner.feed(self._buffer))
        wrong = scanner.name is not None and scanner.name not in self._names
        if not self._told and (scanner.failed or wrong):
            return self._give_up(events)
        if scanner.name is not None and (self._told or not self._is_beyond):
            self._tell(events)
        if not (scanner.done or scanner.failed):
            return False
        self._told, self._raw = False, ""
        self._step = self._between
        return True

    @property
    def _is_beyond(self) -> bool:
        """Whether there were as many calls as may be."""
        return self._most is not None and self.num_calls >= self._most

    def _tell(self, events: list[Event]) -> None:
        pieces = self._scanner.take_pieces()
        if not self._told:
            self._told = True
            self.num_calls += 1
            events.append(Called(self.num_calls - 1, pieces, self._form.new_id(), self._scanner.name))
        elif pieces:
            events.append(Called(self.num_calls - 1, pieces))

    def _between(self, events: list[Event]) -> bool:
        """Behind a call: its closing, then another one or text."""
        self._strip()
        if not self._buffer:
            return False
        closing = self._form.closing
        if closing and closing.startswith(self._buffer[: len(closing)]):
            if len(self._buffer) < len(closing):
                return False
            self._move(len(closing))
            self._step = self._after
            return True
        separators = {"mistral": ",]", "llama3": ";,"}.get(self._form.name, "")
        if self._buffer[0] in separators:
            ends = self._move(1) == "]"
            self._in_list = self._in_list and not ends
            self._step = self._after if ends else self._open
            return True
        self._step = self._after
        return True

    def _after(self, events: list[Event]) -> bool:
        """Behind a whole call: space before what follows is no text."""
        self._strip()
        if not self._buffer:
            return False
        self._step = self._text if self._form.opening else self._begin
        return True

    def _give_up(self, events: list[Event]) -> bool:
        """Treat what was read as text after all."""
        self._say(events, self._raw)
        self._raw, self._in_list = "", False
        if not self._form.opening:
            self._say(events, self._buffer)
            self._buffer = ""
        self._step = self._text
        return bool(self._buffer)

    def _say(self, events: list[Event], text: str) -> None:
        text = self._space + text
        if not self._said and not text.strip():
            self._space = text
            return
        self._space = ""
        if text:
            self._said = True
            events.append(Said(text))

    def _strip(self) -> str:
        """Take the space that the buffer begins with, and return it."""
        return self._move(len(self._buffer) - len(self._buffer.lstrip()))

    def _move(self, count: int, *, skip: int = 0) -> str:
        """Take characters from the buffer and return them."""
        taken, self._buffer = self._buffer[:count], self._buffer[count + skip :]
        return taken


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that `marker` begins with."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0
