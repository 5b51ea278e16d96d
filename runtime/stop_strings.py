"""Stop strings, matched on text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on until a stop string is complete, holding back what may be the beginning of one.

    The string that is complete first wins (of several, the longest), so the cut does not depend on how the text
    was cut into pieces. `matched` is the string found, else None.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        # Longest first: of those complete at the same character, the one that began first.
        self._strings = sorted(strings, key=len, reverse=True)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return what of the text so far is certain to come before any stop string."""
        if not self._strings or self.matched is not None:
            return "" if self.matched is not None else text
        self._held += text
        found = self._first_match()
        if found is not None:
            start, self.matched = found
            out, self._held = self._held[:start], ""
            return out
        keep = self._possible_prefix()
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def flush(self) -> str:
        """Return the text held back; the stream has ended without completing a stop string."""
        out, self._held = self._held, ""
        return out

    def _first_match(self) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for string in self._strings:
            start = self._held.find(string)
            if start >= 0 and (best is None or start + len(string) < best[0]):
                best = (start + len(string), start, string)
        return None if best is None else best[1:]

    def _possible_prefix(self) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        for length in range(min(len(self._held), len(self._strings[0]) - 1), 0, -1):
            tail = self._held[-length:]
            if any(string.startswith(tail) for string in self._strings):
                return length
        return 0
