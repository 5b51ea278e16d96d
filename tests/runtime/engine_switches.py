"""Draws the options of an engine that must not change what a request gives; and a draft that is often right."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fake_executor import FakeModel, History
from hypothesis import strategies as st
from plansmith.runtime.executor import Executor, Float32Array, ModelInfo
from plansmith.runtime.native_engine import EngineOptions
from safetensors.numpy import save_file


class OftenRight(FakeModel):
    """The fake model, but after one history in three it has other logits."""

    def _logits(self, history: History, slot: int) -> Float32Array:
        return super()._logits(history if sum(history) % 3 else (-9, *history), slot)


def switches(info: ModelInfo, min_blocks: int, min_batch_size: int = 1) -> st.SearchStrategy[EngineOptions]:
    """Return options of every kind; those with draft_mode "model" want `with_draft`.

    min_blocks : of the largest request alone: with few more, others must be paused
    """

    def make(extra: int, blocks: int, host_blocks: int, **others: Any) -> EngineOptions:
        if host_blocks == 0 and others["pause_policy"] == "swap":
            others["pause_policy"] = "auto"
        return EngineOptions(
            max_num_tokens=min(
                info.max_num_tokens, max(others["max_batch_size"], 1 + others["max_draft_len"]) + extra
            ),
            kv_cache_bytes=blocks * info.kv_bytes_per_block,
            host_cache_bytes=host_blocks * info.kv_bytes_per_block,
            manual_step=True,
            **others,
        )

    return st.builds(
        make,
        max_batch_size=st.integers(min_batch_size, info.max_batch_size),
        extra=st.integers(0, 24),
        blocks=st.integers(min_blocks, 3 * min_blocks),
        host_blocks=st.sampled_from([0, 3, min_blocks, 4 * min_blocks]),
        scheduler_policy=st.sampled_from(["guaranteed_no_evict", "max_utilization", "max_utilization"]),
        chunking_policy=st.sampled_from(["first_come_first_served", "equal_progress"]),
        queue_order=st.sampled_from(["arrival", "shortest"]),
        pause_policy=st.sampled_from(["auto", "recompute", "swap"]),
        enable_block_reuse=st.booleans(),
        enable_partial_reuse=st.booleans(),
        draft_mode=st.sampled_from(["off", "ngram", "model"]),
        max_draft_len=st.integers(1, 5),
        adaptive_draft_len=st.booleans(),
        ngram_min=st.integers(1, 2),
    )


def with_draft(options: EngineOptions, make_draft: Callable[[], Executor]) -> EngineOptions:
    """Return options whose draft, if they want one, is there, with blocks for its pool beside the target's."""
    if options.draft_mode != "model":
        return options
    return dataclasses.replace(
        options, draft_executor=make_draft(), kv_cache_bytes=2 * options.kv_cache_bytes
    )


def write_fake_adapter(path: Path, info: ModelInfo) -> Path:
    """Write a PEFT directory that an engine over the fake model takes; the values do not matter to it."""
    path.mkdir()
    width = info.num_heads * info.head_dim
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora"
    ones = np.ones((2, width), np.float32)
    save_file(
        {f"{name}_A.weight": ones, f"{name}_B.weight": ones.T.copy()}, path / "adapter_model.safetensors"
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path
