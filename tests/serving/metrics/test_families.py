"""The old names are exactly the old ones, and the documentation has every family."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from plansmith.serving.metrics.families import FAMILIES, HISTOGRAM, OLD_FAMILIES, Family, bound_text

# What TensorRT-LLM's Triton backend exposed: name, kind, label, its values, buckets.
OLD = """
nv_trt_llm_request_metrics gauge request_type active,max,scheduled,context,waiting
nv_trt_llm_runtime_memory_metrics gauge memory_type cpu,gpu,pinned
nv_trt_llm_kv_cache_block_metrics gauge kv_cache_block_type max,free,used,tokens_per,reused,fraction
nv_trt_llm_inflight_batcher_metrics gauge inflight_batcher_specific_metric \
total_context_tokens,generation_requests,micro_batch_id,paused_requests
nv_trt_llm_v1_metrics gauge v1_specific_metric total_context_tokens,total_generation_tokens,empty_generation_slots
nv_trt_llm_general_metrics gauge general_type timestamp,iteration_counter
nv_trt_llm_disaggregated_serving_metrics counter disaggregated_serving_type kv_cache_transfer_ms,request_count
nv_llm_input_token_len histogram response_metric_type total_input_tokens 10,50,100,500,1000
nv_llm_output_token_len histogram response_metric_type total_output_tokens 10,50,100,500,1000
"""
DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


def described(family: Family) -> str:
    words = [family.name, family.kind, str(family.label), ",".join(family.values)]
    return " ".join(words + ([",".join(map(bound_text, family.bounds))] if family.bounds else []))


def test_the_old_families_are_letter_by_letter_the_old_ones() -> None:
    assert [described(family) for family in OLD_FAMILIES] == OLD.strip().splitlines()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_sound(family: Family) -> None:
    assert sum(one.name == family.name for one in FAMILIES) == 1
    assert re.fullmatch(r"(nv_trt_llm|nv_llm|plansmith)_[a-z0-9_]+", family.name)
    assert family.help and "\n" not in family.help and not family.help.endswith(".")
    assert (family.label is None) == (not family.values)
    assert (family.kind == HISTOGRAM) == bool(family.bounds)
    assert list(family.bounds) == sorted(set(family.bounds))
    assert [float(bound_text(bound)) for bound in family.bounds] == list(family.bounds)  # no digit is lost
    if family.name.startswith("plansmith_"):
        assert family.name.endswith("_total") == (family.kind == "counter")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_documentation_has_the_family(family: Family) -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith(f"| `{family.name}` |")]
    assert len(rows) == 1, f"docs/metrics.md has {len(rows)} rows of {family.name}"
    kind, label = rows[0].split("|")[2:4]
    assert kind.strip() == family.kind
    wanted = "" if family.label is None else f"`{family.label}`: {', '.join(family.values)}"
    assert label.strip() == wanted


def test_the_documentation_names_nothing_that_is_not_there() -> None:
    named = re.findall(r"^\| `((?:nv_trt_llm|nv_llm|plansmith)_\w+)` \|", DOCS.read_text(), re.M)
    assert sorted(named) == sorted(family.name for family in FAMILIES)
