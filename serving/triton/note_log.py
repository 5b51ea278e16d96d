"""What requests had that has no effect, in the server's log."""

from __future__ import annotations

from collections.abc import Callable, Iterable

__all__ = ["NoteLog"]

_MAX_CHARS = 300


class NoteLog:
    """Writes each note once: a line costs a call to the server, and clients repeat themselves. One thread at a time.

    write : writes a line
    max_notes : so many are written, then no more, as a client can make up any number
    """

    def __init__(self, write: Callable[[str], None], max_notes: int = 100) -> None:
        self._write = write
        self._max_notes = max_notes
        self._written: set[str] = set()

    def add(self, notes: Iterable[str]) -> None:
        """Write those of the notes that are new."""
        for note in notes:
            text = note if len(note) <= _MAX_CHARS else note[: _MAX_CHARS - 3] + "..."
            if text in self._written or len(self._written) >= self._max_notes:
                continue
            self._written.add(text)
            self._write(f"a request has what has no effect, told once: {text}")
            if len(self._written) == self._max_notes:
                self._write(f"{self._max_notes} notes on requests are written; further ones are not")
