"""A GPU target's plan is on its way into memory before its library and driver are looked for."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.runtime.errors import UnsupportedError
from plansmith.runtime.executors.opening import open_tensorrt
from plansmith.runtime.manifest import load_manifest
from plansmith.runtime.page_cache import MappedFile


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the page cache of Linux")
def test_the_plan_is_read_ahead(rtx_engine: Callable[..., Any], tmp_path: Path) -> None:
    manifest = load_manifest(shutil.copytree(rtx_engine().path, tmp_path / "copy"))
    target = next(name for name, entry in manifest.targets.items() if entry.sm)
    path = manifest.plan_path(target)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    class NoDriver:
        """What has no function of the driver's."""

    with pytest.raises((UnsupportedError, AttributeError)):
        open_tensorrt(manifest, target, bindings=NoDriver())
    for thread in threading.enumerate():
        if thread.name == "plansmith-read":
            thread.join(60)
    with MappedFile(path) as mapped:
        assert mapped.resident_bytes() == path.stat().st_size
