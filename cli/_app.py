"""The Typer app: which commands there are, and what an error looks like to the caller.

Only the command that is asked for is imported, so `plansmith --help` is quick and an extra that is not installed
matters to those commands alone that need it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_type_hints

import typer

from ..runtime.errors import BuildError, Error, InvalidArgumentError
from . import legacy, quantize_legacy
from ._files import naming
from ._usage import is_usage_error, usage_sentence

T = TypeVar("T")

# name -> (module of this folder, function, one line for the list of commands)
COMMANDS = {
    "build": ("build", "build", "Compile a checkpoint into an engine directory."),
    "verify": ("verify", "verify", "Compare the cpu plan's logits with the reference's."),
    "quantize": ("quantize", "quantize", "Quantize a checkpoint with NVIDIA ModelOpt."),
    "eval": ("eval", "evaluate", "Measure what an engine's precision costs in quality."),
    "inspect": ("inspect", "inspect", "Show what an engine directory holds."),
    "generate": ("generate", "generate", "Generate text with an engine."),
    "serve": ("serve", "serve", "Serve an engine over the OpenAI API."),
    "warm": ("warm", "warm", "Ready a node: have engines' files in memory, and keep them there."),
    "triton-repo": ("triton_repo", "triton_repo", "Write a Triton model repository for an engine."),
    "bench": ("bench", "bench", "Measure an engine's speed and memory."),
    "size": ("size", "size", "Predict the memory and speed of a model on GPUs."),
}
# group -> (one line, its commands)
GROUPS = {
    "checkpoint": (
        "Get checkpoints.",
        {"demo": ("checkpoint", "demo", "Fetch a small real checkpoint from the package registry.")},
    ),
    "triton": (
        "Run a Triton server over a model repository.",
        {
            "start": ("triton", "start", "Start a tritonserver and watch over it."),
            "stop": ("triton", "stop", "Let running requests finish, then stop it."),
            "status": ("triton", "status", "Tell how it is."),
        },
    ),
    "fleet": (
        "Keep the engines of models, recipes and GPUs true to one file.",
        {
            "plan": ("fleet", "plan", "Show what would be built, where and why."),
            "status": ("fleet", "status", "Tell what is stale, and which input made it so."),
            "matrix": ("fleet", "matrix", "Print what is to be built as jobs of a CI system."),
            "build": ("fleet_build", "build", "Compile what the store lacks, and assemble the engines."),
            "push": ("fleet_store", "push", "Bring what is built here to the fleet's remote store."),
            "pull": ("fleet_store", "pull", "Get plans from the remote store, and assemble the engines."),
            "gc": ("fleet_store", "gc", "Remove what no member of a fleet needs any more."),
            "verify": ("fleet_store", "verify", "Read the whole store and check every hash."),
            "keygen": ("fleet_store", "keygen", "Make a key that signs what is pushed."),
        },
    ),
}
# package -> the extra that installs it
_EXTRAS = {
    "tensorrt_rtx": "rtx",
    "onnxruntime": "verify",
    "llguidance": "guided",
    **dict.fromkeys(("torch", "transformers", "modelopt", "accelerate"), "quantize"),
    **dict.fromkeys(
        ("fastapi", "starlette", "pydantic", "uvicorn", "httptools", "prometheus_client"), "serve"
    ),
    **dict.fromkeys(("tritonclient", "google"), "triton"),
    **dict.fromkeys(("yaml", "jsonschema", "fsspec", "cryptography", "pyfastcdc"), "fleet"),
}


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Parse, run, and exit the process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in given
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, _terminate)  # a terminal that is closed
    _prepare_streams()
    try:
        words = guarded(_words, as_json)(given)
        app = guarded(make_app, as_json)(words)
        status = guarded(app, as_json)(args=words, prog_name="plansmith", standalone_mode=False)
    except typer.Abort:
        sys.exit(1)
    except Exception as error:
        if not is_usage_error(error):
            raise
        _report_usage(error, given, as_json)
        sys.exit(2)
    sys.exit(status if isinstance(status, int) else 0)


def _report_usage(error: Exception, given: Sequence[str], as_json: bool) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":  # its text is the help
        print(str(error), file=sys.stderr)
        return
    text = usage_sentence(error, given)
    print(f"plansmith: {text}", file=sys.stderr)
    if as_json:
        _print_error("UsageError", text)


def _words(given: Sequence[str]) -> list[str]:
    """Return the command line in our own names, all of it text."""
    words = [_text(word) for word in given]
    if words[:1] == ["build"]:
        words[1:] = legacy.translate(words[1:])
    if words[:1] == ["quantize"]:
        words[1:] = legacy.translate(words[1:], quantize_legacy.FLAGS, {}, "quantize.py")
    return legacy.normalize(words)


def _text(word: str) -> str:
    """Return an argument as text that can be encoded, whatever the locale; the bytes are UTF-8 or it is refused."""
    try:
        word.encode()
    except UnicodeEncodeError:
        try:
            return os.fsencode(word).decode()
        except UnicodeError:
            raise InvalidArgumentError(
                f"the argument {word!r} is not UTF-8; write it in UTF-8, or rename the file"
            ) from None
    return word


def _prepare_streams() -> None:
    """Give closed standard streams a place, and let no character fail where the locale cannot show it."""
    while (hole := os.open(os.devnull, os.O_RDWR)) <= 2:  # else a plan would be written into descriptor 1
        pass
    os.close(hole)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115
    plain = sys.__stdout__
    if plain is not None and plain is sys.stdout and plain.fileno() == 1:
        raw = _StandardOutput(1, "w", closefd=False)
        unbuffered = plain.write_through  # python -u
        sys.stdout = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),
            plain.encoding,
            line_buffering=plain.line_buffering,
            write_through=unbuffered,
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class _StandardOutput(io.FileIO):
    """Standard output, whose errors tell its name."""

    def write(self, data: Any, /) -> int:
        """Write bytes and return how many."""
        with naming("standard output"):
            return super().write(data)


def _terminate(number: int, frame: object) -> NoReturn:
    """End by an exception, so that a build removes its work directory."""
    raise SystemExit(128 + number)


def make_app(words: Sequence[str]) -> typer.Typer:
    """Return the app with the real command of `words`, and names with a line of help for the others."""
    app = typer.Typer(
        help="Compile checkpoints into engines for CPUs and GPUs, check them, and run them.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # whose tables cut long option names off
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    _register(app, COMMANDS, words)
    for name, (line, commands) in GROUPS.items():
        group = typer.Typer(no_args_is_help=True, help=line, rich_markup_mode=None)
        group.callback()(_group)
        _register(group, commands, words[1:] if words[:1] == [name] else ())
        app.add_typer(group, name=name)
    return app


def _register(app: typer.Typer, commands: dict[str, tuple[str, str, str]], words: Sequence[str]) -> None:
    for name, (module, function, line) in commands.items():
        if name in words[:1]:
            body = getattr(importlib.import_module(f".{module}", __package__), function)
            _refuse_empty_paths(body, words)
            app.command(name, short_help=line)(guarded(body, "--json" in words))
        else:
            app.command(name, help=line)(_absent)


def _refuse_empty_paths(body: Callable[..., Any], words: Sequence[str]) -> None:
    """Refuse an empty word as the value of an option that takes a path: Path("") is the current directory."""
    flags: set[str] = set()
    for name, hint in get_type_hints(body, include_extras=True).items():
        kind, *notes = get_args(hint) or (hint,)
        if kind is Path or Path in get_args(kind):
            # Of an Annotated option Typer keeps the first name as the default.
            names = [one for note in notes for one in (note.default, *(note.param_decls or ()))]
            flags.update([one for one in names if isinstance(one, str)] or [f"--{name.replace('_', '-')}"])
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        if word == "--":
            return
        flag, equals, value = word.partition("=")
        if flag in flags and not (value if equals else following):
            raise typer.BadParameter("a path is empty; give one, or leave the option out", param_hint=flag)


def _absent() -> None:
    """Stand in for a command in the list of commands."""


def _group() -> None:
    """Stand in for what a group of commands does by itself."""


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


def guarded(body: Callable[..., T], as_json: bool) -> Callable[..., T]:
    """Return `body` with its errors as one sentence on stderr and exit code 1; with as_json also as JSON on stdout.

    PLANSMITH_TRACEBACK=1 lets the exception through instead.
    """

    @functools.wraps(body)
    def call(*arguments: Any, **options: Any) -> T:
        try:
            result = body(*arguments, **options)
            sys.stdout.flush()  # what does not fit on the disk must show as an error
            return result
        except KeyboardInterrupt:
            print("plansmith: interrupted", file=sys.stderr)
            sys.exit(130)
        except Exception as error:
            # Typer's own (usage errors, exits) and a reader that went away are Typer's to handle.
            foreign = type(error).__module__.partition(".")[0] in ("typer", "click")
            if foreign or isinstance(error, BrokenPipeError) or os.environ.get("PLANSMITH_TRACEBACK") == "1":
                raise
            _report(error, as_json)
            sys.exit(1)

    return call


def _report(error: Exception, as_json: bool) -> None:
    """Print what went wrong."""
    text = error_sentence(error)
    print(f"plansmith: {text}", file=sys.stderr)
    if isinstance(error, BuildError):
        for line in error.log_lines[-8:]:
            print(f"    {line}", file=sys.stderr)
    if as_json:
        _print_error(type(error).__name__, text)
    try:
        sys.stdout.flush()
    except OSError:  # nothing more can be said there; or the interpreter would try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _print_error(kind: str, text: str) -> None:
    with contextlib.suppress(OSError):
        print(json.dumps({"error": {"kind": kind, "message": text}}))


def error_sentence(error: Exception) -> str:
    """Return an error as one sentence for people, with what to do."""
    if isinstance(error, Error):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "free some space, or write elsewhere" if full else "check the path and its rights"
        return f"{where}{error.strerror or error}; {fix}"
    if isinstance(error, UnicodeError):
        return f"a text is not UTF-8 ({error}); save it as UTF-8, or set LC_ALL=C.UTF-8"
    if isinstance(error, MemoryError):
        return f"out of memory ({error}); ask for less at once, or take a machine with more memory"
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        extra = _EXTRAS.get(package) or ",".join(dict.fromkeys(_EXTRAS.values()))
        return f"a Python package is missing: {error}; run: pip install 'plansmith[{extra}]'"
    return (
        f"{type(error).__name__}: {error}; this is a bug in plansmith, run again with PLANSMITH_TRACEBACK=1 and "
        "report what it prints"
    )
