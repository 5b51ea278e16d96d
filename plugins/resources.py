"""What a compiled kernel takes of a GPU: registers, stack, spilled registers, shared memory."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import subprocess

from ..runtime.errors import BuildError

_FIELDS = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclasses.dataclass(frozen=True)
class Resources:
    """What one thread or one program takes; the compiler decided it, so it is known without running anything.

    registers : 32-bit registers of a thread; an SM has 65536 for the threads that it runs at once
    stack_bytes : of a thread: its spilled registers, and arrays whose index is not known when compiling
    spill_store_bytes, spill_load_bytes : what the instructions that spill write and read, each counted once
    local_bytes : of a thread, besides its stack
    static_shared_bytes : of a program, besides what its launch asks for; from sm90 on the system's own 1024
    """

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    local_bytes: int
    static_shared_bytes: int

    @property
    def spills(self) -> bool:
        """Whether registers did not suffice, so that each thread keeps values in memory."""
        return self.spill_store_bytes + self.spill_load_bytes > 0


def read_resources(
    cubin: pathlib.Path, symbol: str, assembler_log: str, cuobjdump: pathlib.Path
) -> Resources:
    """Return what a cubin's only kernel takes.

    assembler_log : what `ptxas -v` said; the cubin does not tell what is spilled from the rest of the stack
    cuobjdump : the program
    raises : BuildError where either cannot be read
    """
    command = [str(cuobjdump), "-res-usage", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    _, found, rest = done.stdout.partition(f"Function {symbol}:")
    if done.returncode != 0 or not found:
        raise BuildError(
            f"cuobjdump tells no resources of {symbol} (exit code {done.returncode}): "
            f"{(done.stderr or done.stdout).strip()[-200:] or 'no output'}; install triton again",
        )
    return parse_resources(rest, assembler_log)


def parse_resources(usage: str, assembler_log: str) -> Resources:
    """Return what cuobjdump and the log of `ptxas -v` say of a function; BuildError where a number is missing."""
    numbers = {name: int(value) for name, value in _FIELDS.findall(usage.strip().partition("\n\n")[0])}
    spills = _SPILLS.search(assembler_log)
    if numbers.keys() != {"REG", "STACK", "SHARED", "LOCAL"} or spills is None:
        raise BuildError(
            f"the resources of a kernel cannot be read from {usage.strip()[:200]!r} and "
            f"{assembler_log.strip()[:200]!r}; this version of triton reports them differently, use triton 3.6 to 3.9"
        )
    return Resources(
        registers=numbers["REG"],
        stack_bytes=numbers["STACK"],
        spill_store_bytes=int(spills[1]),
        spill_load_bytes=int(spills[2]),
        local_bytes=numbers["LOCAL"],
        static_shared_bytes=numbers["SHARED"],
    )
