"""What the numbers were taken on: the GPU, its driver and clocks, versions, and the machine's own ceilings."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess

import torch
from attention_problem import TORCH
from bench_device import Device
from finding import Findings

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "cuda-bindings",
    "cuda-core",
    "tensorrt_rtx",
    "tensorrt",
    "numpy",
)
SHOWN = ("torch", "triton", "transformers")
QUERY = "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"


def run(device: Device, findings: Findings) -> None:
    """Note what there is; measure copy bandwidth and the matrix rate, which the other stages' numbers stand beside."""
    findings.note("python", f"{platform.python_version()} on {platform.machine()}")
    for package in PACKAGES:
        findings.note(package, _version(package), minor=package not in SHOWN)
    if not device.dry_run:
        properties = torch.cuda.get_device_properties(0)
        findings.note("GPU", f"{properties.name}, sm{properties.major}{properties.minor}")
        findings.note(
            "multiprocessors, L2", f"{properties.multi_processor_count}, {properties.L2_cache_size} bytes"
        )
    findings.note("nvidia-smi, idle", _smi())
    findings.rate("copy, read and written", device.copy_rate() / 1e9, "GB/s")
    for dtype in (TORCH[name] for name in device.dtypes()):
        n = device.pick(8192, 64)
        a, b = device.normal(n, n, dtype=dtype), device.normal(n, n, dtype=dtype)
        seconds = device.times({"product": lambda a=a, b=b: a @ b})["product"]
        findings.rate(f"matrix product {n} {str(dtype)[6:]}", 2 * n**3 / seconds / 1e12, "TFLOP/s")
    findings.note("nvidia-smi, after work", _smi())


def _version(package: str) -> str:
    """Return a package's version, or that it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _smi() -> str:
    """Return what nvidia-smi reads of the card. It is only asked, never told: the card's settings are not ours."""
    if shutil.which("nvidia-smi") is None:
        return "not installed"
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
