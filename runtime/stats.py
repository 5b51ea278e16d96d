"""Statistics of requests, steps and engines, with the fields of the C structs."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

_Stats = TypeVar("_Stats", bound="RequestStats | EngineStats | IterationStats")


@dataclasses.dataclass(frozen=True)
class RequestStats:
    """One finished request. Times are nanoseconds of the monotonic clock; 0 = did not happen."""

    arrival_time_ns: int
    first_scheduled_time_ns: int
    first_token_time_ns: int
    last_token_time_ns: int
    num_prompt_tokens: int
    num_generated_tokens: int
    alloc_total_blocks: int
    alloc_new_blocks: int
    reused_blocks: int
    num_pauses: int
    first_iter: int
    last_iter: int


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Totals since the engine started, and its state now. Blocks are KV blocks."""

    iter: int
    num_submitted_requests: int
    num_completed_requests: int
    num_active_requests: int
    num_queued_requests: int
    num_paused_requests: int
    max_num_active_requests: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_pauses: int
    max_num_blocks: int
    free_num_blocks: int
    used_num_blocks: int
    tokens_per_block: int
    alloc_total_blocks: int
    alloc_new_blocks: int
    reused_blocks: int
    missed_blocks: int
    kv_cache_bytes: int
    kv_allocated_token_steps: int
    kv_used_token_steps: int
    step_time_ns: int
    schedule_time_ns: int

    @property
    def kv_waste(self) -> float:
        """Share of the allocated KV positions that held nothing, summed over all steps; 0..1."""
        if not self.kv_allocated_token_steps:
            return 0.0
        return 1.0 - self.kv_used_token_steps / self.kv_allocated_token_steps


@dataclasses.dataclass(frozen=True)
class IterationStats:
    """One step of the engine."""

    iter: int
    timestamp_ns: int
    iter_latency_ms: float
    executor_latency_ms: float
    new_active_requests_queue_latency_ms: float
    num_new_active_requests: int
    num_active_requests: int
    num_queued_requests: int
    num_completed_requests: int
    num_scheduled_requests: int
    num_context_requests: int
    num_gen_requests: int
    num_paused_requests: int
    num_ctx_tokens: int
    num_gen_tokens: int
    free_num_blocks: int
    used_num_blocks: int


def from_struct(cls: type[_Stats], struct: Any) -> _Stats:
    """Return `cls` filled from the C struct's fields of the same names."""
    return cls(**{field.name: getattr(struct, field.name) for field in dataclasses.fields(cls)})
