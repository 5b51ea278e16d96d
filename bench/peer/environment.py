"""What the peers' modules install and convert with: environments, logged commands, and stamps that say what is done.

Everything lies under one work folder (`build/peers`): `venv-<name>`, and the converted models of a checkpoint in
`models/<name of the checkpoint's folder>/<peer>-<variant>`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

# Where CPU builds of torch are, used beside the default index, so it may be out of reach.
TORCH_INDEX = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
TORCH = os.environ.get("TORCH", "torch==2.13.0")
# Of one step of installing or converting; compiling llama.cpp on two busy cores takes half an hour.
_STEP_TIMEOUT_S = 7200
# That much stays free of a disk on which models are converted.
_SPARE_DISK_BYTES = 6_000_000_000
BENCH = Path(__file__).resolve().parent.parent


def run_logged(command: Sequence[str | Path], log: Path, **env: str) -> None:
    """Run `command`, its output appended to `log`; CalledProcessError or, after two hours, TimeoutExpired.

    It is a process group of its own, which is ended whole where this process is interrupted: a compiler, too.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [str(c) for c in command]
    with log.open("a") as out:
        print("$", *words, file=out, flush=True)
        process = subprocess.Popen(
            words, stdout=out, stderr=out, env={**os.environ, **env}, start_new_session=True
        )
        try:
            code = process.wait(_STEP_TIMEOUT_S)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    if code:
        raise subprocess.CalledProcessError(code, words)


def make_environment(path: Path, requirements: Sequence[str], log: Path, torch: bool = False) -> Path:
    """Return the interpreter of an environment at `path` with `requirements`, made or added to if its stamp lacks some.

    torch : install a CPU build of it first
    """
    python = path / "bin" / "python"
    stamp = path / ".ready"
    wanted = {*([TORCH] if torch else []), *requirements}
    there = set(stamp.read_text().splitlines()) if stamp.exists() else set()
    if wanted <= there:
        return python
    if not python.exists():
        run_logged([sys.executable, "-m", "venv", path], log)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    if torch:
        run_logged([*pip, "--retries", "1", "--timeout", "60", "--extra-index-url", TORCH_INDEX, TORCH], log)
    run_logged([*pip, *requirements], log)
    # torchvision from the default index does not load beside a CPU build of torch and breaks transformers' imports.
    run_logged([python, "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"], log)
    # What an environment shared by several peers had in another version, it has no more.
    named = {_package(one) for one in wanted}
    kept = {one for one in there if _package(one) not in named}
    stamp.write_text("\n".join(sorted(wanted | kept)) + "\n")
    return python


def _package(requirement: str) -> str:
    """Return the name of a requirement like `numpy` or `torch==2.13.0`."""
    return requirement.partition("==")[0]


def model_dir(work: Path, checkpoint: Path, peer: str, variant: str) -> Path:
    """Return where the converted model of a variant belongs."""
    return work / "models" / checkpoint.name / f"{peer}-{variant}"


def num_values(checkpoint: Path) -> int:
    """Return how many weights the safetensors files of a checkpoint hold."""
    values = 0
    for path in checkpoint.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        values += sum(math.prod(one["shape"]) for name, one in header.items() if name != "__metadata__")
    return values


def converted(out: Path, key: str, convert: Callable[[], None], size: float = 0) -> Path:
    """Return `out`, made by `convert()` unless the stamp beside it says `key` (versions, settings).

    size : bytes that it takes, about; RuntimeError where the disk would have less than 6 GB left
    """
    stamp = out.with_name(out.name + ".stamp")
    if not (stamp.exists() and stamp.read_text() == key and out.exists()):
        out.parent.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)  # what an interrupted conversion leaves is not whole
        free = shutil.disk_usage(out.parent).free
        if free < size + _SPARE_DISK_BYTES:
            raise RuntimeError(
                f"{out.name} takes about {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free on the disk of "
                f"{out.parent}, of which {_SPARE_DISK_BYTES / 1e9:.0f} GB stay free; make room, or leave it out with "
                "--variants"
            )
        convert()
        stamp.write_text(key)
    return out


def child_command(python: Path | str, module: str, *args: str | Path) -> list[str]:
    """Return the command that runs `bench/peer/<module>.py` in a peer's environment (in `bench/`, as Session does)."""
    return [str(python), "-m", f"peer.{module}", *map(str, args)]
