"""A process that does the same in every run, so that a compiler gives the same bytes each time.

TensorRT-RTX 1.7 lists a plan's tensors in the order of addresses, numbers symbolic dimensions as it meets them, and
writes structures with the padding between their fields, which holds whatever the memory held. So two compiles give one
plan if they allocate the same in the same order at the same addresses. What moves them, and what is done:

- The kernel draws addresses at random (ASLR): it is asked not to.
- The stack begins below arguments and environment, whose size differs from shell to shell: they are padded.
- Python hashes strings with a random seed, and the compiler's module frees in an order of hashes: the seed is fixed.
- What Python does at its start depends on its variables and on which modules it has compiled before: it is given no
  more variables than it needs, and compiles all.
- The compiler has a pool of threads, more the more cores there are, that share its work with the first one: with
  PLANSMITH_REPRODUCIBLE=1 there is one beside the first, and one of both runs at a time, see one_thread.c. Without it
  hardly two compiles of a real model give one plan. It is not the default, for it leaves cores idle.
- What is told of time and memory is longer or shorter by the figures: see one_thread.c and ../compiler_child.py.

Two plans of SmolLM2-135M at int4 with the first two alone have one size, 160 MB, and differ in 350 to 990 bytes, all
before the weights and all but one in small integers: the numbers of symbolic dimensions and tensors. With it all, every
one of a dozen plans was the same, two compiled side by side from two lowerings on a busy machine, at int4 and at fp16.
On two cores it costs 0.1 s of a compile's 25 s of CPU and no memory; with more it was not measured.

Another installation or another processor may give another plan: the paths of Python's files are on the heap, and
libraries choose by the processor.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path

from ....runtime.errors import InvalidArgumentError, UnsupportedError

VARIABLE = "PLANSMITH_REPRODUCIBLE"
_ADDR_NO_RANDOMIZE = 0x0040000
_GET_PERSONALITY = 0xFFFFFFFF
_MARK = "PLANSMITH_FIXED_LAYOUT"
# Names, or beginnings of names, of what a compiler's process may need of the environment.
_KEPT = (
    *("HOME", "LANG", "LC_", "LD_", "PATH", "PLANSMITH_", "TMP", "TEMP", "TRT"),
    *("PYTHONHOME", "PYTHONNOUSERSITE", "PYTHONPATH", "PYTHONUSERBASE"),
)
# Built from one_thread.c, beside the core's library.
_ONE_THREAD = "libplansmith_one_thread.so"
# What arguments and environment are padded to; larger ones to the next multiple. A Linux process may have 2 MiB.
_STACK_STEP_BYTES = 64 << 10
_ENTRY_STEP = 64
_SET = {
    "PYTHONHASHSEED": "0",
    # Modules are compiled from source each time, 0.1 s: with their compiled files as the first run left them, the
    # second one gave another plan.
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPYCACHEPREFIX": os.devnull,
    "PYTHONSAFEPATH": "1",  # else the working directory's path is on the interpreter's heap, and moves what comes after
    # Weights go back to the system as soon as they are freed. The C library's own thresholds grow with what is
    # allocated, and keep up to a fifth of a compile's peak.
    "MALLOC_MMAP_THRESHOLD_": str(256 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
}


def exec_with_fixed_layout() -> None:
    """Start the running program again with its memory at fixed addresses; return where it was already.

    Containers may forbid fixed addresses (Docker's default seccomp profile does): then only the allocator is set, and
    the output may differ from run to run in the order of what it lists and in bytes that mean nothing.
    raises : what check_reproducible raises
    """
    if os.environ.pop(_MARK, None) is not None:
        _keep_from_children()
        return
    if platform.system() != "Linux":
        return
    library = check_reproducible()
    _fix_addresses()
    kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
    if library is not None:
        kept["LD_PRELOAD"] = ":".join(filter(None, (str(library), kept.get("LD_PRELOAD"))))
    arguments = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, arguments, padded({**kept, **_SET, _MARK: "1"}, arguments))


def is_reproducible() -> bool:
    """Return whether PLANSMITH_REPRODUCIBLE asks for plans of the same bytes; InvalidArgumentError unless 0 or 1."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise InvalidArgumentError(
            f"{VARIABLE} is {value!r}; set it to 1 for TensorRT-RTX plans of the same bytes in every build, to 0 or "
            "not at all for compiles on all cores"
        )
    return value == "1"


