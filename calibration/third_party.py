"""Keeps what torch, transformers and ModelOpt say out of our output; what they raise goes through."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import warnings
from collections.abc import Iterator

from ..runtime.errors import Error, OutOfMemoryError

_IO_ERROR = re.compile(
    r"\b(?:os error|code:) (\d+)\b"
)  # as the safetensors library writes an error of the system
_NO_MEMORY = ("allocate memory", "not enough memory", "CUDA out of memory")

_LOGGERS = ("transformers", "modelopt", "torch", "accelerate", "huggingface_hub")


def is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out: torch says so with RuntimeErrors that differ in their words alone."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in _NO_MEMORY)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings, logs and prints of the libraries inside the block; PLANSMITH_TRACEBACK=1 lets them through.

    Not for threads that print at the same time: standard output is redirected, standard error is not, and progress
    goes there.
    """
    if os.environ.get("PLANSMITH_TRACEBACK") == "1":
        yield
        return
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    bars = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS"), os.environ.get("TQDM_DISABLE")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = os.environ["TQDM_DISABLE"] = "1"
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            for name in _LOGGERS:
                logging.getLogger(name).setLevel(logging.CRITICAL)
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for name, value in zip(("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"), bars, strict=True):
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn the libraries' own errors for a full disk or memory inside the block into OSError and OutOfMemoryError."""
    try:
        yield
    except (Error, OSError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            what = str(error).partition("\n")[0] or type(error).__name__
            raise OutOfMemoryError(
                f"memory ran out while quantizing ({what}); give a smaller --batch-size or "
                "--calib-length, or take a machine with more memory"
            ) from error
        system = _IO_ERROR.search(str(error))
        if system is not None:
            raise OSError(int(system[1]), os.strerror(int(system[1]))) from error
        raise
