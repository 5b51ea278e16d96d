"""What an engine's statistics say under the names of the families: pure functions."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from ...runtime.executors.executor import DeviceUse
from ...runtime.stats import EngineStats, IterationStats

Readings = dict[str, Mapping["str | None", float]]
"""Family name -> value of its label (None where it has none) -> number."""

_STATM = Path("/proc/self/statm")


def read_state(stats: EngineStats, last: IterationStats | None, device: DeviceUse | None = None) -> Readings:
    """Return all gauges that come from the engine.

    device : the memory of its GPU, as used by anybody; None on cpu
    last : the record of the last step; None before the first, or where the engine keeps none
    """
    blocks = stats.max_num_blocks
    paused = stats.num_paused_requests
    return {
        "nv_trt_llm_request_metrics": _requests(stats, last),
        "nv_trt_llm_runtime_memory_metrics": {
            "cpu": resident_bytes(),
            "gpu": 0 if device is None else device.used,
            "pinned": 0 if device is None else device.pinned,
        },
        "nv_trt_llm_kv_cache_block_metrics": {
            "max": blocks,
            "free": stats.free_num_blocks,
            "used": stats.used_num_blocks,
            "tokens_per": stats.tokens_per_block,
            "reused": stats.reused_blocks,
            "fraction": stats.used_num_blocks / blocks if blocks else 0.0,  # an engine may have no KV cache
        },
        "nv_trt_llm_inflight_batcher_metrics": _batcher(stats, last),
        "nv_trt_llm_general_metrics": {
            "timestamp": 0 if last is None else unix_us(last.timestamp_ns),
            "iteration_counter": stats.iter,
        },
        "plansmith_requests": {
            "running": stats.num_active_requests - paused,
            "paused": paused,
            "queued": stats.num_queued_requests,
        },
        "plansmith_requests_unfinished": {None: stats.num_submitted_requests - stats.num_completed_requests},
        "plansmith_kv_cache_blocks": {
            "max": blocks,
            "used": stats.used_num_blocks,
            "cached": stats.cached_num_blocks,
            "host_max": stats.host_max_num_blocks,
            "host_used": stats.host_used_num_blocks,
        },
        "plansmith_kv_cache_bytes": {None: stats.kv_cache_bytes},
        "plansmith_prefix_cache_hit_ratio": {None: stats.kv_cache_hit_rate},
        "plansmith_draft_acceptance_ratio": {None: stats.acceptance_rate},
        "plansmith_last_update_timestamp_seconds": {None: time.time()},
    }


def read_totals(stats: EngineStats) -> Readings:
    """Return all counters that come from the engine; they never fall while it lives."""
    return {
        "plansmith_requests_submitted_total": {None: stats.num_submitted_requests},
        "plansmith_prompt_tokens_total": {None: stats.num_prompt_tokens},
        "plansmith_generation_tokens_total": {None: stats.num_generated_tokens},
        "plansmith_prefix_cache_blocks_total": {"hit": stats.reused_blocks, "miss": stats.missed_blocks},
        "plansmith_prefix_cache_tokens_total": {None: stats.reused_tokens},
        "plansmith_kv_cache_copied_blocks_total": {
            "offloaded": stats.offloaded_blocks,
            "onboarded": stats.onboarded_blocks,
        },
        "plansmith_draft_tokens_total": {
            "proposed": stats.num_draft_tokens,
            "accepted": stats.num_accepted_draft_tokens,
        },
        "plansmith_draft_failures_total": {None: stats.num_failed_drafts},
        "plansmith_pauses_total": {None: stats.num_pauses},
        "plansmith_steps_total": {None: stats.iter},
        "plansmith_step_seconds_total": {
            "model": stats.step_time_ns / 1e9,
            "draft": stats.draft_time_ns / 1e9,
            "copy": stats.copy_time_ns / 1e9,
            "other": stats.schedule_time_ns / 1e9,
        },
    }


def _requests(stats: EngineStats, last: IterationStats | None) -> Mapping[str | None, float]:
    """Return the requests as TensorRT-LLM counts them.

    Its executor takes requests off its queue up to the batch limit before it looks for their KV blocks, and calls all
    of them active. Here a request waits in the queue until its blocks can be had, so those next in line are added:
    else `waiting` would be 0 exactly when the KV cache is full.
    """
    next_in_line = max(
        0, min(stats.num_queued_requests, stats.max_num_active_requests - stats.num_active_requests)
    )
    active = stats.num_active_requests + next_in_line
    scheduled = context = 0
    if stats.num_active_requests:  # the record of the last step stays behind when all are done
        scheduled = stats.num_active_requests - stats.num_paused_requests
        if last is not None:
            scheduled = min(active, last.num_scheduled_requests)
            context = min(scheduled, last.num_context_requests)
    return {
        "active": active,
        "max": stats.max_num_active_requests,
        "scheduled": scheduled,
        "context": context,
        "waiting": active - scheduled,
    }


def _batcher(stats: EngineStats, last: IterationStats | None) -> Mapping[str | None, float]:
    is_running = last is not None and stats.num_active_requests > 0
    return {
        "total_context_tokens": last.num_ctx_tokens if last is not None and is_running else 0,
        "generation_requests": last.num_gen_requests if last is not None and is_running else 0,
        "micro_batch_id": 0,
        "paused_requests": stats.num_paused_requests,
    }


def resident_bytes() -> int:
    """Return the bytes of memory that this process holds; 0 where the platform does not say (no /proc)."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def unix_us(monotonic_ns: int) -> int:
    """Return a time of the monotonic clock as microseconds since 1970, by the system's clock now."""
    return (monotonic_ns + time.time_ns() - time.monotonic_ns()) // 1000
