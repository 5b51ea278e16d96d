"""Compiles kernels for GPUs, one after another, for aot.py: a process of its own.

The process that asks may have imported triton as an interpreter (TRITON_INTERPRET is read then), and a compiler can
end its process. Run as `python -m plansmith.plugins.compile_worker FOLDER`: each line of standard input is a kernel and
an SM, each line of standard output what came of it. It ends with its input, and then removes FOLDER, which was made for
it and is where it runs.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import importlib
import io
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
from typing import Any

from ..runtime.executors.kernel_bundle import EXTRA_POINTERS
from .kernel import Kernel
from .resources import read_resources

_ENTRY = re.compile(r"\.visible \.entry \w+\(([^)]*)\)")
_THREADS = re.compile(r"\.reqntid (\d+)")


def main() -> None:
    """Serve until standard input ends."""
    # Compilers print where they like: standard output becomes the log, and answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answers.write(json.dumps(_answer(Kernel(**job["kernel"]), job["sm"])) + "\n")
            answers.flush()
        except BrokenPipeError:
            break  # nobody is left who asked
    if len(sys.argv) == 2:
        _leave(pathlib.Path(sys.argv[1]))


def _leave(folder: pathlib.Path) -> None:
    """Remove this process's folder: whoever made it kills its workers first, so it is gone."""
    os.chdir("/")
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()  # the last of several workers


def _answer(kernel: Kernel, sm: int) -> dict[str, Any]:
    start = _cpu_seconds()
    try:
        result = _compile(kernel, sm)
    except Exception as error:
        return {"error": _reason(error), "log": str(error).splitlines()}
    return {**result, "seconds": _cpu_seconds() - start}


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of the assemblers that it ran."""
    return sum(os.times()[:4])


def _compile(kernel: Kernel, sm: int) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = kernel.function.split(":")
    function = getattr(importlib.import_module(f".{module}", __package__), name)
    signature, attributes = _arguments(kernel, function.arg_names)
    source = ASTSource(function, signature=signature, constexprs=dict(kernel.constants), attrs=attributes)
    options = {
        "num_warps": kernel.num_warps,
        "num_stages": kernel.num_stages,
        "enable_fp_fusion": kernel.fp_fusion,
    }
    with contextlib.redirect_stdout(io.StringIO()) as log:
        made = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    cubin, ptx, facts = made.asm["cubin"], made.asm["ptx"], made.metadata
    _check(kernel, ptx, facts)
    programs = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        resources = read_resources(path, facts.name, log.getvalue(), programs / "cuobjdump")
    return {
        "symbol": facts.name,
        "cubin": base64.b64encode(cubin).decode(),
        "ptx": ptx,
        "shared_bytes": facts.shared,
        "num_warps": facts.num_warps,
        "resources": dataclasses.asdict(resources),
    }


def _arguments(kernel: Kernel, names: list[str]) -> tuple[dict[str, str], dict[Any, Any]]:
    """Return every argument's type in the function's order, and what is promised of some."""
    described = {**kernel.signature, **dict.fromkeys(kernel.constants, "constexpr")}
    if sorted(described) != sorted(names) or [n for n in names if n in kernel.signature] != list(
        kernel.signature
    ):
        raise ValueError(
            f"{kernel.function} takes ({', '.join(names)}), described are ({', '.join(kernel.signature)}) and the "
            f"constants ({', '.join(kernel.constants)})"
        )
    types, attributes = {}, {}
    for n, name in enumerate(names):
        types[name], _, multiple = described[name].partition(":")
        if multiple:
            attributes[(n,)] = [["tt.divisibility", int(multiple)]]
    return types, attributes


def _check(kernel: Kernel, ptx: str, facts: Any) -> None:
    """Raise ValueError where a launch would need other arguments, more memory or more threads than is known of it."""
    entry = _ENTRY.search(ptx)
    num_parameters = 0 if entry is None else entry[1].count(".param")
    threads = _THREADS.search(ptx)
    rules = [
        (
            num_parameters == len(kernel.signature) + EXTRA_POINTERS,
            f"its entry takes {num_parameters} parameters, {len(kernel.signature)} and {EXTRA_POINTERS} were expected",
        ),
        (
            facts.global_scratch_size == 0 and facts.profile_scratch_size == 0,
            f"it wants {facts.global_scratch_size} and {facts.profile_scratch_size} bytes of scratch memory, which no "
            "launch gives",
        ),
        (
            threads is not None and int(threads[1]) == 32 * facts.num_warps == 32 * kernel.num_warps,
            f"it wants {threads and threads[1]} threads, {32 * kernel.num_warps} are described",
        ),
    ]
    for holds, text in rules:
        if not holds:
            raise ValueError(text)


def _reason(error: BaseException) -> str:
    """Return one line of a compiler's error: the innermost error's own words, without the source it shows."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if re.match(r"ptxas\S* (error|fatal)|error:", line)]
    return (told or lines[-1:] or [type(error).__name__])[0]


if __name__ == "__main__":
    main()
