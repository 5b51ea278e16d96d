"""plansmith inspect --runs-on and --upgrade."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.runtime.manifest import Manifest, load_manifest
from plansmith.runtime.manifest_entries import DraftEntry, FileEntry, TargetEntry

Run = Callable[..., Any]
RTX, TRT = "1.7.1.116", "11.4.0.106"


@pytest.fixture
def copy(engine_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(engine_dir, tmp_path / "copy")


def write(root: Path, manifest: Manifest) -> None:
    (root / "manifest.json").write_text(manifest.to_text())


def gpu_entry(root: Path, name: str, **fields: Any) -> TargetEntry:
    """Write a stand-in for a GPU plan below root, and return its entry; fields : others than of the cpu plan."""
    path = f"targets/{name}/model.plan"
    (root / path).parent.mkdir(parents=True)
    (root / path).write_bytes(b"plan")
    file = FileEntry(
        path=path, size=4, sha256="83ec8a7d7d27cb3cce7a1a7b3a3d2c8f6b5d4c3e2f1a0b9c8d7e6f5a4b3c2d1e"
    )
    usual = {
        "compiler": "tensorrt_rtx",
        "compiler_version": RTX,
        "sm": (name,),
        "token_layout": "rectangular",
        "row_alignment": "right",
        "compute_dtype": "float16",
        "kv_dtype": "float16",
        "files": (file,),
    }
    return dataclasses.replace(load_manifest(root).targets["cpu"], **(usual | fields))


@pytest.fixture
def engine(copy: Path) -> Path:
    """Return an engine with the targets cpu, sm80 and sm90, the last of TensorRT; their plans are stand-ins."""
    targets = {
        "sm80": gpu_entry(copy, "sm80"),
        "sm90": gpu_entry(copy, "sm90", compiler="tensorrt", compiler_version=TRT, token_layout="packed"),
    }
    manifest = load_manifest(copy)
    write(copy, dataclasses.replace(manifest, precision="fp16", targets=manifest.targets | targets))
    return copy


def test_provenance_is_shown(plansmith: Run, copy: Path) -> None:
    own = load_manifest(copy).targets["cpu"].provenance
    assert own is not None
    out = plansmith("inspect", copy).out
    for words in (own.created, own.platform, *own.tools):
        assert words in out
    shown = json.loads(plansmith("inspect", copy, "--json").out)["manifest"]["targets"]["cpu"]["provenance"]
    assert shown["tools"] == list(own.tools) and shown["host"]["cpus"] == own.host.cpus
    manifest = load_manifest(copy)
    before = dataclasses.replace(manifest.targets["cpu"], provenance=None)
    write(copy, dataclasses.replace(manifest, targets={"cpu": before}))
    assert "not noted" in plansmith("inspect", copy).out
    timed = dataclasses.replace(before, provenance=dataclasses.replace(own, gpus=("NVIDIA H200",)))
    write(copy, dataclasses.replace(manifest, targets={"cpu": timed}))
    assert "NVIDIA H200" in plansmith("inspect", copy).out


def test_a_gpu_that_a_target_runs_on(plansmith: Run, engine: Path) -> None:
    result = plansmith("inspect", engine, "--runs-on", "a100-80g")
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith("a100-80g (NVIDIA A100-SXM4-80GB, sm80): runs\n")
    assert (
        "  sm80: runs on the GPU, with TensorRT-RTX 1.7.1 and an NVIDIA driver of r580 or later\n"
        in result.out
    )
    assert "    memory: 8 sequences of 128 tokens at a time (one takes: weights" in result.out
    assert "  sm90: does not run\n    why: the plan is for sm90, NVIDIA A100-SXM4-80GB is sm80;" in result.out
    assert "  cpu: runs on the CPU\n" in result.out


def test_a_gpu_that_none_runs_on(plansmith: Run, engine: Path) -> None:
    result = plansmith("inspect", engine, "--runs-on", "l40s")
    assert result.status == 1
    command = load_manifest(engine).build_command("sm89")
    assert f"  to build one that does: {command}\n" in result.out
    assert result.err == f"plansmith: no target of {engine} runs on l40s; build one: {command}\n"
    assert "the plan is for sm80, NVIDIA L40S is sm89" in result.out


def test_a_fleets_engine_is_built_by_its_fleet(plansmith: Run, engine: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a fleet"
    own = folder / "engines" / "smol-fp16"
    own.parent.mkdir(parents=True)
    shutil.copytree(engine, own)
    told = f"plansmith fleet build -f '{folder}'"
    assert told not in plansmith("inspect", own, "--upgrade", "tensorrt_rtx=1.8.0").out
    (folder / "plansmith.yaml").write_text("", encoding="utf-8")
    result = plansmith("inspect", own, "--upgrade", "tensorrt_rtx=1.8.0")
    assert f"with the new versions installed, run: {told}\n" in result.out
    result = plansmith("inspect", own, "--runs-on", "l40s")
    assert f"(add l40s to the engine's skus in {folder}/plansmith.yaml first): {told}\n" in result.err
    result = plansmith("inspect", own, "--runs-on", "a30", "--with", "tensorrt_rtx=1.8.0")
    assert f"to build it again: {told}\n" in result.out and "plansmith build" not in result.out


def test_the_command_that_is_told_is_one(plansmith: Run, engine_dir: Path) -> None:
    """A float32 engine has no targets for GPUs, so what is told is an engine of its own."""
    pytest.importorskip("tensorrt_rtx")
    result = plansmith("inspect", engine_dir, "--runs-on", "l40s", "--json")
    told = json.loads(result.out)["runs_on"]["l40s"]["build"]
    assert told["remark"] == "sm89 has no plans in float32, so as an engine of its own"
    assert f"build one ({told['remark']}): plansmith build" in result.err
    words = shlex.split(told["command"])
    assert words[words.index("-o") + 1] == f"{engine_dir}-fp16"
    built = plansmith(*words[1:], "--dry-run")
    assert built.status == 0, built.err


def test_a_gpu_that_builds_its_own(plansmith: Run, copy: Path) -> None:
    """TensorRT's plans are built where such a GPU is."""
    result = plansmith("inspect", copy, "--runs-on", "b200")
    assert result.status == 1
    assert "  to build one that does on a machine with that GPU (sm100 has no" in result.out
    assert "build one on a machine with that GPU (sm100 has no" in result.err


