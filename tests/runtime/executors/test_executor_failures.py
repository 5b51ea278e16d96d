"""What goes wrong on a GPU is an error in words, and whatever went wrong, everything is released."""

from __future__ import annotations

import dataclasses
import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_machine import Machine
from plansmith.runtime.engine import Engine, SamplingParams
from plansmith.runtime.errors import (
    CudaError,
    EngineFileError,
    Error,
    ExecutorError,
    OutOfMemoryError,
    UnsupportedError,
)
from plansmith.runtime.executors import device_sampler, kernel_bundle

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPTS = [[1, 5, 9, 33], list(range(10, 40))]
GetEngine = Callable[..., Any]


def serve(machine: Machine, path: Path, **options: Any) -> list[list[int]]:
    """Open, answer with copies of blocks on the way, close; everything step by step in this thread."""
    with machine.engine(path, manual_step=True, host_cache_bytes=1 << 16, **options) as engine:
        out = [list(one.token_ids) for one in engine.generate(PROMPTS, GREEDY)]
        out += [list(one.token_ids) for one in engine.generate([[*PROMPTS[1][:11], 7]], GREEDY)]
    return out


def serve_with_failure(built: Any, nth: int) -> tuple[Machine, Any]:
    """Let the nth call of driver or TensorRT fail; return what came of serving."""
    machine = Machine(built)
    machine.cuda.calls.fail(nth=nth)
    outcome: Any = None
    try:
        outcome = serve(machine, built.path, cuda_graphs="own")
    except Error as failure:
        outcome = failure
    return machine, outcome


@pytest.fixture(scope="module")
def good(rtx_engine: GetEngine) -> tuple[Any, list[str], list[list[int]]]:
    """Return the engine, the calls of a run in which nothing fails, and its tokens."""
    built = rtx_engine()
    machine = Machine(built)
    out = serve(machine, built.path, cuda_graphs="own")
    assert machine.problems() == []
    return built, machine.cuda.calls.names, out


def indices(names: list[str], most_each: int) -> list[int]:
    """Return call numbers, 1 = the first: the first few of each name, which is every place where one is made."""
    seen: dict[str, int] = {}
    chosen = []
    for i, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        if seen[name] <= most_each:
            chosen.append(i + 1)
    return chosen


