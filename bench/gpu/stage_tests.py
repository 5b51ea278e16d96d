"""The tests marked gpu, as pytest runs them on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from bench_device import Device
from finding import Findings
from results import RIGHT, WRONG, Row

ROOT = Path(os.environ.get("PLANSMITH_ROOT", "."))
LINE = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED)\s+(?:\[\d+\] )?(\S+?)(?: - (.*)|: (.*))?$")


def run(device: Device, findings: Findings) -> None:
    """Run tests/gpu and tell each test; in a dry run they have to skip themselves, which is a result too."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        str(ROOT / "tests" / "gpu"),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    limit = max(5.0, findings.seconds_left() - 5)
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=limit)
    print(done.stdout[-3000:], done.stderr[-1000:])
    for line in done.stdout.splitlines():
        if found := LINE.match(line):
            verdict, test, *texts = found.groups()
            text = next((text for text in texts if text), "")
            if verdict == "SKIPPED":
                findings.skip(test, text)
            else:
                findings.add(Row(test.split("/")[-1], RIGHT if verdict == "PASSED" else WRONG, detail=text))
    # 5: none was collected. What pytest itself could not do is wrong as well.
    if done.returncode not in (0, 1):
        findings.add(Row("pytest", WRONG, detail=f"exit status {done.returncode}: {done.stdout[-200:]}"))
