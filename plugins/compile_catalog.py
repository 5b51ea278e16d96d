"""`python -m plansmith.plugins.aot`: compiles all of the catalog and says what each kernel takes of a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from ..runtime.errors import Error, InvalidArgumentError
from . import catalog
from .aot import ALL_SMS, CompiledKernel, compile_tasks, triton_version

REPORT_NAME = "resources.json"
DEFAULT_SMS = (75, 80, 86, 89, 90, 100, 120)
"""One of each kind: sm103 and sm121 have sm100's and sm120's instructions."""
NO_SPILLS_SMS = (80, 90)
"""Where a kernel that spills is an error: the two that kernels are tuned for."""
_KIB = 1 << 10
MAX_SHARED_BYTES = {75: 64 * _KIB, 80: 163 * _KIB, 86: 99 * _KIB, 89: 99 * _KIB}
MAX_SHARED_BYTES |= {90: 227 * _KIB, 100: 227 * _KIB, 103: 227 * _KIB, 120: 99 * _KIB, 121: 99 * _KIB}
"""What a program can have at most, besides the system's own (CUDA C++ Programming Guide, compute capabilities)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, report, and return the exit code: 1 if a kernel does not compile or fit, or spills on sm80 or sm90."""
    asked = _parse(arguments)
    tasks = [(kernel, sm) for sm in asked.sm for kernel in _kernels(asked, sm)]
    start = time.monotonic()
    try:
        version = triton_version()
        if asked.output is not None:
            _make(asked.output)
        compiled = compile_tasks(tasks, asked.jobs, progress=_progress if sys.stderr.isatty() else None)
    except Error as error:
        print("\n".join([*getattr(error, "log_lines", ()), f"error: {error}"]), file=sys.stderr)
        return 1
    report = make_report(compiled, version, time.monotonic() - start)
    try:
        if asked.output is not None:
            _write(asked.output, compiled, report)
    except OSError as error:
        print(f"error: {_unusable(asked.output, error)}", file=sys.stderr)
        return 1
    print(json.dumps(report, indent=2) if asked.json else as_text(report))
    wrong = [text for one in compiled for text in _faults(one)]
    for text in wrong:
        print(f"error: {text}", file=sys.stderr)
    return 1 if wrong else 0


def _faults(one: CompiledKernel) -> list[str]:
    """Return what is wrong with a kernel that compiled."""
    faults = []
    if one.sm in NO_SPILLS_SMS and one.resources.spills:
        faults.append(f"{one.kernel.name} spills registers on sm{one.sm}")
    if one.shared_bytes > MAX_SHARED_BYTES[one.sm]:
        faults.append(
            f"{one.kernel.name} takes {one.shared_bytes} bytes of shared memory on sm{one.sm}, which has "
            f"{MAX_SHARED_BYTES[one.sm]} for a program"
        )
    return faults


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m plansmith.plugins.aot", description=__doc__)
    parser.add_argument(
        "--output",
        type=_folder,
        metavar="DIR",
        help=f"where cubins, PTX and {REPORT_NAME} go; default: nothing is kept, the table is printed",
    )
    parser.add_argument(
        "--sm", type=_sms, default=DEFAULT_SMS, help="such as 80,90; default: one of each kind"
    )
    parser.add_argument(
        "--op",
        choices=catalog.ops(),
        action="append",
        help="of this operator; may be given again; default: all",
    )
    parser.add_argument("--jobs", type=int, help="compilers side by side; default: one a core")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    asked = parser.parse_args(arguments)
    if asked.jobs is not None and asked.jobs < 1:
        parser.error("--jobs must be at least 1")
    return asked


def _folder(text: str) -> pathlib.Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; give a folder, or leave it out")
    return pathlib.Path(text)


def _sms(text: str) -> tuple[int, ...]:
    words = [word.strip().lower().removeprefix("sm") for word in text.split(",")]
    names = {str(sm): sm for sm in ALL_SMS}
    if wrong := [word for word in words if word not in names]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(names)}")
    return tuple(dict.fromkeys(names[word] for word in words))


def _kernels(asked: argparse.Namespace, sm: int) -> list[Any]:
    return [kernel for op in asked.op or catalog.ops() for kernel in catalog.catalog(sm, op)]


def _progress(name: str, sm: int, done: int, total: int) -> None:
    print(
        f"\r\x1b[K{done}/{total} {name} sm{sm}", end="" if done < total else "\n", file=sys.stderr, flush=True
    )


def make_report(compiled: Sequence[CompiledKernel], version: str, seconds: float) -> dict[str, Any]:
    """Return what is reported, as JSON values: a row for each kernel and SM.

    seconds : of all compilations together, side by side; a row has its CPU time
    """
    rows = [
        {
            "op": one.kernel.op,
            "name": one.kernel.name,
            "sm": one.sm,
            "num_warps": one.num_warps,
            "shared_bytes": one.shared_bytes,
            **dataclasses.asdict(one.resources),
            "cubin_bytes": len(one.cubin),
            "seconds": round(one.seconds, 3),
        }
        for one in compiled
    ]
    return {"triton_version": version, "seconds": round(seconds, 1), "kernels": rows}


def as_text(report: dict[str, Any]) -> str:
    """Return the report as a table; shared memory is what a launch asks for and the static part together."""
    width = max([len(row["name"]) for row in report["kernels"]], default=6)
    lines = [f"{'kernel':{width}}   SM  registers  shared B  stack B  spills B    CPU s"]
    lines += [
        f"{row['name']:{width}}  {row['sm']:3}  {row['registers']:9}  "
        f"{row['shared_bytes'] + row['static_shared_bytes']:8}  {row['stack_bytes']:7}  "
        f"{row['spill_store_bytes'] + row['spill_load_bytes']:8}  {row['seconds']:7.2f}"
        for row in report["kernels"]
    ]
    spilling = sum(row["spill_store_bytes"] + row["spill_load_bytes"] > 0 for row in report["kernels"])
    lines.append(
        f"{len(report['kernels'])} kernels in {report['seconds']:.1f} s, {spilling or 'none'} of them "
        f"spill{'s' if spilling == 1 else ''} (triton {report['triton_version']})"
    )
    return "\n".join(lines)


def _make(output: pathlib.Path) -> None:
    """Make the folder before the work whose results go there; InvalidArgumentError where that cannot be."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise InvalidArgumentError(_unusable(output, error)) from error


def _unusable(output: pathlib.Path, error: OSError) -> str:
    return f"{output} cannot be written to ({error.strerror}); give another --output"


def _write(output: pathlib.Path, compiled: Sequence[CompiledKernel], report: dict[str, Any]) -> None:
    for one in compiled:
        folder = output / one.kernel.op
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{one.kernel.name}.sm{one.sm}.cubin").write_bytes(one.cubin)
        (folder / f"{one.kernel.name}.sm{one.sm}.ptx").write_text(one.ptx, encoding="utf-8")
    output.mkdir(parents=True, exist_ok=True)
    (output / REPORT_NAME).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
