"""Every kernel, compiled, on random shapes against float64 or exact references."""

from __future__ import annotations

import check_attention
import check_sampling
from bench_device import Device
from finding import Findings

CHECKS = (check_sampling.run, check_attention.run)


def run(device: Device, findings: Findings) -> None:
    """Run each operation's checks; one that fails to run is wrong, and the next one follows."""
    for check in CHECKS:
        with findings.guarded(check.__module__.removeprefix("check_")):
            check(device, findings)