def test_a_gpu_that_nothing_is_built_for(plansmith: Run, copy: Path) -> None:
    result = plansmith("inspect", copy, "--runs-on", "sm70")
    assert result.status == 1 and "to build" not in result.out
    assert "runs on sm70; this version builds for cpu, sm75, sm80" in result.err


@pytest.mark.parametrize("word", ["sm80", "SM_80", "8.0", "a100-40g", "A100-SXM4-80GB"])
def test_names_of_gpus(plansmith: Run, engine: Path, word: str) -> None:
    assert plansmith("inspect", engine, "--runs-on", word).status == 0


def test_several_places(plansmith: Run, engine: Path) -> None:
    good = plansmith("inspect", engine, "--runs-on", "a30,h100", "--runs-on", "cpu,a30")
    assert good.status == 0
    heads = [line for line in good.out.splitlines() if not line.startswith(" ")]
    assert [line.partition(" ")[0] for line in heads] == ["a30", "h100", "cpu"]
    some = plansmith("inspect", engine, "--runs-on", "a30,l4,a10")
    assert some.status == 1 and f"no target of {engine} runs on l4 or a10; build one: " in some.err


def test_without_a_gpu(plansmith: Run, engine: Path) -> None:
    assert (
        "  sm80: does not run\n    why: the plan is for GPUs (sm80)"
        in plansmith("inspect", engine, "--runs-on", "cpu").out
    )
    manifest = load_manifest(engine)
    targets = {name: one for name, one in manifest.targets.items() if name != "cpu"}
    write(engine, dataclasses.replace(manifest, targets=targets))
    result = plansmith("inspect", engine, "--runs-on", "cpu")
    assert result.status == 1
    assert f"no target of {engine} runs without a GPU; build one: plansmith build" in result.err
    assert "--target cpu" in result.err


