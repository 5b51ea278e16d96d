"""TensorRT-RTX itself compiles every family, precision and GPU here; and what is left when it does not."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.graph import build_graph, weight_bytes
from plansmith.builder.precision import precision
from plansmith.builder.targets.compiler_child import CompileFailed, set_memory_flags
from plansmith.builder.targets.compiler_process import CompileResult, Stopped
from plansmith.builder.targets.rtx import child, peak_memory, profiles, schedule, targets
from plansmith.builder.targets.rtx import compile as compiling
from plansmith.builder.targets.rtx.compile import compile_plan, save_lowered
from plansmith.runtime.errors import BuildError, InvalidArgumentError, OutOfMemoryError, UnsupportedError
from rtx_models import LIMITS, tiny_graph, tiny_spec
from tiny_models import FAMILIES

pytest.importorskip("tensorrt_rtx")

SPEC = tiny_spec(windows=(0,))


def compile_tiny(
    tmp_path: Path, model: ir.Model | Path, sm: str = "sm89", **options: object
) -> CompileResult:
    """Compile into tmp_path/model.plan with the log beside it."""
    return compile_plan(model, LIMITS, SPEC, sm, tmp_path / "model.plan", tmp_path / "build.log", **options)  # type: ignore[arg-type]


def children() -> set[int]:
    """The processes that this one's threads have started and that still run."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        found.update(map(int, (task / "children").read_text().split()))
    return found


def left_in(folder: Path) -> list[str]:
    """File names, hidden ones too."""
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(family))
    spec = checkpoint.spec
    recipe = "bf16" if targets.residual_may_overflow(spec) else "fp16"
    compute = targets.compute_type(spec, recipe)
    graph = build_graph(spec, checkpoint.weights, precision(recipe), LIMITS, compute=compute)
    result = compile_plan(graph, LIMITS, spec, "sm89", tmp_path / "model.plan", tmp_path / "build.log")
    assert result.warnings == ()
    assert (tmp_path / "model.plan").stat().st_size > 1 << 20
    assert left_in(tmp_path) == ["build.log", "model.plan"]


@pytest.mark.parametrize("sm", list(targets.TARGETS))
def test_every_gpu(sm: str, tmp_path: Path) -> None:
    result = compile_tiny(tmp_path, tiny_graph(SPEC), sm)
    assert result.version.startswith("1.")
    capabilities = [f"compute_capability={c.lower()}" for c in targets.TARGETS[sm].capabilities]
    assert list(result.flags) == [
        *(*capabilities, "strongly_typed", "require_user_allocation"),
        *("causal=mask", "profiles=decode+prefill"),
    ]
    assert result.peak_rss_bytes > 100 << 20 and result.seconds > 0


@pytest.mark.parametrize(
    ("recipe", "compute"), [("bf16", "bfloat16"), ("int8", "float16"), ("int4", "float16")]
)
def test_every_precision(recipe: str, compute: str, tmp_path: Path) -> None:
    compile_tiny(tmp_path, tiny_graph(SPEC, recipe=recipe, compute=compute))


def test_weights_that_may_stay_on_the_host(tmp_path: Path) -> None:
    """The two ways with memory are two plans, and the compiler is told one of them."""
    results = {}
    for streams in (False, True):
        folder = tmp_path / str(streams)
        folder.mkdir()
        results[streams] = compile_tiny(folder, tiny_graph(SPEC), weight_streaming=streams).flags
    changed = set(results[True]) ^ set(results[False])
    assert changed == {"weight_streaming", "require_user_allocation"}
    assert (tmp_path / "True" / "model.plan").read_bytes() != (tmp_path / "False" / "model.plan").read_bytes()


@pytest.mark.parametrize("streams", [False, True])
def test_the_compiler_is_told_one_of_two_ways_with_memory(streams: bool) -> None:
    import tensorrt_rtx as trt

    config = trt.Builder(trt.Logger()).create_builder_config()
    set_memory_flags(trt, config, {"weight_streaming": streams})
    assert config.get_flag(trt.BuilderFlag.WEIGHT_STREAMING) == streams
    assert config.get_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION) != streams


