"""The plansmith command."""

from __future__ import annotations

import os
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (sys.argv when None) and exit: 0 done, 1 refused or failed, 2 usage, 130 interrupted."""
    try:
        _prepare()
        from ._app import run

        run(arguments)
    except KeyboardInterrupt:  # between what _app guards
        _leave()


def _prepare() -> None:
    """Import the commands' own module, which takes a while, with a Ctrl-C that cannot get lost in it."""
    import signal  # here, where an interrupt is seen to

    # Unless somebody ignores Ctrl-C, or has an answer to it.
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, _leave)
    try:
        from . import _app  # noqa: F401
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_signal: object) -> None:
    """End at once: there is nothing to put in order yet, and an exception in the middle of an import may get lost."""
    os.write(2, b"plansmith: interrupted\n")
    os._exit(130)
