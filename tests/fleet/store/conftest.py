"""Puts this folder on the import path (`import stores`), and gives a folder where flushing costs nothing."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """Return an empty folder, in memory where there is room: for tests that make stores by the hundred."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < 512 << 20:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="plansmith-test-") as folder:
        yield Path(folder)
