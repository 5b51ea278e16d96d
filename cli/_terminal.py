"""A model's text on a terminal."""

from __future__ import annotations

import sys

# Control characters but tab and newline: what a model writes must not move the cursor or change the terminal.
_CONTROLS = {code: 0xFFFD for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


def terminal_text(text: str) -> str:
    """Return `text` without control characters if standard output is a terminal; a file or pipe gets it as it is."""
    return text.translate(_CONTROLS) if sys.stdout.isatty() else text