def check_reproducible() -> Path | None:
    """Return the library to preload for plans of the same bytes; None where nobody asks for them.

    raises : InvalidArgumentError for a value of PLANSMITH_REPRODUCIBLE that is neither 0 nor 1; UnsupportedError where
        it is 1 and this system, installation or container gives no such plans
    """
    if not is_reproducible():
        return None
    otherwise = f"unset {VARIABLE} for plans whose bytes may differ between builds"
    library = one_thread_library()
    if library is None:
        raise UnsupportedError(
            f"{VARIABLE}=1 needs {_ONE_THREAD}, which is in the wheels for Linux with glibc and not in "
            f"{_library_folder()}; install plansmith again, or {otherwise}"
        )
    if " " in str(library) or ":" in str(library):  # the loader's list is parted by both
        raise UnsupportedError(
            f"{VARIABLE}=1 preloads {library}, whose path has a blank or a colon, where the loader parts its list; "
            f"install plansmith in another folder, or {otherwise}"
        )
    if not _addresses_can_be_fixed():
        raise UnsupportedError(
            f"{VARIABLE}=1 needs memory at fixed addresses, and this container forbids "
            f"personality(ADDR_NO_RANDOMIZE); start it with --security-opt seccomp=unconfined or a profile that allows "
            f"that call, or {otherwise}"
        )
    return library


def threads_take_turns() -> bool:
    """Return whether one_thread.c is loaded and its order held so far."""
    turns = getattr(ctypes.CDLL(None), "plansmith_threads_take_turns", None)
    return turns is not None and bool(turns())


def one_thread_library() -> Path | None:
    """Return the library that makes a process run one thread at a time; None where it was not built."""
    path = _library_folder() / _ONE_THREAD
    return path if path.is_file() else None


def _library_folder() -> Path:
    folder = os.environ.get("PLANSMITH_LIBRARY")
    return Path(folder).absolute() if folder else Path(__file__).absolute().parents[3] / "runtime"


def _fix_addresses() -> bool:
    """Ask for fixed addresses in the programs that this thread starts; return whether that is allowed."""
    libc = ctypes.CDLL(None)
    current = libc.personality(ctypes.c_ulong(_GET_PERSONALITY))
    return current >= 0 and bool(libc.personality(ctypes.c_ulong(current | _ADDR_NO_RANDOMIZE)) >= 0)


def _addresses_can_be_fixed() -> bool:
    if platform.system() != "Linux":
        return False
    libc = ctypes.CDLL(None)
    before = libc.personality(ctypes.c_ulong(_GET_PERSONALITY))
    allowed = _fix_addresses()
    if allowed:
        libc.personality(ctypes.c_ulong(before))
    return allowed


def _keep_from_children() -> None:
    """Take the library, which is loaded now, out of what the compiler's own child processes would preload."""
    own, _, others = os.environ.get("LD_PRELOAD", "").partition(":")
    if Path(own).name == _ONE_THREAD:
        del os.environ["LD_PRELOAD"]
        if others:
            os.environ["LD_PRELOAD"] = others


def padded(environment: dict[str, str], arguments: list[str]) -> dict[str, str]:
    """Return the environment with entries that bring it and the arguments to a round number of bytes on the stack."""
    entries = dict(environment)
    while (len(entries) + len(arguments) + 1) % _ENTRY_STEP:
        entries[f"PLANSMITH_PAD_{len(entries):02}"] = ""
    size = _stack_bytes(entries, arguments) + len("PLANSMITH_PAD=") + 1
    return {**entries, "PLANSMITH_PAD": "x" * (-size % _STACK_STEP_BYTES)}


def _stack_bytes(environment: dict[str, str], arguments: list[str]) -> int:
    """Return what strings take on a new process' stack; the program's name is there once more."""
    texts = [*arguments, arguments[0], *(f"{name}={value}" for name, value in environment.items())]
    return sum(len(os.fsencode(text)) + 1 for text in texts)
