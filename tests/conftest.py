"""Puts tests/ on the import path (`import tiny_models`) and shares tiny checkpoints between tests."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

# Kernels of the Triton language run in its interpreter here, which is chosen when triton is first imported: by
# whichever library does so first.
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
# What is kept between runs would hide from a test whether its work is done.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="plansmith-test-cache-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
# A machine may be as slow as it likes.
hypothesis.settings.register_profile(
    "any-speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any-speed")
# A shell starts background jobs with Ctrl-C ignored, which the programs under test would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return family -> directory of its tiny checkpoint, made once a session; do not change the files."""
    from tiny_models import make_tiny

    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny(family, tmp_path_factory.mktemp("tiny") / family)
        return made[family]

    return get
