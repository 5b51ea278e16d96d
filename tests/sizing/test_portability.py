"""Which plan runs where: a table of cases, every rule from both sides."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from plansmith.builder.targets.cpu.plan_file import FORMAT_VERSION
from plansmith.builder.targets.registry import Target, find_targets, target_names
from plansmith.runtime.executors.trt import LIBRARIES
from plansmith.runtime.manifest_entries import FileEntry, HostEntry, ProvenanceEntry, TargetEntry
from plansmith.sizing import releases
from plansmith.sizing.portability import Verdict, runs_on
from plansmith.sizing.skus import SKUS, find_sku

RTX, TRT = "1.7.1.116", "11.4.0.106"
HOST = HostEntry(os="Linux", machine="x86_64", cpu="cpu", cpus=2, memory_bytes=1 << 34, python="3.11")


def origin(
    *tools: str,
    platform: str = "linux-x86_64",
    gpus: Sequence[str] = (),
    inputs: dict[str, str] | None = None,
) -> ProvenanceEntry:
    return ProvenanceEntry(
        created="2026-01-31T12:00:00Z",
        plansmith_version="0.1.0",
        host=HOST,
        platform=platform,
        gpus=tuple(gpus),
        tools=("python 3.11.7", *tools),
        inputs=inputs or {},
    )


def plan(
    *sms: str, compiler: str = "tensorrt_rtx", version: str = RTX, kernels: bool = True, **fields: Any
) -> TargetEntry:
    """Return the entry of a plan for GPUs; fields : others than usual."""
    files = ["targets/x/model.plan", *(["targets/x/kernels/kernels.json"] if kernels else [])]
    usual: dict[str, Any] = {
        "compiler": compiler,
        "compiler_version": version,
        "sm": sms,
        "token_layout": "rectangular",
        "compute_dtype": "float16",
        "kv_dtype": "float16",
        "activation_quantization": "none",
        "row_alignment": "right",
        "inputs": (),
        "profiles": (),
        "files": tuple(FileEntry(path=path, size=1, sha256="0" * 64) for path in files),
        "flags": (),
        "key": "0" * 64,
        "seconds": 1.0,
    }
    return TargetEntry(**(usual | fields))


def cpu_plan(version: str = f"format-{FORMAT_VERSION}") -> TargetEntry:
    return plan(compiler="plansmith-cpu", version=version, kernels=False)


def kinds(verdict: Verdict) -> list[str]:
    return [one.kind for one in verdict.problems]


L40S, A10, H200 = find_sku("l40s"), find_sku("a10"), find_sku("h200")


@pytest.mark.parametrize(
    ("entry", "where", "asked", "problems"),
    [
        # A plan of TensorRT-RTX: the capabilities it was built for, its own release, a driver for its CUDA.
        (plan("sm89"), L40S, {}, []),
        (plan("sm89"), "sm89", {}, []),
        (plan("sm89"), A10, {}, ["gpu"]),
        (plan("sm86"), L40S, {}, ["gpu"]),  # a cubin of sm86 would run there, such a plan does not
        (plan("sm80", "sm86", "sm89", "sm120"), A10, {}, []),
        (plan("sm80", "sm86", "sm89", "sm120"), H200, {}, ["gpu"]),
        (plan("sm89"), None, {}, ["gpu"]),
        (plan("sm89"), L40S, {"compiler_version": RTX}, []),
        (plan("sm89"), L40S, {"compiler_version": "1.7.1.999"}, []),
        (plan("sm89"), L40S, {"compiler_version": "1.7.2.0"}, ["version"]),
        (plan("sm89"), L40S, {"compiler_version": "1.8.0"}, ["version"]),
        (plan("sm89"), L40S, {"driver": (580, 65, 6)}, []),
        (plan("sm89"), L40S, {"driver": (610,)}, []),
        (plan("sm89"), L40S, {"driver": (579, 99)}, ["driver"]),
        (plan("sm89"), L40S, {"compiler_version": "1.6", "driver": (570, 1)}, ["version", "driver"]),
        (plan("sm89"), L40S, {"platform": "windows-x86_64"}, []),
        (plan("sm89", provenance=origin()), L40S, {"platform": "windows-x86_64"}, []),
        # Of TensorRT: its own build, and its own platform.
        (plan("sm90", compiler="tensorrt", version=TRT), H200, {"compiler_version": TRT}, []),
        (
            plan("sm90", compiler="tensorrt", version=TRT),
            H200,
            {"compiler_version": "11.4.0.99"},
            ["version"],
        ),
        (plan("sm90", compiler="tensorrt", version=TRT), H200, {"compiler_version": "11.4.0"}, []),
        (plan("sm90", compiler="tensorrt", version=TRT), H200, {"compiler_version": "11.5.0"}, ["version"]),
        (
            plan("sm90", compiler="tensorrt", version=TRT, provenance=origin()),
            H200,
            {"platform": "windows-x86_64"},
            ["platform"],
        ),
        (
            plan("sm90", compiler="tensorrt", version=TRT, provenance=origin()),
            H200,
            {"platform": "linux-x86_64"},
            [],
        ),
        # A GH200 has its own processor.
        (
            plan("sm90", compiler="tensorrt", version=TRT, provenance=origin()),
            find_sku("gh200"),
            {},
            ["platform"],
        ),
        (
            plan("sm90", compiler="tensorrt", version=TRT, provenance=origin(platform="linux-aarch64")),
            find_sku("gh200"),
            {},
            [],
        ),
        # Kernels beside the plan.
        (plan("sm89"), L40S, {"kernel_sms": (89,)}, []),
        (plan("sm89"), L40S, {"kernel_sms": (80, 86)}, []),  # cubins of earlier minor versions run
        (plan("sm89"), L40S, {"kernel_sms": (75, 90)}, ["kernels"]),
        (plan("sm89"), L40S, {"kernel_sms": ()}, ["kernels"]),
        (plan("sm89", kernels=False), L40S, {"kernel_sms": (75,)}, []),
        # Others.
        (plan("sm89", compiler="other"), L40S, {}, ["compiler"]),
        (cpu_plan(), None, {}, []),
        (cpu_plan(), L40S, {"driver": (300,), "platform": "linux-aarch64"}, []),
        (cpu_plan("format-1"), None, {}, ["format"]),
        (cpu_plan(), None, {"compiler_version": "format-99"}, ["format"]),
        (cpu_plan("unknown"), None, {}, ["format"]),
    ],
)
def test_cases(entry: TargetEntry, where: Any, asked: dict[str, Any], problems: list[str]) -> None:
    verdict = runs_on(entry, where, **asked)
    assert kinds(verdict) == problems
    assert verdict.ok == (not problems)
    assert verdict.device == ("gpu" if entry.sm else "cpu")
    assert len(verdict.reasons) == len(verdict.fixes) == len(problems)
    assert all(
        text and text[0].islower() and not text.endswith(".") for text in (*verdict.reasons, *verdict.fixes)
    )


def test_words() -> None:
    verdict = runs_on(plan("sm80", "sm86"), L40S)
    assert verdict.reasons == ("the plan is for sm80, sm86, NVIDIA L40S is sm89",)
    assert verdict.fixes == ("build a target for sm89",)
    verdict = runs_on(plan("sm89"), "sm89", compiler_version="1.8.0", driver=(535, 2))
    assert verdict.reasons == (
        "the plan was made by TensorRT-RTX 1.7.1.116, 1.8.0 is there, and plans run on their own release alone (1.7.1)",
        "the driver there is 535.2, TensorRT-RTX 1.7.1.116 on sm89 asks for r580 or later",
    )
    assert verdict.fixes == (
        "install tensorrt-rtx==1.7.1.116 there, or build the target again with 1.8.0",
        "install a driver of r580 or later there",
    )
    assert runs_on(cpu_plan("format-1"), None).reasons == (
        f"the plan has format 1, plansmith there reads format {FORMAT_VERSION}",
    )


def test_what_has_to_be_there() -> None:
    assert runs_on(plan("sm89"), L40S).needs == ("TensorRT-RTX 1.7.1", "an NVIDIA driver of r580 or later")
    told = runs_on(plan("sm89"), L40S, driver=(580,), compiler_version=RTX)
    assert told.needs == () and told.warnings == ()
    trt = plan("sm90", compiler="tensorrt", version=TRT)
    assert runs_on(trt, H200).needs[0] == "TensorRT 11.4.0.106"
    assert runs_on(plan("sm89", version="unknown"), L40S).needs[0] == "TensorRT-RTX unknown"
    assert runs_on(cpu_plan(), L40S).needs == ()
    # Only what is to run somewhere needs anything.
    assert runs_on(plan("sm80"), L40S).needs == ()


@pytest.mark.parametrize(
    ("compiler", "tools", "sm", "least"),
    [
        ("tensorrt_rtx", ("tensorrt_rtx 1.7.1.116", "tensorrt_rtx_cu13 1.7.1.116"), "sm89", 580),
        ("tensorrt_rtx", ("tensorrt_rtx_cu12 1.7.1.116",), "sm89", 525),
        ("tensorrt_rtx", ("tensorrt_rtx_cu12 1.7.1.116",), "sm120", 570),
        ("tensorrt", ("tensorrt_cu12 11.4.0.106",), "sm89", 535),
        ("tensorrt", ("tensorrt_cu12 11.4.0.106",), "sm103", 575),
        ("tensorrt", ("tensorrt_cu13 11.4.0.106",), "sm103", 580),
        ("tensorrt", ("tensorrt_cu13_bindings 11.4.0.106", "tensorrt_rtx_cu12 1"), "sm90", 580),
        (
            "tensorrt",
            ("tensorrt_cu99 1",),
            "sm90",
            580,
        ),  # what is not known is taken as what our extras install
    ],
)
def test_the_driver_follows_from_package_and_gpu(
    compiler: str, tools: tuple[str, ...], sm: str, least: int
) -> None:
    version = RTX if compiler == "tensorrt_rtx" else TRT
    entry = plan(sm, compiler=compiler, version=version, provenance=origin(*tools))
    assert runs_on(entry, sm).needs[-1] == f"an NVIDIA driver of r{least} or later"
    assert kinds(runs_on(entry, sm, driver=(least,))) == []
    assert kinds(runs_on(entry, sm, driver=(least - 1, 999))) == ["driver"]


def test_what_the_manifest_does_not_say_is_warned_of() -> None:
    before = runs_on(plan("sm89"), L40S, driver=(570,))
    assert "does not say which CUDA version" in before.warnings[0]
    known = plan("sm89", provenance=origin("tensorrt_rtx_cu13 1.7.1.116"))
    after = runs_on(known, L40S, driver=(570,))
    assert after.warnings == () and "for CUDA 13 on sm89 asks" in after.reasons[0]
    short = runs_on(plan("sm89"), L40S, compiler_version="1.7", driver=(580,))
    assert short.ok and "1.7 may be any release of that name; the plan needs 1.7.1" in short.warnings[0]
    trt = plan("sm90", compiler="tensorrt", version=TRT)
    warned = runs_on(trt, H200, platform="linux-x86_64").warnings
    assert any("does not say whether that was linux-x86_64" in text for text in warned)
    arm = runs_on(plan("sm89", provenance=origin()), L40S, platform="linux-aarch64", driver=(580,))
    assert arm.ok and "on x86_64, not for linux-aarch64" in arm.warnings[0]


def test_timings_are_of_one_model_of_gpu() -> None:
    def warnings(entry: TargetEntry, where: Any) -> tuple[str, ...]:
        return runs_on(entry, where, compiler_version=entry.compiler_version, driver=(600,)).warnings

    trt = plan("sm90", compiler="tensorrt", version=TRT)
    own = dataclasses.replace(trt, provenance=origin("tensorrt_cu13 1", gpus=["NVIDIA H200"]))
    assert warnings(own, H200) == ()
    (other,) = warnings(own, find_sku("h100"))
    assert "by their times on NVIDIA H200; another model of sm90 may run them slower" in other
    assert "may refuse" in warnings(own, "sm90")[0]
    assert "on the GPU that built it" in warnings(trt, H200)[0]
    strange = dataclasses.replace(trt, provenance=origin(gpus=["NVIDIA Nonesuch"]))
    assert "NVIDIA Nonesuch" in warnings(strange, H200)[0]
    # TensorRT-RTX times nothing when it builds; it compiles for the GPU that it meets.
    rtx = runs_on(plan("sm89"), L40S)
    assert rtx.warnings == () and "when it first runs them" in rtx.notes[0]


def test_notes() -> None:
    assert "tokens are drawn on the host" in runs_on(plan("sm89", kernels=False), L40S).notes[-1]
    assert "not on its GPU" in runs_on(cpu_plan(), L40S).notes[0]
    assert runs_on(cpu_plan(), None).notes == ()


def compilers_name(target: Target) -> str:
    return {"cpu": "plansmith-cpu", "rtx": "tensorrt_rtx"}.get(target.compiler, target.compiler)


@pytest.mark.parametrize("name", target_names())
def test_every_target_runs_on_the_gpus_of_its_capabilities_alone(name: str) -> None:
    (target,) = find_targets([name])
    version = f"format-{FORMAT_VERSION}" if name == "cpu" else RTX if target.compiler == "rtx" else TRT
    entry = plan(*target.sm, compiler=compilers_name(target), version=version)
    for sku in SKUS.values():
        assert runs_on(entry, sku).ok == (not target.sm or sku.sm in target.sm)


def test_tables_are_those_of_the_rest() -> None:
    assert releases.CPU_PLAN_FORMAT == FORMAT_VERSION
    assert releases.COMPILERS.keys() == LIBRARIES.keys()
    sms = {sm for name in target_names() for sm in find_targets([name])[0].sm} | {
        one.sm for one in SKUS.values()
    }
    # 580 is what CUDA 13 asks for; every GPU has a first driver of its own before.
    assert {releases.least_driver("tensorrt_rtx", 11, sm) for sm in sms} <= {450, 455, 520, 570, 575}
    assert all(releases.least_driver("tensorrt", 13, sm) == 580 for sm in sms)
