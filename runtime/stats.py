"""Statistics of requests, steps and engines, with the fields of the C structs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

# Fields of EngineStats that tell the state now; all others count from the start.
_STATES = frozenset(
    (
        "num_active_requests",
        "num_queued_requests",
        "num_paused_requests",
        "max_num_active_requests",
        "max_num_blocks",
        "free_num_blocks",
        "used_num_blocks",
        "tokens_per_block",
        "kv_cache_bytes",
        "cached_num_blocks",
        "host_max_num_blocks",
        "host_used_num_blocks",
    )
)
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
    missed_blocks: int
    reused_tokens: int
    num_decode_iters: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int

    @property
    def kv_cache_hit_rate(self) -> float:
        """Share of the full blocks of its context that were cached already; 0..1."""
        return _share(self.reused_blocks, self.reused_blocks + self.missed_blocks)

    @property
    def acceptance_rate(self) -> float:
        """Share of its draft tokens that were accepted; 0..1, 0 without drafts."""
        return _share(self.num_accepted_draft_tokens, self.num_draft_tokens)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step of generation gave it on average: 1 without speculation, 0 before the first."""
        if not self.num_decode_iters:
            return 0.0
        return self.num_generated_tokens / self.num_decode_iters

    @classmethod
    def of_sequences(cls, parts: Sequence[RequestStats]) -> RequestStats:
        """Return the statistics of a request from those of its sequences: first and last times, and sums.

        The prompt is one, so its tokens count once.
        """
        if len(parts) == 1:
            return parts[0]
        values = {
            field.name: sum(getattr(part, field.name) for part in parts) for field in dataclasses.fields(cls)
        }
        for name in ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "first_iter"):
            values[name] = min((v for part in parts if (v := getattr(part, name))), default=0)
        for name in ("last_token_time_ns", "last_iter", "num_prompt_tokens"):
            values[name] = max(getattr(part, name) for part in parts)
        return cls(**values)


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
    plan_time_ns: int
    cached_num_blocks: int
    host_max_num_blocks: int
    host_used_num_blocks: int
    reused_tokens: int
    offloaded_blocks: int
    onboarded_blocks: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_requests_with_draft_tokens: int
    num_failed_drafts: int
    draft_time_ns: int
    copy_time_ns: int

    def since(self, before: EngineStats) -> EngineStats:
        """Return what has been counted since `before`; what is no count is as it is now."""
        counts = {
            field.name: getattr(self, field.name) - getattr(before, field.name)
            for field in dataclasses.fields(self)
            if field.name not in _STATES
        }
        return dataclasses.replace(self, **counts)

    @property
    def kv_waste(self) -> float:
        """Share of the allocated KV positions that held nothing, summed over all steps; 0..1."""
        if not self.kv_allocated_token_steps:
            return 0.0
        return 1.0 - self.kv_used_token_steps / self.kv_allocated_token_steps

    @property
    def kv_cache_hit_rate(self) -> float:
        """Share of the full blocks of all contexts that were cached already; 0..1."""
        return _share(self.reused_blocks, self.reused_blocks + self.missed_blocks)

    @property
    def acceptance_rate(self) -> float:
        """Share of the draft tokens that were accepted; 0..1, 0 without drafts."""
        return _share(self.num_accepted_draft_tokens, self.num_draft_tokens)

    @property
    def acceptance_length(self) -> float:
        """Tokens that a verification gave a sequence on average, its own one included; 1 without drafts."""
        return 1.0 + _share(self.num_accepted_draft_tokens, self.num_requests_with_draft_tokens)

    @property
    def draft_overhead(self) -> float:
        """Share of the executors' time that went into drafting; 0..1."""
        return _share(self.draft_time_ns, self.draft_time_ns + self.step_time_ns)


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
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_requests_with_draft_tokens: int
    draft_latency_ms: float

    @property
    def acceptance_length(self) -> float:
        """Tokens that this step's verifications gave a sequence on average; 1 without drafts."""
        return 1.0 + _share(self.num_accepted_draft_tokens, self.num_requests_with_draft_tokens)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def from_struct(cls: type[_Stats], struct: Any) -> _Stats:
    """Return `cls` filled from the C struct's fields of the same names."""
    return cls(**{field.name: getattr(struct, field.name) for field in dataclasses.fields(cls)})
