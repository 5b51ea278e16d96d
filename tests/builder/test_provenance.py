"""Where a plan comes from, as its manifest entry says it, and that nothing depends on it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import pathlib
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import plansmith
import pytest
from plansmith.builder import provenance as module
from plansmith.builder.build import build_engine, plan_build
from plansmith.builder.build_key import inputs_key
from plansmith.builder.machine import host
from plansmith.builder.targets.registry import find_targets
from plansmith.runtime.errors import UnsupportedError
from plansmith.runtime.executors import cuda
from plansmith.runtime.manifest import Manifest, checksum, load_manifest
from plansmith.runtime.manifest_entries import HostEntry, ProvenanceEntry
from plansmith.sizing.releases import package_cuda, parse_platform

LIMITS = {"max_batch_size": 4, "max_num_tokens": 32, "max_seq_len": 64, "tokens_per_block": 8}
OTHER_HOST = HostEntry(os="Other", machine="m", cpu="another", cpus=1, memory_bytes=1, python="3.10")


@pytest.fixture
def checkpoint(tiny_checkpoint: Callable[[str], pathlib.Path]) -> pathlib.Path:
    return tiny_checkpoint("llama")


def build(checkpoint: pathlib.Path, out: pathlib.Path, *targets: str, **options: Any) -> Manifest:
    build_engine(plan_build(checkpoint, targets or ["cpu"], precision="fp16", limits=LIMITS), out, **options)
    return load_manifest(out)


def of(manifest: Manifest, target: str = "cpu") -> ProvenanceEntry:
    found = manifest.targets[target].provenance
    assert found is not None
    return found


def test_a_build_says_where_it_was(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    manifest = build(checkpoint, tmp_path / "engine")
    own = of(manifest)
    assert own.host == manifest.host == host()
    assert own.plansmith_version == plansmith.__version__
    assert own.created <= manifest.created
    assert own.platform == f"linux-{platform.machine()}" == parse_platform(own.platform)
    assert own.tool_version("python") == platform.python_version()
    assert own.tool_version("numpy") == np.__version__
    assert own.tool_version("onnx-ir") == importlib.metadata.version("onnx-ir")
    assert own.tool_version("tensorrt_rtx") is None and own.gpus == ()
    assert inputs_key(own.inputs) == manifest.targets["cpu"].key
    assert own.inputs["limits.max_batch_size"] == "4"
    assert own.inputs["compiler_version"] == manifest.targets["cpu"].compiler_version


def test_tools_of_a_gpu_compiler() -> None:
    pytest.importorskip("tensorrt_rtx")
    (target,) = find_targets(["sm89"])
    own = module.provenance(target, {"limits.max_batch_size": "4"})
    assert own.tool_version("tensorrt_rtx") == importlib.metadata.version("tensorrt_rtx")
    assert own.inputs == {"limits.max_batch_size": "4"}
    assert own.tool_version("triton") is None  # whose kernels lie beside the plan, not in it


def test_the_gpu_of_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    class Machine:
        def __init__(self, bindings: object) -> None:
            assert bindings == "bindings"

        def devices(self) -> list[cuda.Device]:
            return [
                cuda.Device(n, name, f"GPU-{n}", sm, 1 << 30)
                for n, (name, sm) in enumerate(
                    [("NVIDIA A10", "sm86"), ("NVIDIA H200", "sm90"), ("NVIDIA H20", "sm90")]
                )
            ]

    def nothing() -> None:
        raise UnsupportedError("there is no driver")

    monkeypatch.setattr(cuda, "load_bindings", lambda: "bindings")
    monkeypatch.setattr(cuda, "Driver", Machine)
    gpus = {
        name: module.provenance(find_targets([name])[0]).gpus for name in ("sm90", "sm100", "sm86", "cpu")
    }
    # TensorRT compiles on the first such GPU; the others time nothing.
    assert gpus == {"sm90": ("NVIDIA H200",), "sm100": (), "sm86": (), "cpu": ()}
    monkeypatch.setattr(cuda, "load_bindings", nothing)
    assert module.provenance(find_targets(["sm90"])[0]).gpus == ()


@pytest.mark.parametrize(
    ("system", "machine", "name"),
    [
        ("Linux", "x86_64", "linux-x86_64"),
        ("Windows", "AMD64", "windows-x86_64"),
        ("Linux", "arm64", "linux-aarch64"),
        ("", "", "unknown-unknown"),
    ],
)
def test_platforms(monkeypatch: pytest.MonkeyPatch, system: str, machine: str, name: str) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert module.platform_name() == name


def test_kept_plans_keep_theirs(
    checkpoint: pathlib.Path,
    tmp_path: pathlib.Path,
    fake_rtx: dict[str, Exception | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("tensorrt_rtx")
    out = tmp_path / "engine"
    first = build(checkpoint, out)
    monkeypatch.setattr(module, "host", lambda: OTHER_HOST)
    second = build(checkpoint, out, "sm89")
    assert of(second) == of(first)
    assert of(second, "sm89").host == OTHER_HOST != of(second).host
    assert package_cuda(dataclasses.replace(second.targets["sm89"], compiler="tensorrt_rtx")) in (12, 13, 14)


def test_no_plan_depends_on_it(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A plan whose provenance is another one, or which has none, is kept all the same."""
    out = tmp_path / "engine"
    build(checkpoint, out)
    path = out / "manifest.json"
    for change in ({"platform": "linux-other", "tools": ["python 1.0"]}, None):
        content = json.loads(path.read_text())
        if change is None:
            del content["targets"]["cpu"]["provenance"]
        else:
            content["targets"]["cpu"]["provenance"] |= change
        content["checksum"] = checksum(content)
        path.write_text(json.dumps(content))
        plan = plan_build(checkpoint, ["cpu"], precision="fp16", limits=LIMITS)
        assert build_engine(plan, out).targets["cpu"].status == "kept"
        assert json.loads(path.read_text()) == content
