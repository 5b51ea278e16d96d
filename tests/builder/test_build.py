"""The build: what is compiled again, what is kept, and what is left when it fails or is killed."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from plansmith.builder import build as build_module
from plansmith.builder import build_key, compile
from plansmith.builder.build import build_engine, check_build, plan_build
from plansmith.builder.build_report import BuildReport, read_targets
from plansmith.builder.targets.cpu import read_plan
from plansmith.builder.verify_subject import open_subject
from plansmith.cli import main
from plansmith.runtime.errors import (
    BuildError,
    CheckpointError,
    EngineFileError,
    InvalidArgumentError,
    OutOfMemoryError,
    UnsupportedError,
)
from plansmith.runtime.executors.kernel_bundle import load
from plansmith.runtime.manifest import Manifest, load_manifest

LIMITS = {"max_batch_size": 4, "max_num_tokens": 32, "max_seq_len": 64, "tokens_per_block": 8}
GetCheckpoint = Callable[[str], pathlib.Path]


@pytest.fixture
def checkpoint(tiny_checkpoint: GetCheckpoint) -> pathlib.Path:
    return tiny_checkpoint("llama")


@pytest.fixture
def out(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "engine"


def build(
    checkpoint: pathlib.Path,
    out: pathlib.Path,
    *targets: str,
    precision: str = "fp32",
    limits: dict[str, Any] | None = None,
    weight_streaming: bool = False,
    group_size: int | None = None,
    **options: Any,
) -> BuildReport:
    plan = plan_build(
        checkpoint,
        targets or ["cpu"],
        precision=precision,
        limits={**LIMITS, **(limits or {})},
        weight_streaming=weight_streaming,
        group_size=group_size,
    )
    return build_engine(plan, out, **options)


def statuses(report: BuildReport) -> dict[str, str]:
    return {name: one.status for name, one in report.targets.items()}


def stable(manifest: Manifest) -> Manifest:
    """The manifest without its time and host fields."""
    host = dataclasses.replace(manifest.host, cpus=1)
    targets = {}
    for name, one in manifest.targets.items():
        assert one.provenance is not None
        provenance = dataclasses.replace(one.provenance, created="", host=host)
        targets[name] = dataclasses.replace(one, seconds=0.0, provenance=provenance)
    return dataclasses.replace(manifest, created="", host=host, targets=targets)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
def test_an_engine_is_whole_and_reproducible(
    checkpoint: pathlib.Path, tmp_path: pathlib.Path, precision: str
) -> None:
    for name in ("one", "two"):
        report = build(checkpoint, tmp_path / name, precision=precision)
        assert statuses(report) == {"cpu": "built"}
        load_manifest(tmp_path / name).check_files(hashes=True)
    one, two = load_manifest(tmp_path / "one"), load_manifest(tmp_path / "two")
    assert stable(one) == stable(two)
    assert one.precision == precision and one.limits.max_seq_len == 64
    assert one.plan_path("cpu").read_bytes() == two.plan_path("cpu").read_bytes()
    assert {path.name for path in (tmp_path / "one" / "tokenizer").iterdir()} >= {"tokenizer.json"}
    assert (tmp_path / "one" / "targets" / "cpu" / "build.log").read_text()


def test_the_report_tells_sizes_and_memory(checkpoint: pathlib.Path, out: pathlib.Path) -> None:
    report = build(checkpoint, out, precision="int8")
    one = report.targets["cpu"]
    assert one.plan_bytes == load_manifest(out).plan_path("cpu").stat().st_size
    assert 0 < sum(one.weight_bytes.values()) <= one.plan_bytes
    assert set(one.weight_bytes) == {"float32", "int8"}
    assert one.peak_rss_bytes > 1 << 20
    assert (one.group_size, one.kv_dtype) == ("32 columns", "float16")
    assert read_targets(out) == report.targets
    written = out / "build_report.json"
    for name in ("seconds", "peak_rss_bytes", "plan_bytes", "group_size", "kv_dtype"):
        values = report.to_json()
        values["targets"]["cpu"][name] = 1 if name in ("group_size", "kv_dtype") else "x"
        written.write_text(json.dumps(values))
        assert read_targets(out) == {}
    assert build(checkpoint, out, precision="int8", force=True).targets["cpu"].status == "built"


def test_the_model_is_described(checkpoint: pathlib.Path, out: pathlib.Path) -> None:
    build(checkpoint, out)
    model = load_manifest(out).model
    assert (model.family, model.num_layers, model.num_kv_heads, model.head_dim) == ("llama", 2, 2, 32)
    assert model.eos_token_ids == (2,)


def test_unchanged_is_kept(checkpoint: pathlib.Path, out: pathlib.Path) -> None:
    build(checkpoint, out)
    before = (out / "manifest.json").stat()
    assert statuses(build(checkpoint, out)) == {"cpu": "kept"}
    after = (out / "manifest.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert statuses(build(checkpoint, out, force=True)) == {"cpu": "built"}


def test_changed_sources_build_again(
    checkpoint: pathlib.Path, out: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(checkpoint, out)
    monkeypatch.setattr(build_key, "sources_digest", lambda compiler: "changed")
    assert statuses(build(checkpoint, out)) == {"cpu": "built"}


def test_changed_limit_builds_again(checkpoint: pathlib.Path, out: pathlib.Path) -> None:
    build(checkpoint, out)
    assert statuses(build(checkpoint, out, limits={"max_batch_size": 2})) == {"cpu": "built"}
    assert load_manifest(out).limits.max_batch_size == 2


def test_changed_tokenizer_is_written_and_plans_are_kept(
    checkpoint: pathlib.Path, tmp_path: pathlib.Path, out: pathlib.Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in checkpoint.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    build(copy, out)
    before = load_manifest(out)
    (copy / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert statuses(build(copy, out)) == {"cpu": "kept"}
    after = load_manifest(out)
    after.check_files(hashes=True)
    assert after.targets == before.targets
    assert after.tokenizer != before.tokenizer


def test_a_damaged_plan_is_built_again(checkpoint: pathlib.Path, out: pathlib.Path) -> None:
    build(checkpoint, out)
    plan = load_manifest(out).plan_path("cpu")
    good = plan.read_bytes()
    plan.write_bytes(good[:-64] + bytes(64))
    assert statuses(build(checkpoint, out)) == {"cpu": "built"}
    assert plan.read_bytes() == good
    load_manifest(out).check_files(hashes=True)


def test_another_precision_or_model_is_not_overwritten(
    checkpoint: pathlib.Path, tiny_checkpoint: GetCheckpoint, out: pathlib.Path
) -> None:
    build(checkpoint, out)
    with pytest.raises(
        InvalidArgumentError, match=r"another precision .it has fp32, asked for is int8.*--force"
    ):
        build(checkpoint, out, precision="int8")
    with pytest.raises(InvalidArgumentError, match=r"another checkpoint .it was built from"):
        build(tiny_checkpoint("qwen3"), out)
    assert load_manifest(out).model.family == "llama"
    build(tiny_checkpoint("qwen3"), out, force=True)
    assert load_manifest(out).model.family == "qwen3"


def test_a_damaged_manifest_needs_force(checkpoint: pathlib.Path, out: pathlib.Path) -> None:
    build(checkpoint, out)
    (out / "manifest.json").write_text("{")
    with pytest.raises(EngineFileError, match="not valid JSON"):
        build(checkpoint, out)
    build(checkpoint, out, force=True)
    load_manifest(out).check_files(hashes=True)


def test_a_checkpoint_inside_what_is_replaced_stays(checkpoint: pathlib.Path, out: pathlib.Path) -> None:
    build(checkpoint, out)
    inner = shutil.copytree(checkpoint, out / "checkpoint")
    with pytest.raises(InvalidArgumentError, match="is replaced as a whole, and the checkpoint"):
        build(inner, out, force=True)
    assert (inner / "config.json").is_file()


def test_targets_are_added(checkpoint: pathlib.Path, out: pathlib.Path, fake_rtx: Any) -> None:
    build(checkpoint, out, precision="int8")
    report = build(checkpoint, out, "sm89", precision="int8")
    assert statuses(report) == {"cpu": "kept", "sm89": "built"}
    manifest = load_manifest(out)
    manifest.check_files(hashes=True)
    assert set(manifest.targets) == {"cpu", "sm89"}
    assert manifest.targets["sm89"].token_layout == "rectangular"
    assert [one.name for one in manifest.targets["sm89"].inputs][-3:] == [
        "kv_token_order",
        "kv_update_lengths",
        "kv_write_starts",
    ]
    assert (out / "targets" / "cpu" / "build.log").is_file()
    assert set(read_targets(out)) == {"cpu", "sm89"}


def test_plans_with_and_without_weight_streaming_are_two(
    checkpoint: pathlib.Path, out: pathlib.Path, fake_rtx: Any
) -> None:
    streams = {"precision": "int8", "weight_streaming": True}
    build(checkpoint, out, "cpu,sm89", precision="int8")
    assert statuses(build(checkpoint, out, "cpu,sm89", **streams)) == {"cpu": "kept", "sm89": "built"}
    assert statuses(build(checkpoint, out, "cpu,sm89", **streams)) == {"cpu": "kept", "sm89": "kept"}
    assert statuses(build(checkpoint, out, "cpu,sm89", precision="int8")) == {"cpu": "kept", "sm89": "built"}
    with pytest.raises(InvalidArgumentError, match=r"--weight-streaming is for plans of GPUs"):
        build(checkpoint, out, "cpu", **streams)


def test_groups_of_columns_can_be_chosen(checkpoint: pathlib.Path, out: pathlib.Path, fake_rtx: Any) -> None:
    wide = {"precision": "int8", "group_size": 64}
    build(checkpoint, out, "cpu", precision="int8")
    plain = load_manifest(out)
    assert statuses(build(checkpoint, out, "cpu", **wide)) == {"cpu": "built"}
    assert statuses(build(checkpoint, out, "cpu", **wide)) == {"cpu": "kept"}
    manifest = load_manifest(out)
    assert plain.targets["cpu"].group_size is None and manifest.targets["cpu"].group_size == 64
    assert manifest.build_command("cpu") == f"{plain.build_command('cpu')} --group-size 64"
    assert read_targets(out)["cpu"].group_size == "64 columns"
    assert "64 columns" in (out / "build_report.html").read_text()
    with open_subject(out) as subject:
        assert subject.recipe.scheme("layers.0.q", 64).weight_group == 64
        found = {t.name: t.group_size for t in read_plan(subject.plan).tensors}
        assert found["layers.0.q|k|v.weight"] == 64 and found["embed.weight"] == 32
    for options, words in (
        ({"precision": "int8", "group_size": 48}, "--group-size is 48; choose one of 32, 64, 128"),
        ({"precision": "bf16", "group_size": 64}, "bf16 has no groups to choose"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            build(checkpoint, out, "cpu", **options)
    with pytest.raises(UnsupportedError, match="sm89 has one scale an output"):
        build(checkpoint, out, "cpu,sm89", **wide)


def test_a_command_that_builds_again_streams_as_the_target_does(
    checkpoint: pathlib.Path, out: pathlib.Path, fake_rtx: Any
) -> None:
    build(checkpoint, out, "cpu,sm89", precision="int8")
    plain = load_manifest(out)
    sm89 = dataclasses.replace(plain.targets["sm89"], flags=("weight_streaming",))
    streams = dataclasses.replace(plain, targets={**plain.targets, "sm89": sm89})
    assert streams.targets["sm89"].streams_weights and not plain.targets["sm89"].streams_weights
    assert streams.build_command("cpu,sm89") == f"{plain.build_command('cpu,sm89')} --weight-streaming"
    assert streams.build_command("cpu") == plain.build_command("cpu")


def test_a_changed_limit_does_not_lose_other_targets(
    checkpoint: pathlib.Path, out: pathlib.Path, fake_rtx: Any
) -> None:
    build(checkpoint, out, "cpu,sm89", precision="int8")
    other = {"max_batch_size": 2}
    with pytest.raises(InvalidArgumentError, match=r"max_batch_size 4, asked for 2.*holds sm89 besides"):
        build(checkpoint, out, "cpu", precision="int8", limits=other)
    assert statuses(build(checkpoint, out, "cpu,sm89", precision="int8", limits=other)) == {
        "cpu": "built",
        "sm89": "built",
    }
    assert statuses(build(checkpoint, out, "cpu", precision="int8", force=True)) == {"cpu": "built"}
    assert set(load_manifest(out).targets) == {"cpu"}


def test_force_keeps_what_matches_and_was_not_asked_for(
    checkpoint: pathlib.Path, out: pathlib.Path, fake_rtx: Any
) -> None:
    build(checkpoint, out, "cpu,sm89", precision="int8")
    report = build(checkpoint, out, "cpu", precision="int8", force=True)
    assert statuses(report) == {"cpu": "built", "sm89": "kept"}


def test_a_failing_target(checkpoint: pathlib.Path, out: pathlib.Path, fake_rtx: dict[str, Any]) -> None:
    fake_rtx["sm89"] = BuildError("the compiler failed", ["last line"])
    with pytest.raises(BuildError, match="the compiler failed"):
        build(checkpoint, out, "cpu,sm89", precision="int8")
    assert not out.exists()
    with pytest.raises(BuildError, match="1 target failed: sm89: the compiler failed") as caught:
        build(checkpoint, out, "cpu,sm86,sm89", precision="int8", keep_going=True)
    assert caught.value.log_lines == ("last line",)
    assert set(load_manifest(out).targets) == {"cpu", "sm86"}
    fake_rtx["sm89"] = None
    report = build(checkpoint, out, "cpu,sm86,sm89", precision="int8")
    assert statuses(report) == {"cpu": "kept", "sm86": "kept", "sm89": "built"}


def test_keep_going_builds_what_can_be_built_here(
    checkpoint: pathlib.Path, out: pathlib.Path, fake_rtx: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    # sm75 has no INT4 weights, sm100 no GPU here.
    with pytest.raises(UnsupportedError, match="sm75"):
        plan_build(checkpoint, ["cpu,sm75"], precision="int4", limits=LIMITS)
    plan = plan_build(checkpoint, ["cpu,sm75,sm89,sm100"], precision="int4", limits=LIMITS, keep_going=True)
    assert [one.name for one in plan.targets] == ["cpu", "sm89"] and list(plan.refused) == ["sm75", "sm100"]
    for _ in range(2):  # also where nothing is left to do
        with pytest.raises(
            BuildError, match=r"2 targets failed: sm75: .*no INT4 weights.*; sm100: "
        ) as caught:
            build_engine(plan, out, keep_going=True)
        assert set(load_manifest(out).targets) == {"cpu", "sm89"}
    assert caught.value.log_lines == ()
    with pytest.raises(UnsupportedError, match="sm100"):
        plan_build(checkpoint, ["sm75,sm100"], precision="int4", limits=LIMITS, keep_going=True)
    limits = [f"--{name}={value}" for name, value in LIMITS.items()]
    with pytest.raises(SystemExit) as exit_:
        main(
            [
                "build",
                str(checkpoint),
                "-t",
                "cpu,sm75",
                "-p",
                "int4",
                "--keep-going",
                "--dry-run",
                "--json",
                *limits,
            ]
        )
    facts = json.loads(capsys.readouterr().out)
    assert not exit_.value.code and facts["targets"] == ["cpu"] and "INT4" in facts["refused"]["sm75"]


def test_a_target_that_failed_gets_no_draft(
    checkpoint: pathlib.Path, out: pathlib.Path, fake_rtx: dict[str, Any]
) -> None:
    fake_rtx["sm89"] = BuildError("no")
    plan = plan_build(checkpoint, ["cpu", "sm89"], precision="int8", limits=LIMITS, draft="int4")
    with pytest.raises(BuildError, match="1 target failed: sm89: no"):
        build_engine(plan, out, keep_going=True)
    manifest = load_manifest(out)
    assert manifest.draft is not None and set(manifest.draft.targets) == set(manifest.targets) == {"cpu"}
    assert not (out / "targets/sm89/draft").exists()


def test_nothing_is_written_when_all_fail(
    checkpoint: pathlib.Path, out: pathlib.Path, fake_rtx: dict[str, Any]
) -> None:
    fake_rtx["sm89"] = BuildError("no")
    with pytest.raises(BuildError, match="sm89: no"):
        build(checkpoint, out, "sm89", precision="int8", keep_going=True)
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("targets", "kind", "words"),
    [
        (["tpu"], InvalidArgumentError, "'tpu' is not known; choose one or more of cpu, sm75"),
        ([" , "], InvalidArgumentError, "--target is empty"),
        (["sm70"], UnsupportedError, "build for sm70.*cpu, which runs anywhere"),
        (["7.0"], UnsupportedError, "sm70"),
        (["cpu", "sm75"], UnsupportedError, "sm75.*has no INT4 weights"),
    ],
)
def test_targets_are_checked_first(
    checkpoint: pathlib.Path, targets: list[str], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        plan_build(checkpoint, targets, precision="int4")


def test_spellings_of_a_target(checkpoint: pathlib.Path) -> None:
    plan = plan_build(checkpoint, ["SM_89,cpu", "8.6", "sm89"], precision="int8")
    assert [target.name for target in plan.targets] == ["sm89", "cpu", "sm86"]


def test_auto_precision_follows_the_checkpoint_and_the_targets(checkpoint: pathlib.Path) -> None:
    assert plan_build(checkpoint, ["cpu"]).recipe.name == "fp32"
    assert plan_build(checkpoint, ["cpu,sm89"]).recipe.name == "fp16"


def test_bad_arguments_before_any_work(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvalidArgumentError, match="--precision 'int3' is not known"):
        plan_build(checkpoint, ["cpu"], precision="int3")
    with pytest.raises(InvalidArgumentError, match="--max_seq_len is 9999"):
        plan_build(checkpoint, ["cpu"], limits={"max_seq_len": 9999})
    with pytest.raises(CheckpointError, match="does not exist"):
        plan_build(tmp_path / "none", ["cpu"])


def test_the_estimate_of_disk_is_near(checkpoint: pathlib.Path, out: pathlib.Path) -> None:
    plan = plan_build(checkpoint, ["cpu"], precision="fp16")
    build_engine(plan, out)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert size <= check_build(plan, out.with_name("another"))[1] <= size + (9 << 20)
    assert check_build(plan, out)[1] < size  # what is there is kept


FULL = """
import resource, sys
from plansmith.builder import build
from plansmith.runtime.errors import OutOfMemoryError
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
try:
    build.build_engine(build.plan_build(sys.argv[1], ["cpu"], precision="fp32"), sys.argv[2])
