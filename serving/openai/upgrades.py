"""Takes the offer of another protocol out of a request's head, as a server may pass over it (RFC 9110, 7.8).

The parser would take what follows for that protocol: Java's client offers HTTP/2 with every request, and its body would
be lost.
"""

from __future__ import annotations

_NAME = b"upgrade:"


class UpgradeFilter:
    """The heads of one connection, which come in pieces."""

    def __init__(self) -> None:
        self._held = b""  # the beginning of a line that may be an offer, or the head's end
        self._inside_line = False

    def feed(self, data: bytes) -> bytes:
        """Return the bytes of a head without offers, and what is behind it as it is.

        The beginning of a line that may be an offer waits for its end.
        """
        data, self._held = self._held + data, b""
        out: list[bytes] = []
        at = 0
        while at < len(data):
            end = data.find(b"\n", at) + 1
            if not end:
                out.append(self._piece(data[at:]))
                break
            line, at = data[at:end], end
            is_whole, self._inside_line = not self._inside_line, False
            if is_whole and line in (b"\r\n", b"\n"):
                out += [line, data[at:]]
                break
            if not is_whole or line[: len(_NAME)].lower() != _NAME:
                out.append(line)
        return b"".join(out)

    def _piece(self, begin: bytes) -> bytes:
        """Return what can go on of a line that has no end yet."""
        may_be = begin == b"\r" or _NAME.startswith(begin[: len(_NAME)].lower())
        if may_be and not self._inside_line:
            self._held = begin
            return b""
        self._inside_line = True
        return begin