def test_attention_masked_by_the_compiler_and_mixed_steps(tmp_path: Path) -> None:
    result = compile_tiny(tmp_path, tiny_graph(SPEC), causal="lower_right", mixed=True)
    assert result.flags[-2:] == ("causal=lower_right", "profiles=decode+prefill+mixed")


def test_progress_and_log(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    compile_tiny(tmp_path, tiny_graph(SPEC), progress=lambda *step: seen.append(step))
    assert seen[0] == ("Building engine", 0, seen[0][2])
    assert all(0 <= step <= steps for _, step, steps in seen)
    assert "Engine generation completed" in (tmp_path / "build.log").read_text()


def test_float16_of_a_model_that_overflows_it_is_a_warning(tmp_path: Path) -> None:
    spec = dataclasses.replace(SPEC, family="gemma2", norm_offset=1.0, embed_scale=8.0)
    result = compile_plan(
        tiny_graph(spec), LIMITS, spec, "sm89", tmp_path / "model.plan", tmp_path / "build.log"
    )
    assert any("65504" in line for line in result.warnings)


def test_what_the_gpu_lacks_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"sm75 .* has no bf16"):
        compile_tiny(tmp_path, tiny_graph(SPEC, recipe="bf16", compute="bfloat16"), "sm75")
    with pytest.raises(UnsupportedError, match="TensorRT-RTX cannot build for sm90"):
        compile_tiny(tmp_path, tiny_graph(SPEC), "sm90")
    assert left_in(tmp_path) == []


def test_a_file_that_is_no_graph(tmp_path: Path) -> None:
    (tmp_path / "graph.onnx").write_bytes(b"not a protobuf")
    with pytest.raises(BuildError, match="no ONNX file that can be read"):
        compile_tiny(tmp_path, tmp_path / "graph.onnx")
    assert left_in(tmp_path) == ["graph.onnx"]


