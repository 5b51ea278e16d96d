"""Bundles as the builder writes them are what the runtime reads."""

from __future__ import annotations

import pathlib

import pytest
from plansmith.plugins.aot import compile_kernels
from plansmith.plugins.bundle import write_bundle
from plansmith.plugins.catalog import catalog
from plansmith.runtime.executors.kernel_bundle import load, read_bundle

pytest.importorskip("triton")


def test_what_is_written_is_read(tmp_path: pathlib.Path) -> None:
    every = {kernel.name: kernel for kernel in catalog(80)}
    kernels = [every["gather_last_fp16"], every["attention_combine_fp16_same_d64"]]
    compiled = compile_kernels(kernels, [80, 89])
    files = write_bundle(tmp_path / "kernels", compiled, "3.9.0", "1" * 64)
    assert sorted(files) == sorted((tmp_path / "kernels").iterdir()) and len(files) == 5
    assert files[0].name == "kernels.json"
    entry = read_bundle(tmp_path / "kernels")
    assert (entry.triton_version, entry.key, entry.sms()) == ("3.9.0", "1" * 64, (80, 89))
    assert [kernel.name for kernel in entry.kernels] == sorted(kernel.name for kernel in kernels)
    bundle = load(tmp_path / "kernels", 89)
    for one in compiled:
        if one.sm != 89:
            continue
        read = bundle.kernel(one.kernel.name)
        assert (read.cubin, read.symbol, read.sm) == (one.cubin, one.symbol, 89)
        assert (read.num_warps, read.shared_bytes) == (one.num_warps, one.shared_bytes)
        assert {a.name: a.type for a in read.arguments} == dict(one.kernel.signature)
        assert [a.name for a in read.arguments] == list(one.kernel.signature)
        assert read.constants == dict(one.kernel.constants)
    again = write_bundle(tmp_path / "again", compiled, "3.9.0", "1" * 64)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in files]