@pytest.mark.parametrize(
    ("words", "status", "out", "err"),
    [
        (("a30", "--driver", "580.65.06"), 0, "with TensorRT-RTX 1.7.1\n", ""),
        (("a30", "--driver", "580", "--with", "tensorrt-rtx=1.7.1.116"), 0, "sm80: runs on the GPU\n", ""),
        (
            ("a30", "--driver", "570.2"),
            1,
            "the driver there is 570.2",
            "a30; install a driver of r580 or later there",
        ),
        (("a30", "--with", "tensorrt=10.0"), 0, "with TensorRT-RTX 1.7.1 and", ""),
        (
            ("a30", "--with", "tensorrt=11.0,tensorrt_rtx=1.8.0"),
            1,
            "to build it again: plansmith build",
            "or build the target again with 1.8.0: plansmith build",
        ),
        (
            ("h200", "--platform", "linux-x86_64", "--with", f"tensorrt={TRT}"),
            0,
            "sm90: runs on the GPU, with an",
            "",
        ),
        (("h200", "--platform", "windows-x86_64"), 1, "was built on linux-", "--force"),
        (
            ("gh200", "--driver", "600"),
            1,
            "do not run on another platform (linux-aarch64)",
            "build the target on linux-",
        ),
    ],
)
def test_what_if(
    plansmith: Run, engine: Path, words: tuple[str, ...], status: int, out: str, err: str
) -> None:
    manifest = load_manifest(engine)
    own = manifest.targets["sm90"].provenance
    assert own is not None
    x86 = dataclasses.replace(
        manifest.targets["sm90"], provenance=dataclasses.replace(own, platform="linux-x86_64")
    )
    write(engine, dataclasses.replace(manifest, targets=manifest.targets | {"sm90": x86}))
    result = plansmith("inspect", engine, "--runs-on", *words)
    assert result.status == status
    assert out in result.out and err in result.err
    assert bool(result.err) == bool(status)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--runs-on", "k80"), "'k80'"),
        (("--runs-on", ""), "--runs-on is empty"),
        (("--runs-on", " , "), "--runs-on is empty"),
        (("--runs-on", "l4", "--plan"), "--plan shows a plan"),
        (("--driver", "580"), "--driver describes the machine of --runs-on, which is not given"),
        (("--with", "tensorrt=1", "--upgrade", "tensorrt=2"), "--with describes the machine"),
        (("--platform", "linux-x86_64"), "--platform describes the machine"),
        (("--runs-on", "l4", "--driver", "13.0"), "no version of an NVIDIA driver"),
        (("--runs-on", "l4", "--platform", "linux"), "platform 'linux' is not known"),
        (("--runs-on", "l4", "--with", "cudnn=9"), "give NAME=VERSION, e.g. tensorrt_rtx=1.8.0"),
        (("--runs-on", "l4", "--with", "tensorrt"), "--with 'tensorrt' is not understood"),
        (("--runs-on", "l4", "--with", "tensorrt="), "--with 'tensorrt=' is not understood"),
        (("--runs-on", "l4", "--with", "tensorrt=1,tensorrt=2"), "--with names tensorrt twice"),
        (("--upgrade", ""), "--upgrade is empty"),
        (("--upgrade", "gcc=13"), "--upgrade 'gcc=13' is not understood"),
        (("--upgrade", "driver=13.0"), "no version of an NVIDIA driver"),
    ],
)
def test_what_is_refused(plansmith: Run, engine_dir: Path, words: tuple[str, ...], told: str) -> None:
    result = plansmith("inspect", engine_dir, *words)
    assert result.status == 1 and told in result.err and result.out == ""


def test_json(plansmith: Run, engine: Path) -> None:
    result = plansmith("inspect", engine, "--runs-on", "a30,l4", "--upgrade", "tensorrt_rtx=1.8.0", "--json")
    assert result.status == 1
    content = json.loads(result.out)
    assert set(content) == {"runs_on", "upgrade"}
    a30, l4 = content["runs_on"]["a30"], content["runs_on"]["l4"]
    assert (a30["runs"], l4["runs"]) == (True, False)
    assert (a30["title"], a30["sm"], a30["build"]) == ("NVIDIA A30", "sm80", None)
    sm80 = a30["targets"]["sm80"]
    assert sm80["runs"] and sm80["device"] == "gpu" and sm80["needs"][0] == "TensorRT-RTX 1.7.1"
    assert sm80["memory"]["sequences"] == 8 and sm80["memory"]["bytes_of_one"]["weights"] == 4
    assert a30["targets"]["cpu"]["memory"] is None and l4["targets"]["sm80"]["memory"] is None
    assert l4["build"] == {
        "command": load_manifest(engine).build_command("sm89"),
        "on_that_gpu": False,
        "remark": None,
    }
    assert l4["targets"]["sm80"]["reasons"] == ["the plan is for sm80, NVIDIA L4 is sm89"]


def test_a_gpu_with_too_little_memory(plansmith: Run, engine: Path) -> None:
    """Weights that are more than all of it are refused; what is estimated is warned of."""
    manifest = load_manifest(engine)
    sm80 = manifest.targets["sm80"]

    def with_plan(size: int, **fields: Any) -> TargetEntry:
        plan = engine / "targets/sm80/model.plan"
        with plan.open("r+b") as file:
            file.truncate(size)  # takes no room on the disk
        files = (dataclasses.replace(sm80.files[0], size=size),)
        return dataclasses.replace(sm80, files=files, **fields)

    def ask(entry: TargetEntry) -> Any:
        write(engine, dataclasses.replace(manifest, targets=manifest.targets | {"sm80": entry}))
        return plansmith("inspect", engine, "--runs-on", "a30")

    gib = 1 << 30
    result = ask(with_plan(25 * gib))
    assert result.status == 1
    assert "why: not one sequence of 128 tokens fits (weights 26.8 GB" in result.out
    assert "take a GPU with more memory" in result.err
    result = ask(with_plan(24 * gib - (64 << 20)))
    assert result.status == 0
    assert "warning: by estimate not one sequence of 128 tokens fits" in result.out
    result = ask(with_plan(25 * gib, flags=("weight_streaming",)))  # which stay in host memory
    assert result.status == 0 and "memory: 8 sequences" in result.out


