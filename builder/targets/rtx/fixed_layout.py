"""A process whose memory lies at the same addresses in every run, so that a compiler gives the same bytes each time.

TensorRT-RTX 1.7 lists a plan's tensors in the order of addresses, and writes structures with the padding between their
fields, which holds whatever the memory held. The kernel draws addresses at random (ASLR), the stack begins below the
environment, whose size differs from shell to shell, and the heap holds what the interpreter was given. With all three
fixed, two compiles of a small graph by one installation give one plan, byte for byte. Those of SmolLM2-135M at int4,
two side by side, still differed (bench/fleet.py --stage bytes): something of them depends on more than these.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

_ADDR_NO_RANDOMIZE = 0x0040000
_GET_PERSONALITY = 0xFFFFFFFF
_MARK = "PLANSMITH_FIXED_LAYOUT"
# Names, or beginnings of names, of what a compiler's process may need of the environment.
_KEPT = ("HOME", "LANG", "LC_", "LD_", "PATH", "PLANSMITH_", "PYTHON", "TMP", "TEMP", "TRT")
# What arguments and environment are padded to; larger ones to the next multiple. A Linux process may have 2 MiB.
_STACK_STEP_BYTES = 64 << 10
_ENTRY_STEP = 64
_SET = {
    "PYTHONSAFEPATH": "1",  # else the working directory's path is on the interpreter's heap, and moves what comes after
    # Weights go back to the system as soon as they are freed. The C library's own thresholds grow with what is
    # allocated, and keep up to a fifth of a compile's peak.
    "MALLOC_MMAP_THRESHOLD_": str(256 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
}


def exec_with_fixed_layout() -> None:
    """Start the running program again with its memory at fixed addresses; return where that was done.

    Containers may forbid fixed addresses (Docker's default seccomp profile does): then only the allocator is set, and
    the output may differ from run to run in the order of what it lists and in bytes that mean nothing.
    """
    if os.environ.pop(_MARK, None) is not None or platform.system() != "Linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    current = libc.personality(ctypes.c_ulong(_GET_PERSONALITY))
    if current >= 0:
        libc.personality(ctypes.c_ulong(current | _ADDR_NO_RANDOMIZE))
    arguments = [sys.executable, *sys.orig_argv[1:]]
    kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
    os.execve(sys.executable, arguments, padded({**kept, **_SET, _MARK: "1"}, arguments))


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
