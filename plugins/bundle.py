"""Writes compiled kernels beside a plan, for runtime/executors/kernel_bundle.py to read."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Sequence

from ..runtime.executors.kernel_bundle import (
    BUNDLE_NAME,
    SCHEMA_VERSION,
    ArgumentEntry,
    BundleEntry,
    CubinEntry,
    KernelEntry,
)
from ..runtime.manifest_fields import to_json
from .aot import CompiledKernel


def write_bundle(
    directory: pathlib.Path, compiled: Sequence[CompiledKernel], triton_version: str, key: str
) -> list[pathlib.Path]:
    """Write kernels.json and the cubins into a new directory, and return the files: kernels.json first.

    compiled : kernels in the order of their names; those of one name are one kernel for several SMs
    key : hash of everything that went into them, see BundleEntry
    """
    directory.mkdir(parents=True)
    by_name: dict[str, list[CompiledKernel]] = {}
    for one in compiled:
        by_name.setdefault(one.kernel.name, []).append(one)
    entry = BundleEntry(
        schema_version=SCHEMA_VERSION,
        triton_version=triton_version,
        key=key,
        kernels=tuple(_kernel_entry(by_name[name]) for name in sorted(by_name)),
    )
    files = [directory / BUNDLE_NAME]
    files[0].write_text(json.dumps(to_json(entry), indent=1) + "\n", encoding="utf-8")
    for one in compiled:
        files.append(directory / file_name(one))
        files[-1].write_bytes(one.cubin)
    return files


def file_name(compiled: CompiledKernel) -> str:
    """Return a cubin's name."""
    return f"{compiled.kernel.name}.sm{compiled.sm}.cubin"


def _kernel_entry(compiled: Sequence[CompiledKernel]) -> KernelEntry:
    first = compiled[0]
    return KernelEntry(
        name=first.kernel.name,
        symbol=first.symbol,
        arguments=tuple(ArgumentEntry(name, type_) for name, type_ in first.kernel.signature.items()),
        num_warps=first.num_warps,
        constants=dict(first.kernel.constants),
        cubins=tuple(
            CubinEntry(
                sm=one.sm,
                file=file_name(one),
                size=len(one.cubin),
                sha256=hashlib.sha256(one.cubin).hexdigest(),
                shared_bytes=one.shared_bytes,
            )
            for one in compiled
        ),
    )
