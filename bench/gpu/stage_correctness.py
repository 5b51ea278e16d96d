"""Every kernel, compiled, on random shapes against float64 or exact references."""

from __future__ import annotations

import importlib
import os

from bench_device import Device
from finding import Findings
from stages import OPS


def run(device: Device, findings: Findings) -> None:
    """Run each operation's checks; one that fails to run is wrong, and the next one follows."""
    chosen = os.environ.get("GPU_CHECK_OPS", "").split(",")
    for op in OPS:
        if op in chosen or chosen == [""]:
            with findings.guarded(op):
                importlib.import_module(f"check_{op}").run(device, findings)