except OutOfMemoryError as error:
    print("refused:", error)
"""


def test_signed_and_unsigned_int4_are_counted_together() -> None:
    assert compile._plain_names({"uint4": 4, "int4": 3, "f16": 2}) == {"float16": 2, "int4": 7}


def test_disk_full_in_the_compiler(checkpoint: pathlib.Path, out: pathlib.Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(checkpoint), str(out)], capture_output=True, text=True, check=True
    )
    assert "does not fit on the disk" in done.stdout, done.stderr
    assert list(out.parent.iterdir()) == []


def test_disk_full_is_seen_before(
    checkpoint: pathlib.Path, out: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "needed_bytes", lambda request, targets: 10**18)
    with pytest.raises(OutOfMemoryError, match="checked before the build"):
        build(checkpoint, out)
    assert list(out.parent.iterdir()) == []


LOOP = """
import os, signal, sys
from plansmith.builder.build import build_engine, plan_build
for line in sys.stdin:  # each asks for a process that builds until it is killed
    if os.fork() == 0:
        print("process", os.getpid(), flush=True)
        while True:
            plan = plan_build(sys.argv[1], ["cpu"], precision="int8", limits={"max_seq_len": 64})
            build_engine(plan, sys.argv[2], force=True)
            print("built", flush=True)
    if os.wait()[1] != signal.SIGKILL:
        sys.exit("the build ended by itself")
    print("killed", flush=True)
