"""Predicted speeds: against hand arithmetic, and how they move."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plansmith.runtime.errors import InvalidArgumentError
from plansmith.sizing.memory import ModelShape
from plansmith.sizing.roofline import Work, check_efficiency, decode_step, prefill_seconds
from plansmith.sizing.skus import SKUS, Sku

SHAPE = ModelShape(
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    hidden_size=512,
    intermediate_size=1024,
    vocab_size=1000,
)
WORK = Work(
    weight_bytes=10_000_000, products={"float16": 4_000_000}, head={"float16": 512_000}, kv_value_bytes=2
)
GPU = Sku("gpu", "GPU", "sm89", 1 << 30, 1e9, {"float16": 1e12, "fp8": 2e12}, "none")


def test_a_decode_step_by_hand() -> None:
    step = decode_step(SHAPE, WORK, GPU, batch=3, context=100)
    kv = 3 * 2 * 100 * (2 * 4 * 64 * 2)  # sequences, layers, positions, K and V of a position
    assert step.num_bytes == 10_000_000 + kv
    assert step.bytes_seconds == pytest.approx(step.num_bytes / 1e9)
    products, scores = 2 * (4_000_000 + 512_000), 4 * 8 * 64 * 2 * 100
    assert step.operations_seconds == pytest.approx(3 * (products + scores) / 1e12)
    assert step.bound == "memory" and step.seconds == step.bytes_seconds


def test_many_sequences_are_bound_by_arithmetic() -> None:
    fast = dataclasses.replace(GPU, bandwidth_bytes_s=1e13)
    step = decode_step(SHAPE, WORK, fast, batch=1000, context=16)
    assert step.bound == "compute" and step.seconds == step.operations_seconds


def test_a_window_bounds_what_is_read() -> None:
    windowed = dataclasses.replace(WORK, windows=(64, 0))
    full, some = (decode_step(SHAPE, one, GPU, batch=1, context=1000) for one in (WORK, windowed))
    row = 2 * 4 * 64 * 2
    assert full.num_bytes - some.num_bytes == row * (1000 - 64)


@pytest.mark.parametrize("chunk", [7, 64, 100, 1000])
def test_a_prefill_with_windows_by_hand(chunk: int) -> None:
    """Token by token: the windows' ends lie within chunks, on their edges and before them."""
    fast = dataclasses.replace(GPU, bandwidth_bytes_s=1e15)  # arithmetic alone
    windowed = dataclasses.replace(WORK, windows=(64, 0))
    pairs = sum(min(position, 64) + position for position in range(1, 201))
    expected = (200 * 2 * 4_000_000 + 2 * 512_000 + 4 * 8 * 64 * pairs) / 1e12
    found = prefill_seconds(SHAPE, windowed, fast, tokens=200, max_num_tokens=chunk)
    assert found == pytest.approx(expected, rel=1e-9)


def test_a_prefill_by_hand() -> None:
    fast = dataclasses.replace(GPU, bandwidth_bytes_s=1e15)  # arithmetic alone
    tokens = 64
    products = tokens * 2 * 4_000_000 + 2 * 512_000
    pairs = 2 * tokens * (tokens + 1) / 2  # layers, positions seen by all tokens
    expected = (products + 4 * 8 * 64 * pairs) / 1e12
    whole = prefill_seconds(SHAPE, WORK, fast, tokens=tokens, max_num_tokens=tokens)
    assert whole == pytest.approx(expected, rel=1e-9)
    # Chunks do the same arithmetic.
    cut = prefill_seconds(SHAPE, WORK, fast, tokens=tokens, max_num_tokens=16)
    assert cut == pytest.approx(expected, rel=1e-9)


def test_chunks_read_the_weights_again() -> None:
    slow = dataclasses.replace(GPU, bandwidth_bytes_s=1e6)
    whole, cut = (prefill_seconds(SHAPE, WORK, slow, tokens=64, max_num_tokens=most) for most in (64, 16))
    assert cut > 3.9 * whole


def test_types_that_a_gpu_lacks_run_as_float16() -> None:
    fp8 = dataclasses.replace(WORK, products={"fp8": 4_000_000})
    fast, same = (
        decode_step(
            SHAPE, fp8, dataclasses.replace(GPU, flops=flops), batch=64, context=16
        ).operations_seconds
        for flops in ({"float16": 1e12, "fp8": 2e12}, {"float16": 1e12})
    )
    assert fast < same
    assert same == decode_step(SHAPE, WORK, GPU, batch=64, context=16).operations_seconds


@given(
    batch=st.integers(1, 256),
    context=st.integers(1, 8192),
    sku=st.sampled_from(sorted(SKUS)),
    efficiency=st.floats(0.05, 1.0),
)
def test_time_grows_with_work_and_falls_with_efficiency(
    batch: int, context: int, sku: str, efficiency: float
) -> None:
    step = decode_step(SHAPE, WORK, SKUS[sku], batch=batch, context=context)
    larger = decode_step(SHAPE, WORK, SKUS[sku], batch=batch + 1, context=context + 1)
    assert larger.seconds > step.seconds
    # A batch is never slower than its sequences one by one.
    one = decode_step(SHAPE, WORK, SKUS[sku], batch=1, context=context)
    assert step.seconds <= batch * one.seconds * (1 + 1e-9)
    real = decode_step(SHAPE, WORK, SKUS[sku], batch=batch, context=context, efficiency=efficiency)
    assert real.seconds == pytest.approx(step.seconds / efficiency)
    assert real.bound == step.bound


@pytest.mark.parametrize("efficiency", [0.0, -1.0, 1.01, float("nan")])
def test_efficiencies_that_none_has(efficiency: float) -> None:
    with pytest.raises(InvalidArgumentError, match="must be above 0 and at most 1"):
        check_efficiency(efficiency)
