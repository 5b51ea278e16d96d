"""Simulated executors: published sizes, times by hand, and an engine on top."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from numpy.typing import NDArray
from plansmith.runtime.errors import InvalidArgumentError, OutOfMemoryError
from plansmith.runtime.events import EndEvent, TokenEvent
from plansmith.runtime.native_engine import EngineOptions, NativeEngine, Submission
from plansmith.runtime.sampling import SamplingParams
from plansmith.runtime.simulated import GPUS, MODELS, Reached, SimulatedLimits, kv_room, simulate

LIMITS = SimulatedLimits(max_batch_size=8, max_num_tokens=256, max_input_len=512, max_seq_len=1024)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("SmolLM2-135M", 0.1345),
        ("SmolLM2-1.7B", 1.711),
        ("Qwen2.5-0.5B", 0.494),
        ("Qwen2.5-7B", 7.615),
        ("Llama-3.2-1B", 1.236),
        ("Llama-3.1-8B", 8.030),
        ("Llama-3.1-70B", 70.55),
    ],
)
def test_models_have_the_published_number_of_weights(name: str, billions: float) -> None:
    # The model cards' numbers; norms and biases, which are left out, are far below a thousandth.
    assert MODELS[name].num_weights / 1e9 == pytest.approx(billions, rel=1e-3)


def test_kv_bytes_of_llama_8b() -> None:
    assert MODELS["Llama-3.1-8B"].kv_bytes_per_token == 131072  # 128 KiB a token, as widely quoted


def run(engine: NativeEngine, prompts: list[list[int]], max_tokens: int) -> dict[int, list[int]]:
    for client_id, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0)
        submission = Submission(np.array(prompt, np.int32), params, max_tokens, client_id=client_id)
        engine.submit(submission)
    tokens: dict[int, list[int]] = {client_id: [] for client_id in range(len(prompts))}
    while engine.step():
        for event in engine.poll(0):
            if isinstance(event, TokenEvent):
                tokens[event.client_id].append(event.token_id)
            else:
                assert isinstance(event, EndEvent)
    return tokens


def test_a_decode_step_takes_the_time_of_its_bytes() -> None:
    reached = Reached(memory_share=0.5, flops_share=0.5, overhead_us=100.0)
    executor = simulate("Llama-3.1-8B", "H100-SXM", LIMITS, reached=reached)
    engine = NativeEngine(executor, EngineOptions(manual_step=True, kv_cache_bytes=1 << 30))
    run(engine, [[1, 2, 3]], 1)
    before = engine.stats()
    run(engine, [[1, 2, 3, 4]], 101)
    took = engine.stats().since(before)
    weights = MODELS["Llama-3.1-8B"].weight_bytes
    assert took.iter == 101
    per_step = weights / (3.35e12 * 0.5) + 100e-6
    assert took.step_time_ns / took.iter / 1e9 == pytest.approx(per_step, rel=0.01)  # and a little KV
    engine.close()


def first_token_times(prompts: list[list[int]], queue_order: str) -> NDArray[np.float64]:
    """Return each prompt's time to its first token on the simulated clock, all of them asked at once."""
    options = EngineOptions(manual_step=True, kv_cache_bytes=1 << 30, queue_order=queue_order)
    limits = dataclasses.replace(LIMITS, max_batch_size=32)
    engine = NativeEngine(simulate("Llama-3.1-8B", "H100-SXM", limits), options)
    for client_id, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0)
        engine.submit(Submission(np.array(prompt, np.int32), params, 4, client_id=client_id))
    times = np.zeros(len(prompts))
    while engine.step():
        for event in engine.poll(0):
            if isinstance(event, TokenEvent) and times[event.client_id] == 0:
                times[event.client_id] = engine.stats().step_time_ns
    engine.close()
    return times


