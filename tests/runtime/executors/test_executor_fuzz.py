"""Random requests of every kind together: whatever draws the tokens and captures the runs, they are the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_machine import Machine
from plansmith.runtime.errors import Error
from plansmith.runtime.sampling import SamplingParams
from random_requests import Job, Script, play, random_script

GetEngine = Callable[..., Any]


def served(built: Any, script: Script, *, device_sampling: bool, graphs: str) -> tuple[list[Any], Machine]:
    """Return what an engine answers a script; nothing is held, lost or wrong afterwards."""
    machine = Machine(built, device_sampling=device_sampling)
    with machine.engine(built.path, manual_step=True, cuda_graphs=graphs, **script.options) as engine:
        answers = play(engine, script)
        stats = engine.stats()
    assert stats.used_num_blocks == 0 and stats.free_num_blocks == stats.max_num_blocks
    assert stats.num_active_requests == stats.num_queued_requests == stats.num_paused_requests == 0
    assert stats.num_submitted_requests == stats.num_completed_requests
    assert machine.problems() == []
    return answers, machine


@pytest.mark.parametrize("seed", [13, *(pytest.param(n, marks=pytest.mark.slow) for n in range(20, 40))])
def test_tokens_do_not_depend_on_who_draws_and_captures(rtx_engine: GetEngine, seed: int) -> None:
    """The kernels and captured graphs against the core's draws and no graphs, bit for bit, log-probabilities too."""
    built = rtx_engine()
    script = random_script(np.random.default_rng(seed), 4)
    # When the others have ended, so that at least its rows are drawn on the device: none of them may ask for logits.
    alone = Job(400, [5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True, seed=1))
    script = dataclasses.replace(script, jobs=[*script.jobs, alone])
    on_device, device = served(built, script, device_sampling=True, graphs="own")
    on_host, host = served(built, script, device_sampling=False, graphs="off")
    for job, got, wanted in zip(script.jobs, on_device, on_host, strict=True):
        assert got == wanted, job
    assert device.cuda.num_launches > 0 and host.cuda.num_launches == 0


FAILURES = (None, "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED")
CALLS = ("cuMemcpyHtoDAsync", "cuEventRecord", "cuEventSynchronize", "cuStreamSynchronize", "cuGraphLaunch")
CALLS += ("cuStreamEndCapture", "cuMemcpyDtoHAsync", "cuMemcpy3DAsync", "cuCtxPushCurrent", "trt.run")


@pytest.mark.parametrize(
    "seed", [*range(4), 22, *(pytest.param(n, marks=pytest.mark.slow) for n in range(20, 80) if n != 22)]
)
def test_whatever_fails_every_request_ends(rtx_engine: GetEngine, seed: int) -> None:
    """Calls and work fail in the middle, while the engine's own thread runs: words for each request, and no leak."""
    built = rtx_engine()
    rng = np.random.default_rng(seed)
    script = random_script(rng, 8)
    machine = Machine(built)
    with machine.engine(built.path, cuda_graphs="own", **script.options) as engine:
        for _ in range(int(rng.integers(1, 4))):
            error = FAILURES[int(rng.integers(len(FAILURES)))]
            machine.cuda.calls.fail(str(rng.choice(CALLS)), int(rng.integers(1, 30)), error)
        if rng.random() < 0.3:
            machine.cuda.fault_at(int(rng.integers(1, 150)))
        handles = []
        for job in script.jobs:
            try:
                handles.append(engine.submit(job.prompt, dataclasses.replace(job.params, timeout_ms=20000)))
            except Error as error:
                assert len(str(error)) > 20
        for handle in handles:
            try:
                assert handle.result(timeout=60).outputs
            except Error as error:
                assert len(str(error)) > 20 and "DoubleError" not in str(error)
        assert engine.stats().used_num_blocks == 0
    machine.cuda.streams.before_run = None
    assert machine.problems() == []