def test_drafts(plansmith: Run, engine: Path) -> None:
    manifest = load_manifest(engine)
    sm80 = manifest.targets["sm80"]
    other = dataclasses.replace(sm80, compiler_version="1.6.0.1")
    write(engine, dataclasses.replace(manifest, draft=DraftEntry("int4", {"sm80": other})))
    words = ("inspect", engine, "--runs-on", "a30")
    assert "its draft" not in plansmith(*words).out
    result = plansmith(*words, "--with", "tensorrt_rtx=1.7.1")
    assert result.status == 0
    assert "warning: its draft does not run there: the plan was made by TensorRT-RTX 1.6.0.1" in result.out
    assert (
        "sm80: has to be built again" in plansmith("inspect", engine, "--upgrade", "tensorrt_rtx=1.7.1").out
    )


def test_kernels_beside_a_plan(plansmith: Run, engine: Path) -> None:
    from plansmith.runtime.executors.kernel_bundle import BundleEntry, CubinEntry, KernelEntry
    from plansmith.runtime.manifest import hash_file
    from plansmith.runtime.manifest_fields import to_json

    folder = engine / "targets/sm80/kernels"
    folder.mkdir()
    cubin = CubinEntry(sm=75, file="k.cubin", size=1, sha256="0" * 64, shared_bytes=0)
    kernel = KernelEntry(name="k", symbol="k", arguments=(), num_warps=1, constants={}, cubins=(cubin,))
    bundle = BundleEntry(schema_version=1, triton_version="3.9.0", key="0" * 64, kernels=(kernel,))
    path = folder / "kernels.json"
    path.write_text(json.dumps(to_json(bundle)))
    manifest = load_manifest(engine)
    sm80 = manifest.targets["sm80"]
    listed = FileEntry("targets/sm80/kernels/kernels.json", path.stat().st_size, hash_file(path))
    entry = dataclasses.replace(sm80, files=(*sm80.files, listed))
    write(engine, dataclasses.replace(manifest, targets=manifest.targets | {"sm80": entry}))
    result = plansmith("inspect", engine, "--runs-on", "a30")
    assert result.status == 1
    assert "the kernels beside the plan are compiled for sm75, not for sm80" in result.out
    assert "--target sm80" in result.err and "--force" in result.err


def test_upgrades(plansmith: Run, engine: Path) -> None:
    result = plansmith("inspect", engine, "--upgrade", "tensorrt_rtx=1.8.0,driver=590.44")
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith("after an upgrade to tensorrt_rtx 1.8.0, driver 590.44:\n  cpu: stays\n")
    assert (
        "  sm80: has to be built again\n    why: TensorRT-RTX 1.8.0 does not run plans of 1.7.1.116"
        in result.out
    )
    assert "  sm90: stays\n" in result.out
    command = f"{load_manifest(engine).build_command('sm80')} --force"
    assert result.out.endswith(f"with the new versions installed, run: {command}\n")
    both = json.loads(plansmith("inspect", engine, "--upgrade", "schema=9", "--json").out)["upgrade"]
    assert all(one["rebuild"] for one in both["targets"].values())
    assert "--target cpu,sm80,sm90" in both["command"]


def test_upgrades_that_change_nothing(plansmith: Run, engine: Path) -> None:
    this = plansmith("inspect", engine, "--upgrade", "plansmith")
    assert this.status == 0 and "built again" not in this.out and "run:" not in this.out
    later = plansmith("inspect", engine, "--upgrade", "plansmith=99.0").out
    assert later.count("stays\n") == 3 and "ask that version" in later
    driver = plansmith("inspect", engine, "--upgrade", "driver=590.44").out
    assert driver.count("compiled again at the next one") == 1  # TensorRT-RTX's alone


def test_a_damaged_engine_runs_nowhere(plansmith: Run, engine: Path) -> None:
    (engine / "targets/sm80/model.plan").write_bytes(b"short plan")
    result = plansmith("inspect", engine, "--runs-on", "a30")
    assert result.status == 1 and "was cut short or replaced" in result.err