def test_first_tokens_of_a_burst_come_sooner_with_the_shortest_first() -> None:
    rng = np.random.default_rng(4)
    lengths = rng.permutation(np.linspace(17, 253, 24).astype(int))
    prompts = [[i, *rng.integers(0, 64, n - 1)] for i, n in enumerate(lengths)]  # nothing in common
    by_arrival, shortest = (first_token_times(prompts, order) for order in ("arrival", "shortest"))
    assert shortest.mean() < 0.85 * by_arrival.mean()
    assert shortest.max() < 1.05 * by_arrival.max()
    assert (np.diff(shortest[np.argsort(lengths)]) >= 0).all()
    assert (np.diff(by_arrival) >= 0).all()


def test_tokens_do_not_depend_on_the_gpu_or_on_the_batch() -> None:
    prompts = [[7, 8, 9, i] for i in range(6)]
    outputs = []
    for gpu, group in (("T4", prompts), ("B200", prompts), ("B200", prompts[3:4])):
        executor = simulate("SmolLM2-135M", gpu, LIMITS, seed=3)
        engine = NativeEngine(executor, EngineOptions(manual_step=True, kv_cache_bytes=1 << 28))
        outputs.append(run(engine, group, 40))
        engine.close()
    assert outputs[0] == outputs[1]
    assert outputs[2][0] == outputs[0][3]


def test_a_draft_makes_a_lone_request_faster_and_changes_nothing() -> None:
    limits = dataclasses.replace(LIMITS, max_logits_rows=64)
    times, outputs = [], []
    for drafted in (False, True):
        target = simulate("Llama-3.1-8B", "L4", limits, seed=5)
        draft = simulate("Llama-3.2-1B", "L4", limits, seed=6, draft_of_seed=5, draft_agreement=0.9)
        options = EngineOptions(manual_step=True, kv_cache_bytes=1 << 30)
        if drafted:
            options = dataclasses.replace(options, draft_mode="model", draft_executor=draft, max_draft_len=4)
        else:
            draft.close()
        engine = NativeEngine(target, options)
        outputs.append(run(engine, [[1, 2, 3]], 200))
        stats = engine.stats()
        times.append(stats.step_time_ns + stats.draft_time_ns)
        engine.close()
    assert outputs[0] == outputs[1]
    assert times[1] < 0.6 * times[0]


def test_errors_name_what_there_is() -> None:
    with pytest.raises(InvalidArgumentError, match="no GPU is called 'H1000'; there are T4, A10"):
        simulate("Llama-3.1-8B", "H1000")
    with pytest.raises(InvalidArgumentError, match="no model is called"):
        simulate("Llama-9", "T4")
    with pytest.raises(OutOfMemoryError, match=r"141\.1 GB, 1 x H100-SXM has 72\.0 GB"):
        simulate("Llama-3.1-70B", "H100-SXM")
    with pytest.raises(InvalidArgumentError, match="num_gpus is 0"):
        kv_room("Llama-3.1-8B", "T4", num_gpus=0)
    with pytest.raises(InvalidArgumentError, match=r"memory_share is 1\.5"):
        Reached(memory_share=1.5)
    with pytest.raises(InvalidArgumentError, match="draft_agreement is 2"):
        simulate("SmolLM2-135M", "T4", draft_agreement=2.0)
    assert kv_room("Llama-3.1-70B", "H100-SXM", num_gpus=2) > 0
    assert all(gpu.flops_per_s / gpu.memory_bytes_per_s > 100 for gpu in GPUS.values())


def test_drafts_are_as_long_as_a_step_has_rows_for_unless_a_length_is_asked_for() -> None:
    limits = dataclasses.replace(LIMITS, max_batch_size=4, max_logits_rows=4)
    outputs = []
    for mode in ("off", "ngram"):
        executor = simulate("SmolLM2-135M", "T4", limits, seed=3)
        engine = NativeEngine(executor, EngineOptions(manual_step=True, draft_mode=mode))
        outputs.append(run(engine, [[7, 8] * 9], 40))
        engine.close()
    assert outputs[0] == outputs[1]
    options = EngineOptions(manual_step=True, draft_mode="ngram", max_draft_len=8)
    with pytest.raises(InvalidArgumentError, match="max_logits_rows is 4; lower max_draft_len to 3"):
        NativeEngine(simulate("SmolLM2-135M", "T4", limits), options)
