"""What the cpu target allocates when an engine is opened, allocation by allocation.

Each line here mirrors one of runtime/src (cpu/executor.cc, attention.cc, candidates.cc, lora.cc, plan_memory.cc, and
the core's own tables of KV blocks); tests/sizing/test_cpu_memory.py compares their sum with /proc/self/smaps of a
process that opens engines. Standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Literal

from .cpu_plan import CpuPlan
from .memory import MemoryUse, blocks_for

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
DEFAULT_KV_BYTES = 1 << 30  # the pools' most where kv_cache_bytes is 0
DEFAULT_NUM_TOKENS = 512  # tokens of a step where max_num_tokens is 0: products are at their peak already

_SLACK = 64  # bytes behind pools and buffers, for vectors that end past them
_ATTENTION_QUERIES, _ATTENTION_UNIT = 48, 128
_PART_BYTES = 4 << 20  # of each thread, parts of attention
_CANDIDATE_BYTES, _CANDIDATE_ROW = 8 << 20, 128
_CANDIDATE_LISTS_BYTES = 256 << 10
_ADAPTER_ROWS = 16
_DEFAULT_ADAPTER_RANK = 64
_NODE_BYTES, _KEY_BYTES = 80, 24  # of the prefix tree

Kind = Literal["weights", "kv", "activations", "logits", "tables"]
Weights = Literal["mapped", "huge_pages"]


@dataclasses.dataclass(frozen=True)
class CpuLoad:
    """How an engine is opened on the cpu target.

    num_threads : never 0; num_blocks, num_host_blocks : of the KV pool, and of evicted blocks
    max_num_tokens : of a step, at most the plan's; 0 = the plan's
    weights : where they lie
    adapter_rank : the largest of LoRA adapters; 0 = none are taken
    """

    num_threads: int
    num_blocks: int
    max_num_tokens: int = 0
    num_host_blocks: int = 0
    weights: Weights = "huge_pages"
    adapter_rank: int = _DEFAULT_ADAPTER_RANK


@dataclasses.dataclass(frozen=True)
class Allocation:
    """One piece of memory from the system.

    num_bytes : that may be written or read
    is_aligned : made by the core's Pages, which take a huge page more of address space to begin on one
    """

    kind: Kind
    name: str
    num_bytes: int
    is_aligned: bool = True

    @property
    def mapped_bytes(self) -> int:
        """Address space that it takes, in whole pages."""
        slack = HUGE_PAGE_BYTES if self.is_aligned and self.num_bytes >= HUGE_PAGE_BYTES else 0
        return -(-(self.num_bytes + slack) // PAGE_BYTES) * PAGE_BYTES


def allocations(plan: CpuPlan, load: CpuLoad) -> list[Allocation]:
    """Return what opening a plan takes, but for stacks of threads and small objects."""
    found = [_weights(plan, load), *_buffers(plan, load), *_pools(plan, load)]
    return [one for one in found if one.num_bytes > 0]


def cpu_use(plan: CpuPlan, load: CpuLoad) -> MemoryUse:
    """Return the same by what it is for; tables of KV blocks count to the KV pools, as there are more with more."""
    sums = dict.fromkeys(("weights", "kv", "activations", "logits", "tables"), 0)
    for one in allocations(plan, load):
        sums[one.kind] += one.num_bytes
    return MemoryUse(sums["weights"], sums["kv"] + sums["tables"], sums["activations"], sums["logits"])


def default_num_blocks(plan: CpuPlan, max_batch_size: int, block_bytes: int) -> int:
    """Return the blocks of the KV pool where kv_cache_bytes is 0: what a full batch needs, at most 1 GiB.

    block_bytes : of a block, the draft's included
    """
    wanted = max_batch_size * blocks_for(plan.max_seq_len, plan.tokens_per_block)
    return min(wanted, max(1, DEFAULT_KV_BYTES // block_bytes))


def step_rows(plan: CpuPlan, max_num_tokens: int) -> int:
    """Return the rows of buffers: tokens of a step."""
    return min(plan.max_num_tokens, max_num_tokens) if max_num_tokens > 0 else plan.max_num_tokens


def _weights(plan: CpuPlan, load: CpuLoad) -> Allocation:
    return Allocation("weights", "the plan", plan.file_bytes, is_aligned=load.weights == "huge_pages")


def _buffers(plan: CpuPlan, load: CpuLoad) -> Iterator[Allocation]:
    """Yield what steps work in."""
    rows = step_rows(plan, load.max_num_tokens)
    for number, width in enumerate(plan.slot_widths):
        is_logits = number == plan.logits_slot
        stride = width if is_logits else _up(width, 16)  # other rows begin on a cache line
        kind: Kind = "logits" if is_logits else "activations"
        yield Allocation(kind, f"slot {number}", 4 * stride * rows + _SLACK)
    codes = max((_up(one.cols * (2 if one.is_f8 else 1), 64) for one in plan.rounded), default=0)
    groups = max((one.num_groups for one in plan.rounded), default=0)
    for _ in range(2):  # taken in turn
        yield Allocation("activations", "rounded inputs", rows * codes)
        yield Allocation("activations", "their scales", 4 * rows * groups)
        yield Allocation("activations", "their sums", 4 * rows * groups)
    yield Allocation("logits", "candidates", _CANDIDATE_BYTES)
    yield Allocation("logits", "their lists", _CANDIDATE_LISTS_BYTES)
    if load.num_threads > 1:
        for heads in plan.head_counts:
            yield Allocation("activations", f"parts of {heads} heads", _PART_BYTES * load.num_threads)
    scratch = 4 * _attention_scratch(plan.shape.head_dim) + _SLACK
    inner = 4 * _ADAPTER_ROWS * _up(load.adapter_rank, 16)
    for _ in range(load.num_threads):
        yield Allocation("activations", "a thread's attention", scratch)
        yield Allocation("activations", "a thread's adapters", inner)


def _pools(plan: CpuPlan, load: CpuLoad) -> Iterator[Allocation]:
    """Yield KV pools, and the core's tables of their blocks."""
    block, count, host = plan.kv_block_bytes, load.num_blocks, load.num_host_blocks
    rows, nodes = step_rows(plan, load.max_num_tokens), count + host
    yield Allocation("kv", "the KV pool", block * count + _SLACK)
    yield Allocation("kv", "the host's blocks", block * host)
    table = 2
    while table < 2 * nodes:
        table *= 2
    tables = {
        "nodes of the prefix tree": _NODE_BYTES * (2 * nodes + 1),
        "its tokens": 4 * plan.tokens_per_block * nodes,
        "its keys": _KEY_BYTES * nodes,
        "its table": 4 * table,
        "blocks": 16 * count + 8 * host,
        "who writes a block": 16 * count,
        "copies of blocks": 32 * count,
        "lists of blocks": 12 * nodes + 12 * nodes,
        "block tables": 4 * plan.max_batch_size * blocks_for(plan.max_seq_len, plan.tokens_per_block),
    }
    for name, size in tables.items():
        yield Allocation("tables", name, size, is_aligned=False)
    yield Allocation("logits", "rows of candidates", 8 * _CANDIDATE_ROW * rows, is_aligned=False)
    yield Allocation("logits", "sampling", 20 * plan.shape.vocab_size, is_aligned=False)


def _attention_scratch(head_dim: int) -> int:
    """Return the floats of a thread's scratch (AttentionScratchFloats of kernels.cc)."""
    queries, dim = _ATTENTION_QUERIES, _up(head_dim, 16)
    padded = _up(queries, 16)
    part = padded + queries * (16 + dim)
    decoded = 2 * (_ATTENTION_UNIT * head_dim + 16)
    return 2 * part + 2 * padded + queries * (_ATTENTION_UNIT + 16 + dim) + decoded


def mapped_bytes(found: Iterable[Allocation]) -> int:
    """Return the address space of allocations."""
    return sum(one.mapped_bytes for one in found)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