def broken(tmp_path: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    """Write the lowered graph after `change` to its protobuf."""
    folder = tmp_path / "graph"
    folder.mkdir()
    save_lowered(tiny_graph(SPEC), folder / "graph.onnx")
    model = onnx.load(folder / "graph.onnx", load_external_data=False)
    change(model)
    (folder / "graph.onnx").write_bytes(model.SerializeToString())
    return folder / "graph.onnx"


def fail(tmp_path: Path, change: Callable[[onnx.ModelProto], None]) -> BuildError:
    """Compile a broken graph and return the error; nothing but the log is left."""
    path = broken(tmp_path, change)
    with pytest.raises(BuildError) as error:
        compile_tiny(tmp_path, path)
    assert left_in(tmp_path) == ["build.log", "graph"]
    return error.value


def test_an_op_that_the_compiler_does_not_know(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        node = next(n for n in model.graph.node if n.op_type == "RotaryEmbedding")
        node.op_type = "NoSuchOp"

    error = fail(tmp_path, change)
    assert "cannot parse the graph" in str(error)
    assert any("NoSuchOp" in line for line in error.log_lines)


def test_an_input_that_the_parser_drops_silently(tmp_path: Path) -> None:
    """The standard Attention's nonpad_kv_seqlen: without a word the parser builds a plan that attends over padding."""

    def change(model: onnx.ModelProto) -> None:
        node = next(n for n in model.graph.node if n.op_type == "TRT_Attention")
        q, k, v, mask = node.input[:4]
        lens = onnx.helper.make_node("Cast", ["kv_lens"], ["kv_lens_int64"], to=onnx.TensorProto.INT64)
        index = list(model.graph.node).index(node)
        standard = onnx.helper.make_node(
            "Attention",
            [q, k, v, mask, "", "", "kv_lens_int64"],
            list(node.output),
            name=node.name,
        )
        model.graph.node.remove(node)
        model.graph.node.insert(index, standard)
        model.graph.node.insert(index, lens)

    error = fail(tmp_path, change)
    assert "the parser dropped what reads kv_lens_int64" in str(error)


def test_an_input_that_no_layer_reads(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            for i, name in enumerate(node.input):
                if name == "position_ids":
                    node.input[i] = "input_ids"

    assert "the parser dropped what reads position_ids" in str(fail(tmp_path, change))


def test_an_input_of_the_file_that_nothing_reads(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.graph.input.append(onnx.helper.make_tensor_value_info("extra", onnx.TensorProto.INT32, ["B"]))

    assert "extra" in str(fail(tmp_path, change))


def test_a_type_that_differs_from_the_contract(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        next(v for v in model.graph.input if v.name == "logits_rows").type.tensor_type.elem_type = 7

    assert "input logits_rows of the parsed network is ('int64'" in str(fail(tmp_path, change))


def test_an_output_that_is_missing(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        del model.graph.output[-1]

    assert "output v_pool_out.0 of the parsed network is missing" in str(fail(tmp_path, change))


def script(tmp_path: Path, text: str) -> str:
    """An executable that takes the place of Python for the child."""
    path = tmp_path / "fake-python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo last words; kill -SEGV $$", "was ended by SIGSEGV: last words"),
        ("echo last words; exit 7", "ended with exit code 7: last words"),
        ("exit 0", "ended with exit code 0: no output"),
    ],
)
def test_a_compiler_that_crashes(text: str, message: str, tmp_path: Path) -> None:
    python = script(tmp_path, text)
    with pytest.raises(BuildError, match=message) as error:
        compile_tiny(tmp_path, tiny_graph(SPEC), python=python)
    assert error.value.log_lines == (("last words",) if "last" in text else ())
    assert left_in(tmp_path) == ["build.log", "fake-python"]


def test_a_compiler_that_is_killed(tmp_path: Path) -> None:
    def kill(phase: str, step: int, steps: int) -> None:
        for pid in children():
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(OutOfMemoryError, match=r"was killed after it held 0\.\d GB"):
        compile_tiny(tmp_path, tiny_graph(SPEC), progress=kill)
    assert left_in(tmp_path) == ["build.log"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupt_ends_the_child_and_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    started: set[int] = set()

    def interrupt(phase: str, step: int, steps: int) -> None:
        started.update(children())
        raise error

    with pytest.raises(error):
        compile_tiny(tmp_path, tiny_graph(SPEC), progress=interrupt)
    assert len(started) == 1 and not any(Path(f"/proc/{pid}").exists() for pid in started)
    assert left_in(tmp_path) == ["build.log"]


def test_a_compile_can_be_stopped_from_another_thread(tmp_path: Path) -> None:
    stop = threading.Event()
    python = script(tmp_path, "exec sleep 60")
    threading.Timer(0.3, stop.set).start()
    start = time.monotonic()
    with pytest.raises(Stopped):
        compile_tiny(tmp_path, tiny_graph(SPEC), python=python, stop=stop)
    assert time.monotonic() - start < 30 and not children()


def test_the_child_dies_with_its_parent(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import os, sys, time
        sys.path.insert(0, sys.argv[1])
        from test_compile import LIMITS, SPEC, children, compile_plan, os, signal, tiny_graph

        def hold(phase, step, steps):
            pid, = children()
            os.kill(pid, signal.SIGSTOP)
            print(pid, flush=True)
            time.sleep(60)

        compile_plan(tiny_graph(SPEC), LIMITS, SPEC, "sm89", sys.argv[2] + "/p", sys.argv[2] + "/l", hold)
    """)
    here = str(Path(__file__).parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    parent = subprocess.Popen(
        [sys.executable, "-c", program, here, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
    finally:
        parent.kill()
        parent.communicate()
    deadline = time.monotonic() + 30
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(pid)


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_full_disk_is_no_success(tmp_path: Path) -> None:
    """TensorRT takes an exception of the stream writer for success: the writer must keep it."""
    save_lowered(tiny_graph(SPEC), tmp_path / "graph.onnx")
    made = profiles.make_profiles(SPEC, LIMITS)
    job, _ = compiling._job(
        tmp_path / "graph.onnx", Path("/dev/full"), LIMITS, SPEC, targets.TARGETS["sm89"], made, False
    )
    with (
        Path(os.devnull).open("w") as events,
        pytest.raises(CompileFailed, match="No space left on device"),
    ):
        child.run(job, events)


def jobs(tmp_path: Path, sms: list[str]) -> list[schedule.CompileJob]:
    graph = tiny_graph(SPEC)
    return [
        schedule.CompileJob(graph, LIMITS, SPEC, sm, tmp_path / f"{sm}.plan", tmp_path / f"{sm}.log")
        for sm in sms
    ]


def test_several_targets_side_by_side(tmp_path: Path) -> None:
    results = schedule.compile_many(jobs(tmp_path, ["sm80", "sm89", "rtx"]))
    assert [r.flags[0] for r in results] == [
        "compute_capability=sm80",
        "compute_capability=sm89",
        results[2].flags[0],
    ]
    assert left_in(tmp_path) == ["rtx.log", "rtx.plan", "sm80.log", "sm80.plan", "sm89.log", "sm89.plan"]


def test_one_failure_stops_the_others(tmp_path: Path) -> None:
    def fail_at_once(phase: str, step: int, steps: int) -> None:
        raise BuildError("told to fail", ["line"])

    first, *rest = jobs(tmp_path, ["sm80", "sm86", "sm89"])
    with pytest.raises(BuildError, match="told to fail"):
        schedule.compile_many([dataclasses.replace(first, progress=fail_at_once), *rest], max_workers=1)
    assert not children() and not list(tmp_path.glob("*.plan"))


def test_an_interrupt_ends_all_compiles(tmp_path: Path) -> None:
    def interrupt(phase: str, step: int, steps: int) -> None:
        if not interrupted.is_set():
            interrupted.set()
            signal.pthread_kill(main, signal.SIGINT)

    interrupted, main = threading.Event(), threading.main_thread().ident
    two = [dataclasses.replace(job, progress=interrupt) for job in jobs(tmp_path, ["sm80", "sm89"])]
    with pytest.raises(KeyboardInterrupt):
        schedule.compile_many(two)
    assert not children() and not list(tmp_path.glob("*.plan")) and not list(tmp_path.glob(".rtx-*"))


def test_one_bad_target_refuses_all_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="sm90"):
        schedule.compile_many(jobs(tmp_path, ["sm80", "sm90"]))
    assert left_in(tmp_path) == []


def test_workers_follow_cores_memory_and_the_callers_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    four = jobs(tmp_path, ["sm80", "sm86", "sm89", "sm120"])
    peak = peak_memory.predicted_peak_bytes(four[0].model)
    monkeypatch.setattr(schedule.os, "sched_getaffinity", lambda pid: set(range(16)))
    for memory, wanted in ((100 * peak, 4), (2 * peak, 2), (peak // 2, 1)):
        monkeypatch.setattr(schedule, "available_memory_bytes", lambda memory=memory: memory)
        assert schedule.workers_for(four) == wanted
        assert schedule.workers_for(four, max_workers=1) == 1


def test_weight_bytes_counts_four_bits_as_half_a_byte() -> None:
    whole = sum(weight_bytes(tiny_graph(SPEC)).values())
    by_hand = sum(
        int(np.prod(list(v.shape))) * 2
        for v in tiny_graph(SPEC).graph.initializers.values()
        if v.dtype.itemsize == 2
    )
    assert by_hand <= whole <= by_hand * 1.1
    assert sum(weight_bytes(tiny_graph(SPEC, recipe="int4")).values()) < 0.6 * whole


def test_a_float_graph_without_pools_is_refused(tmp_path: Path) -> None:
    x = ir.Value(name="x", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.FLOAT))
    graph = ir.Graph([x], [x], nodes=[], opset_imports={"": 24}, name="other")
    with pytest.raises(InvalidArgumentError, match=r"no input k_pool\.0"):
        compile_tiny(tmp_path, ir.Model(graph, ir_version=11))