"""


def test_killed_at_any_moment(checkpoint: pathlib.Path, out: pathlib.Path) -> None:
    """A whole engine or none, and the next build works and tidies up."""
    with subprocess.Popen(
        [sys.executable, "-c", LOOP, str(checkpoint), str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None

        def until(word: str) -> str:
            while not (line := parent.stdout.readline()).startswith(word):  # type: ignore[union-attr]
                assert line, "the builds have ended"
            return line

        for n in range(24):
            print(file=parent.stdin, flush=True)
            pid = int(until("process").split()[1])
            until("built")
            time.sleep(0.005 * n)
            os.kill(pid, signal.SIGKILL)
            until("killed")
            load_manifest(out).check_files(hashes=True)
    build(checkpoint, out, precision="int8")
    assert list(out.parent.iterdir()) == [out]


def test_two_builds_at_once(
    checkpoint: pathlib.Path, out: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []

    def progress(target: str, phase: str, done: int, total: int) -> None:
        if target == "cpu" and not refused:
            with pytest.raises(BuildError, match=f"process {os.getpid()}. is writing"):
                build(checkpoint, out)
            refused.append(phase)

    build(checkpoint, out, progress=progress)
    assert refused
    load_manifest(out).check_files(hashes=True)


@pytest.mark.parametrize("event", [BuildError("no plan"), KeyboardInterrupt()])
def test_the_log_of_a_failure_stays_beside(
    checkpoint: pathlib.Path, out: pathlib.Path, monkeypatch: pytest.MonkeyPatch, event: BaseException
) -> None:
    from plansmith.builder.targets.rtx import schedule

    def compile_many(jobs: list[schedule.CompileJob], *_: object) -> Any:
        jobs[0].log_path.write_text("the compiler's words")
        raise event

    monkeypatch.setattr(schedule, "compile_many", compile_many)
    with pytest.raises(type(event)):
        build(checkpoint, out, "cpu,sm89", precision="int8")
    left = [path.name for path in out.parent.iterdir()]
    assert left == (["engine.sm89.log"] if isinstance(event, BuildError) else [])
    build(checkpoint, out, precision="int8")
    assert list(out.parent.iterdir()) == [out]


def test_a_real_gpu_plan(checkpoint: pathlib.Path, out: pathlib.Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    report = build(checkpoint, out, "cpu,sm89", precision="int8")
    assert statuses(report) == {"cpu": "built", "sm89": "built"}
    manifest = load_manifest(out)
    manifest.check_files(hashes=True)
    target = manifest.targets["sm89"]
    assert target.sm == ("sm89",) and "compute_capability=sm89" in target.flags
    assert target.files[0].size > 100_000
    assert target.profiles == ("decode", "prefill")
    pytest.importorskip("triton")
    folder = manifest.kernels_dir("sm89")
    assert folder is not None and report.targets["sm89"].notes == ()
    assert all(kernel.cubin[:4] == b"\x7fELF" for kernel in load(folder, 89).kernels.values())
    assert list(out.parent.iterdir()) == [out]
