"""Whether the cpu target of an engine fits into memory, asked before anything of it is allocated.

What a plan will take (sizing/cpu_memory.py) is compared with what the machine and its control groups leave. A default
KV pool becomes as large as there is room; what was asked for by number is never changed: it fits, or is refused with
what would. Weights that are mapped from their file take no memory that could run out: the kernel drops and reads them
again, slowly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..sizing import cpu_memory
from ..sizing.cpu_memory import CpuLoad, cpu_use, default_num_blocks, step_rows
from ..sizing.cpu_plan import CpuPlan, read_cpu_plan
from ..sizing.memory import MemoryUse, blocks_for, size_text
from .control_groups import available_memory_bytes, small_file, usable_cores
from .errors import EngineFileError, OutOfMemoryError

_log = logging.getLogger(__name__)
# Left to Python, the tokenizer and threads; of little memory a share.
_MARGIN_BYTES, _MARGIN_PART = 64 << 20, 32
# As the core decides where `weights` is "auto" (src/cpu/plan_memory.cc).
_SPARE_BYTES, _SPARE_PART = 256 << 20, 8
_LEAST_TOKENS = 8
_MOST_THREADS = 1024  # more are refused when the plan is opened


@dataclasses.dataclass(frozen=True)
class Demand:
    """An engine that wants to be opened on the cpu target.

    name : for messages
    plans : the target's, and its draft's where there is one
    num_threads : 0 = one a core that may be used
    weights : "auto", "mapped" or "huge_pages"
    adapter_rank : the largest of LoRA adapters; 0 = none
    max_batch_size, max_num_tokens, kv_cache_bytes, host_cache_bytes : of EngineOptions; 0 = the default
    """

    name: str
    plans: tuple[CpuPlan, ...]
    num_threads: int = 0
    weights: str = "auto"
    adapter_rank: int = 64
    max_batch_size: int = 0
    max_num_tokens: int = 0
    kv_cache_bytes: int = 0
    host_cache_bytes: int = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block: one of each plan's pools."""
        return sum(plan.kv_block_bytes for plan in self.plans)

    @property
    def sequence_blocks(self) -> int:
        """Blocks of one sequence of full length."""
        return blocks_for(self.plans[0].max_seq_len, self.plans[0].tokens_per_block)

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV pool, if memory were no matter."""
        if self.kv_cache_bytes:
            return self.kv_cache_bytes // self.block_bytes
        batch = min(self.max_batch_size or self.plans[0].max_batch_size, self._rows)
        return default_num_blocks(self.plans[0], batch, self.block_bytes)

    @property
    def _rows(self) -> int:
        return step_rows(self.plans[0], self.max_num_tokens)

    def use(self, num_blocks: int, *, mapped: bool) -> MemoryUse:
        """Return what it takes with so many blocks; weights that are mapped count as none."""
        threads = min(self.num_threads or usable_cores(), _MOST_THREADS)
        host = self.host_cache_bytes // self.block_bytes
        sums = [0, 0, 0, 0]
        for plan in self.plans:
            load = CpuLoad(threads, num_blocks, self.max_num_tokens, host, adapter_rank=self.adapter_rank)
            one = cpu_use(plan, load)
            parts = (0 if mapped else one.weights, one.kv, one.activations, one.logits)
            sums = [total + part for total, part in zip(sums, parts, strict=True)]
        return MemoryUse(*sums)


@dataclasses.dataclass(frozen=True)
class Admission:
    """How an engine is opened so that it fits.

    weights : where they lie: as asked for, or "mapped" where "auto" would leave too little for the rest
    kv_cache_bytes : as asked for; a number where the default is too large
    use : what it takes so; available : what there is, in bytes
    """

    weights: str
    kv_cache_bytes: int
    use: MemoryUse
    available: int


def read_plans(paths: Sequence[Path]) -> tuple[CpuPlan, ...]:
    """Return what plan files say of their memory; () where one is damaged, which the core says better."""
    with contextlib.suppress(EngineFileError):
        return tuple(read_cpu_plan(path) for path in paths)
    return ()


def room_in(available: int) -> int:
    """Return how much of the bytes that are available an engine may take; the rest is for Python and its threads."""
    return available - min(_MARGIN_BYTES, available // _MARGIN_PART)


def admit(demand: Demand) -> Admission:
    """Return how the engine is opened in the memory that there is.

    raises OutOfMemoryError that names what takes how much, what is available and what would fit
    """
    available = available_memory_bytes()
    room = room_in(available)
    for mapped in _ways(demand, available):
        use = demand.use(demand.num_blocks, mapped=mapped)
        weights = "mapped" if mapped and demand.weights == "auto" else demand.weights
        if use.total <= room:
            # Where the core would map by itself, "auto" is left to it: there may be more memory when it looks.
            kept = demand.weights if _core_maps(demand, available) else weights
            return Admission(kept, demand.kv_cache_bytes, use, available)
        blocks = _blocks_in(demand, room, mapped=mapped)
        if demand.kv_cache_bytes == 0 and blocks >= demand.sequence_blocks:
            kv = blocks * demand.block_bytes
            _log.warning(
                "the KV cache gets %s instead of %s: %s of memory are available to %s; give kv_cache_bytes to choose",
                size_text(kv),
                size_text(demand.num_blocks * demand.block_bytes),
                size_text(available),
                demand.name,
            )
            return Admission(weights, kv, demand.use(blocks, mapped=mapped), available)
    raise OutOfMemoryError(_refusal(demand, available, room))


def _ways(demand: Demand, available: int) -> Iterator[bool]:
    """Yield whether weights are mapped, in the order in which it is tried."""
    if demand.weights != "mapped" and not _core_maps(demand, available):
        yield False
    if demand.weights != "huge_pages":
        yield True


def _core_maps(demand: Demand, available: int) -> bool:
    """Return whether the core maps the weights of "auto" by itself: for want of huge pages, or of room for them."""
    if demand.weights != "auto":
        return False
    text = small_file("/sys/kernel/mm/transparent_hugepage/enabled")
    if "[madvise]" not in text and "[always]" not in text:
        return True
    sizes = [plan.file_bytes for plan in demand.plans]
    spare = max(_SPARE_BYTES, sum(sizes) // _SPARE_PART)
    return max(sizes) < cpu_memory.HUGE_PAGE_BYTES or sum(sizes) + spare > available


def _blocks_in(demand: Demand, room: int, *, mapped: bool) -> int:
    """Return how many KV blocks have room beside everything else; below 0 where that alone has none."""
    none, one = (demand.use(count, mapped=mapped).total for count in (0, 1 << 16))
    per_block = (one - none) / (1 << 16)  # tables included
    blocks = int((room - none) // per_block)
    while blocks > 0 and demand.use(blocks, mapped=mapped).total > room:
        blocks -= 1 + blocks // 64  # tables of hashes grow in powers of two
    return blocks


def _refusal(demand: Demand, available: int, room: int) -> str:
    blocks, scope = demand.num_blocks, ""
    if demand.kv_cache_bytes == 0:  # the default would have become smaller
        blocks, scope = min(blocks, demand.sequence_blocks), " for one sequence of full length"
    use = demand.use(blocks, mapped=False)
    droppable = "" if demand.weights == "huge_pages" else " (mapped, so not counted)"
    advice = " or ".join([*_advice(demand, room, blocks), "free memory, or raise the container's limit"])
    return (
        f"{demand.name} does not fit into memory: {size_text(available)} are available here, and it takes weights "
        f"{size_text(use.weights)}{droppable}, KV cache {size_text(use.kv)}{scope}, activations "
        f"{size_text(use.activations)}, logits {size_text(use.logits)}; what helps: {advice}"
    )


def _advice(demand: Demand, room: int, blocks: int) -> Iterator[str]:
    """Yield the options that would make it fit, each with a value that does."""
    mapped = demand.weights != "huge_pages"
    fitting = _blocks_in(demand, room, mapped=mapped)
    if 0 < fitting < blocks:
        tokens = fitting * demand.plans[0].tokens_per_block
        yield f"kv_cache_bytes of at most {fitting * demand.block_bytes} (room for {tokens} tokens)"
    rows = demand._rows
    while (rows := rows // 2) >= _LEAST_TOKENS:
        smaller = dataclasses.replace(demand, max_num_tokens=rows)
        if smaller.use(blocks, mapped=mapped).total <= room:
            batch = smaller.max_batch_size or smaller.plans[0].max_batch_size
            yield f"max_num_tokens {rows}" + (f" with max_batch_size {rows}" if batch > rows else "")
            break
    if not mapped and demand.use(blocks, mapped=True).total <= room:
        yield "weights mapped (--weights mapped), which the system can drop and read again"
