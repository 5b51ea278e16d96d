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
    for profile in profiles.make_profiles(tiny_spec(), lim):
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


def test_mixed_profile_only_where_it_holds_more_than_decode() -> None:
    names = [p.name for p in profiles.make_profiles(tiny_spec(), Limits(max_batch_size=8, max_num_tokens=15))]
    assert names == ["decode", "prefill"]
    names = [p.name for p in profiles.make_profiles(tiny_spec(), Limits(max_batch_size=8, max_num_tokens=16))]
    assert names == ["decode", "prefill", "mixed"]


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_manifest_fields_list_the_inputs_but_the_pools(compute: str) -> None:
    fields = contract.manifest_fields(tiny_spec(), Limits(), compute)
    assert (fields["token_layout"], fields["row_alignment"]) == ("rectangular", "right")
    assert [t["name"] for t in fields["inputs"]] == [
        "input_ids",
        "position_ids",
        "kv_lens",
        "block_table",
        "logits_rows",
        "kv_token_order",
        "kv_update_lengths",
        "kv_write_starts",
    ]
    assert all(isinstance(d, str) for t in fields["inputs"] for d in t["dims"])
