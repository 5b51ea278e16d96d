"""plansmith's own cpu target, in this environment: its precisions, and the same with AVX2 kernels alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .environment import BENCH, child_command, model_dir, run_logged
from .session import Record, Request, Run, serve

NAME = "plansmith"
VARIANTS = ("int8", "int4", "fp32", "bf16", "int8-avx2", "int4-avx2", "fp32-avx2")


def install(work: Path, log: Path) -> None:
    """Do nothing: the environment of this process is its own."""


def _precision(variant: str) -> str:
    return variant.split("-")[0]


def convert(checkpoint: Path, work: Path, variant: str) -> Path:
    """Return the engine directory, built unless it is up to date.

    `plansmith build` compiles again what another plan format or other settings made. An engine that it refuses to add
    to, of another model, or one whose files it cannot read, is replaced.
    """
    out = model_dir(work, checkpoint, "plansmith", _precision(variant))
    out.parent.mkdir(parents=True, exist_ok=True)
    build = [sys.executable, "-m", "plansmith.cli", "build", checkpoint, "-o", out, "--target", "cpu"]
    build += ["--precision", _precision(variant)]
    log = work / "logs" / "plansmith-convert.log"
    try:
        run_logged(build, log)
    except subprocess.CalledProcessError:
        if not out.exists():
            raise
        run_logged([*build, "--force"], log)
    return out


def weight_bytes(model: Path, variant: str) -> int:
    """Return the bytes of the plan, nearly all of them weights."""
    return sum(plan.stat().st_size for plan in (model / "targets" / "cpu").glob("*.plan"))


def command(work: Path, checkpoint: Path, variant: str, threads: int) -> list[str]:
    """Return the command of a session."""
    engine = model_dir(work, checkpoint, "plansmith", _precision(variant)).resolve()
    isa = variant.partition("-")[2] or "auto"
    return child_command(sys.executable, "plansmith", engine, str(threads), isa)


def load(engine_dir: str, threads: int, isa: str) -> Run:
    """Return what runs requests by one engine, opened as `plansmith bench` opens it."""
    from plansmith.runtime.engine import Engine
    from plansmith.runtime.page_cache import wait_prefetched
    from plansmith.runtime.sampling import SamplingParams

    engine = Engine.open(engine_dir, num_threads=threads, isa=None if isa == "auto" else isa)

    def run(requests: list[Request], record: Record) -> None:
        wait_prefetched()  # other peers have loaded all of it by now
        handles = []
        for idx, request in enumerate(requests):
            params = SamplingParams(
                max_tokens=request["output_len"],
                min_tokens=request["output_len"],
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
            )

            def take(item, idx: int = idx) -> None:
                if not isinstance(item, Exception):
                    record(idx, item.token_ids)

            handles.append(engine.submit_when_room(request["prompt_ids"], params, on_delta=take))
        for handle in handles:
            handle.result()

    return run


def version() -> str:
    """Return the version of the library that is loaded, and the commit of the sources here."""
    from history import commit
    from plansmith.runtime._native import native

    core = native()
    name, changed = commit(BENCH.parent)
    return f"{core.text(core.lib.psm_version())} ({name or 'no commit'}{' with changes' if changed and name else ''})"


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1], int(sys.argv[2]), sys.argv[3]), version)
