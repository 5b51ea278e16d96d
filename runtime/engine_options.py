"""The options of an engine, under the C API's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ._native import native
from .checks import check_float, check_int
from .errors import InvalidArgumentError
from .executor import Executor

# The words of options that are numbers in the C API.
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "scheduler_policy": ("guaranteed_no_evict", "max_utilization"),
    "chunking_policy": ("first_come_first_served", "equal_progress"),
    "queue_order": ("arrival", "shortest"),
    "pause_policy": ("auto", "recompute", "swap"),
    "draft_mode": ("off", "model", "ngram"),
}
_INT32_MAX = 2**31 - 1
DEFAULT_FRACTION = 0.9  # of a GPU's free memory for the KV pools; graphs and libraries want some too
_INTEGERS: Mapping[str, tuple[int, int]] = {
    "max_batch_size": (0, _INT32_MAX),
    "max_num_tokens": (0, _INT32_MAX),
    "max_queue_size": (0, _INT32_MAX),
    "iter_stats_max_iterations": (0, _INT32_MAX),
    "kv_cache_bytes": (0, 2**63 - 1),
    "host_cache_bytes": (0, 2**63 - 1),
    "host_offload_min_priority": (0, 100),
    "max_kv_events": (0, _INT32_MAX),
    "max_draft_len": (0, _INT32_MAX),
    "ngram_max": (1, _INT32_MAX),
    "ngram_min": (1, _INT32_MAX),
}
_SWITCHES = (
    "enable_chunked_context",
    "manual_step",
    "enable_block_reuse",
    "enable_partial_reuse",
    "adaptive_draft_len",
)


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Options of an engine; 0 stands for the default where it makes no sense.

    max_batch_size, max_num_tokens : 0 = the executor's; they only narrow
    scheduler_policy : "guaranteed_no_evict" or "max_utilization"
    enable_chunked_context : cut prompts to fit the token budget of a step
    max_queue_size : requests waiting; 0 = 1024
    kv_cache_bytes : hard cap of the KV pools, the draft's included; 0 = max_batch_size x max_seq_len, at most 1 GiB,
        and less where an engine directory is opened and memory is short; on a GPU target a share of its free memory
    kv_cache_free_gpu_mem_fraction : that share, of what is free beside weights, scratch and staging; (0, 1]
    iter_stats_max_iterations : step records kept
    manual_step : no thread; the caller runs every step

    enable_block_reuse : share and keep blocks of equal prefixes
    enable_partial_reuse : also the first tokens of a block, by copy
    host_cache_bytes : of host memory for blocks that the device evicts; 0 = none
    host_offload_min_priority : blocks below this retention priority are dropped instead
    max_kv_events : events kept for kv_events(); 0 = none are made

    chunking_policy : "first_come_first_served" or "equal_progress", when prompts do not all fit a step
    queue_order : who starts next of one priority: by "arrival", or the prompt with the fewest tokens to compute
        ("shortest"), which no later one overtakes once as many have been computed
    pause_policy : "auto", "recompute" or "swap", which needs host_cache_bytes
    max_tenant_share : share of max_batch_size up to which a tenant comes before those of its priority that hold
                       theirs; when all who wait do, the one that holds the fewest is next; (0, 1]

    draft_mode : "off", "model" (draft_executor proposes) or "ngram" (what followed the same tokens before)
    max_draft_len : most draft tokens of a sequence in a step; 0 = 8, or as many as a step has rows for
    adaptive_draft_len : fewer, down to none, where they are refused or cost more than they bring
    ngram_max, ngram_min : longest and shortest match of a lookup, in tokens
    draft_executor : of draft_mode "model"; the engine owns it like its executor
    """

    max_batch_size: int = 0
    max_num_tokens: int = 0
    scheduler_policy: str = "guaranteed_no_evict"
    enable_chunked_context: bool = True
    max_queue_size: int = 0
    kv_cache_bytes: int = 0
    kv_cache_free_gpu_mem_fraction: float = DEFAULT_FRACTION
    iter_stats_max_iterations: int = 1000
    manual_step: bool = False

    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    host_cache_bytes: int = 0
    host_offload_min_priority: int = 35
    max_kv_events: int = 0

    chunking_policy: str = "first_come_first_served"
    queue_order: str = "arrival"
    pause_policy: str = "auto"
    max_tenant_share: float = 1.0

    draft_mode: str = "off"
    max_draft_len: int = 0
    adaptive_draft_len: bool = True
    ngram_max: int = 4
    ngram_min: int = 2
    draft_executor: Executor | None = None

    def to_struct(self) -> Any:
        """Return a psm_engine_options; the draft's table must live until the engine is created.

        raises InvalidArgumentError for an unknown word, a number out of its range or options that contradict
        """
        self._check()
        core = native()
        options = core.ffi.new("psm_engine_options*")
        core.lib.psm_engine_options_init(options)
        options.struct_size = core.struct_size("psm_engine_options")  # queue_order came with ABI 1.3
        for name in _INTEGERS:
            setattr(options, name, getattr(self, name))
        for name, words in _CHOICES.items():
            setattr(options, name, words.index(getattr(self, name)))
        for name in _SWITCHES:
            setattr(options, name, int(getattr(self, name)))
        options.max_tenant_share = self.max_tenant_share
        if self.draft_executor is not None:
            options.draft_executor = self.draft_executor.struct
        return options

    def _check(self) -> None:
        for name, words in _CHOICES.items():
            if getattr(self, name) not in words:
                raise InvalidArgumentError(
                    f"{name} is {getattr(self, name)!r}, it must be one of {', '.join(words)}"
                )
        for name, (low, high) in _INTEGERS.items():
            check_int(name, getattr(self, name), low, high)
        check_float("max_tenant_share", self.max_tenant_share, 0.0, 1.0, above=True)
        fraction = self.kv_cache_free_gpu_mem_fraction
        check_float("kv_cache_free_gpu_mem_fraction", fraction, 0.0, 1.0, above=True)
        if self.ngram_min > self.ngram_max:
            raise InvalidArgumentError(
                f"ngram_min is {self.ngram_min}, more than ngram_max {self.ngram_max}; lower one or raise the other"
            )
        if self.pause_policy == "swap" and self.host_cache_bytes == 0:
            raise InvalidArgumentError(
                "pause_policy is 'swap', which needs host memory; set host_cache_bytes, or use 'auto'"
            )
        if (self.draft_mode == "model") != (self.draft_executor is not None):
            has = "no draft executor is" if self.draft_executor is None else "a draft executor is"
            raise InvalidArgumentError(
                f"draft_mode is {self.draft_mode!r} and {has} given; 'model' needs one, the others take none"
            )