@pytest.mark.parametrize("most_each", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_whichever_call_fails_nothing_is_left(good: Any, most_each: int) -> None:
    """The first calls of each name fail, one a run: the tokens are right or there is an error in words."""
    built, names, wanted = good
    for nth in indices(names, most_each):
        machine, outcome = serve_with_failure(built, nth)
        assert machine.cuda.calls.failed, nth
        what = f"call {nth}, {machine.cuda.calls.failed[0]}: {outcome}"
        assert machine.problems() == [], what
        if isinstance(outcome, Error):
            assert isinstance(
                outcome, CudaError | OutOfMemoryError | ExecutorError | UnsupportedError | EngineFileError
            ), what
            assert len(str(outcome)) > 20, what
        else:
            assert outcome == wanted, what


@pytest.mark.parametrize("nth", [1, 3, 6, 9])
def test_a_broken_device_is_an_error_for_every_request_after_it(good: Any, nth: int) -> None:
    built, _, _ = good
    machine = Machine(built)
    with machine.engine(built.path, manual_step=True) as engine:
        machine.cuda.fault_at(nth)
        for _ in range(3):
            with pytest.raises(ExecutorError, match=r"ILLEGAL_ADDRESS|illegal address") as caught:
                engine.generate(PROMPTS, GREEDY)
        assert "restart the process" in str(caught.value) or "does nothing any more" in str(caught.value)
    gc.collect()
    assert [one for one in machine.problems() if "leak" in one or "use after" in one] == []


def test_a_step_that_fails_fails_its_requests_alone(good: Any) -> None:
    built, _, wanted = good
    machine = Machine(built)
    with machine.engine(built.path, manual_step=True, cuda_graphs="off") as engine:
        machine.cuda.calls.fail("trt.run", nth=3)
        with pytest.raises(ExecutorError, match=r"tensorrt_rtx refuses the run: .*Enqueue failed"):
            engine.generate(PROMPTS, GREEDY)
        assert [list(one.token_ids) for one in engine.generate(PROMPTS, GREEDY)] == wanted[:2]
    assert machine.problems() == []


def test_a_machine_without_a_driver(rtx_engine: GetEngine) -> None:
    built = rtx_engine()
    for options, words in (
        ({"missing": True}, r"no working NVIDIA driver.*nvidia-smi.*open the cpu target"),
        ({"num_devices": 0}, r"the driver sees no GPU .*CUDA_VISIBLE_DEVICES"),
        ({"version": 11080}, r"driver"),
    ):
        machine = Machine(built, **options)
        with pytest.raises(UnsupportedError, match=words):
            machine.engine(built.path)
        assert machine.problems() == []
        # What runs anyway: the cpu target, by its name and by "auto".
        with machine.engine(built.path, target="auto", num_threads=1) as engine:
            assert engine.generate([[5]], GREEDY)


def test_pools_get_their_share_of_what_is_free(rtx_engine: GetEngine) -> None:
    built = rtx_engine()
    machine = Machine(built, total_bytes=32 << 20)
    with machine.engine(built.path, kv_cache_bytes=0, kv_cache_free_gpu_mem_fraction=0.5) as engine:
        stats = engine.stats()
        assert 0.3 * (32 << 20) < stats.kv_cache_bytes <= 0.5 * (32 << 20)
        assert engine.generate([[5]], GREEDY)
    assert machine.problems() == []


def test_closing_in_every_state_leaves_nothing(rtx_engine: GetEngine) -> None:
    """After opening, between steps, with requests queued and running, twice, and never opened."""
    built = rtx_engine()
    for steps in (0, 1, 2, 5):
        machine = Machine(built)
        engine = machine.engine(built.path, manual_step=True)
        for prompt in PROMPTS:
            engine.submit(prompt, GREEDY)
        for _ in range(steps):
            engine.step()
        engine.close()
        engine.close()
        assert machine.problems() == [], steps
    machine = Machine(built)
    executor = machine.executor(built.path)
    executor.close()
    executor.close()
    del executor
    assert machine.problems() == []
    machine = Machine(built)
    with machine.engine(built.path) as engine:  # with a thread of its own, in the middle of its steps
        for prompt in PROMPTS:
            engine.submit(prompt, dataclasses.replace(GREEDY, max_tokens=60))
    assert machine.problems() == []


def test_weights_that_do_not_fit_stay_on_the_host(rtx_engine: GetEngine) -> None:
    built = rtx_engine()
    with Engine.open(built.path, num_threads=1) as cpu:
        wanted = [list(one.token_ids) for one in cpu.generate(PROMPTS, GREEDY)]
    # Of 400 MB nearly all can stream; 256 MB of a device are left to CUDA where not all fit.
    plan = dataclasses.replace(built.plan(), weights_bytes=400 << 20, streamable_bytes=390 << 20)
    for total in (600 << 20, 900 << 20):
        machine = Machine(total_bytes=total)
        machine.trt.know(plan, built.plan_bytes)
        with machine.engine(built.path) as engine:
            assert [list(one.token_ids) for one in engine.generate(PROMPTS, GREEDY)] == wanted
        assert machine.problems() == []


def test_a_sampler_without_memory_for_more_edits_draws_on(
    rtx_engine: GetEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step brings more edits than there is room for, and no memory is left: it fails, those after it do not."""
    built = rtx_engine()
    monkeypatch.setattr(device_sampler, "_FIRST_STAGING_BYTES", 2048)
    machine = Machine(built, device_sampling=True)
    many = dataclasses.replace(GREEDY, max_tokens=1, logit_bias=dict.fromkeys(range(320), 1.0))
    few = dataclasses.replace(GREEDY, max_tokens=1)
    with machine.engine(built.path, manual_step=True) as engine:
        for name in ("cuMemAlloc", "cuMemHostAlloc"):
            machine.cuda.calls.fail(name)
            with pytest.raises(ExecutorError, match="OUT_OF_MEMORY"):
                engine.generate(PROMPTS[:1], many)
            assert engine.generate(PROMPTS[:1], few)[0].token_ids
        assert engine.generate(PROMPTS[:1], many)[0].token_ids
    assert machine.problems() == []


def test_kernels_of_another_version_are_not_launched(rtx_engine: GetEngine, tmp_path: Path) -> None:
    """Other arguments, constants or threads than the program's would write anywhere, as a changed file would."""
    built = rtx_engine()
    bundle = kernel_bundle.load(built.path / "targets" / "sm89" / "kernels", 89)
    draw = bundle.kernels["sampling_draw"]
    changes: list[dict[str, Any]] = [
        {"arguments": draw.arguments[::-1]},
        {"constants": {**draw.constants, next(iter(draw.constants)): 3}},
        {"num_warps": 2 * draw.num_warps},
    ]
    machine = Machine(built, device_sampling=True)
    for change in changes:
        other = dataclasses.replace(
            bundle, kernels={**bundle.kernels, draw.name: dataclasses.replace(draw, **change)}
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel_bundle, "load", lambda *_, other=other: other)
            with pytest.raises(EngineFileError, match=r"sampling_draw .* was compiled by another version"):
                machine.engine(built.path)
    path = Path(shutil.copytree(built.path, tmp_path / "engine"))
    listed = path / "targets" / "sm89" / "kernels" / kernel_bundle.BUNDLE_NAME
    listed.write_text(listed.read_text().replace("sampling_draw", "sampling_dram", 1))
    with pytest.raises(EngineFileError, match=r"kernels.json has sha256 .* its contents changed after"):
        machine.engine(path)
    assert machine.problems() == []
