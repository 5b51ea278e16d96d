"""The optimization profiles hold every step that the limits allow, and no more tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plansmith.builder.limits import Limits
from plansmith.builder.targets.rtx import contract, profiles
from rtx_models import tiny_spec


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    batch = draw(st.integers(1, 512))
    return Limits(
        max_batch_size=batch,
        max_num_tokens=draw(st.integers(batch, 1 << 20)),
        max_seq_len=draw(st.integers(2, 1 << 17)),
        tokens_per_block=draw(st.sampled_from([8, 16, 32, 64, 128])),
    )


@given(limits())
def test_ranges_are_ordered_and_within_the_limits(lim: Limits) -> None:
    for profile in profiles.make_profiles(tiny_spec(), lim, mixed=True):
        for name, (low, opt, high) in profile.dims.items():
            assert 1 <= low <= opt <= high, (profile.name, name)
        assert profile.dims["B"][2] * profile.dims["S"][2] <= lim.max_num_tokens
        assert profile.dims["MB"][2] == lim.max_blocks_per_seq
        for tensor in contract.plan_inputs(tiny_spec(), lim, "float16"):
            for shape in profile.shapes(tensor):
                assert len(shape) == len(tensor.dims)
        pool = profile.dims["NB"][2] * tiny_spec().kv_width * lim.tokens_per_block
        assert pool < 1 << 31


@given(limits())
def test_decode_and_prefill_reach_the_limits(lim: Limits) -> None:
    decode, prefill = profiles.make_profiles(tiny_spec(), lim)[:2]
    assert decode.dims["B"][2] == lim.max_batch_size and decode.dims["S"] == (1, 1, 1)
    assert prefill.dims["S"][2] == lim.max_num_tokens and prefill.dims["B"] == (1, 1, 1)
    assert decode.dims["U"][2] == lim.max_batch_size and prefill.dims["U"][2] == lim.max_num_tokens


@pytest.mark.parametrize(("mixed", "num_tokens"), [(False, 16), (True, 15), (True, 16)])
def test_mixed_profile_only_when_asked_for_and_larger_than_decode(mixed: bool, num_tokens: int) -> None:
    lim = Limits(max_batch_size=8, max_num_tokens=num_tokens)
    names = [p.name for p in profiles.make_profiles(tiny_spec(), lim, mixed=mixed)]
    assert names == ["decode", "prefill"] + ["mixed"] * (mixed and num_tokens == 16)
