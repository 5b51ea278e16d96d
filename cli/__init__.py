"""The plansmith command."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (sys.argv when None) and exit: 0 done, 1 refused or failed, 2 usage, 130 interrupted."""
    from ._app import run

    run(arguments)
