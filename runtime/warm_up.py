"""Requests that bring an engine to its speed before the first one that counts.

What is slow once: weights that are still on their way into memory, KV pools and buffers whose pages nobody touched
yet, and on a GPU kernels and graphs that are made for each shape at its first use. So a warm-up runs a prompt of more
than one chunk, then decodes at each batch size that the engine treats as one of its own, at each width of the block
table on a GPU. Its prompts share cached blocks with no request, and their blocks are the first to be evicted.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .errors import InvalidArgumentError
from .executors.buckets import Buckets
from .page_cache import is_prefetching, wait_prefetched
from .sampling import RetentionRange, SamplingParams

if TYPE_CHECKING:
    from .async_engine import AsyncEngine
    from .engine import Engine
    from .engine_base import EngineBase

_DECODE_TOKENS = 4  # the first comes from the prompt's step; two more make a graph, and one runs it
_DRAFTED_TOKENS = 24  # the core drafts no token before it knows what a step costs
_PART_OF_A_CHUNK = 32
_POLL_SECONDS = 0.005


@dataclasses.dataclass(frozen=True)
class Round:
    """Requests that run together: how many, of so long a prompt each, drawn or greedy."""

    num_requests: int
    prompt_len: int
    samples: bool = False


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """What a warm-up did. Times in seconds.

    prefetch_s : of `seconds`, waited for the core to end bringing the weights of the cpu target into memory
    """

    seconds: float
    prefetch_s: float
    num_requests: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_steps: int
    batch_sizes: tuple[int, ...]


def warm_up(engine: Engine, max_batch_size: int = 0) -> WarmUp:
    """Warm an engine that nobody else uses yet, and return what that took.

    max_batch_size : most requests at a time; 0, or more than the engine's = the engine's
    The step records of iteration_stats() are taken; the totals of stats() go on from what the warm-up left.
    raises InvalidArgumentError for a negative number, and what its requests raise
    """
    work = _Work(engine, max_batch_size)
    for one in work.rounds:
        engine.generate(work.prompts(one), work.params(one))
    work.note_requests()
    wait_prefetched()
    return work.done()


async def warm_up_async(engine: AsyncEngine, max_batch_size: int = 0) -> WarmUp:
    """Warm an asyncio engine, on the loop that it belongs to; otherwise as warm_up."""
    import asyncio

    work = _Work(engine, max_batch_size)
    for one in work.rounds:
        await engine.generate_all(work.prompts(one), work.params(one))
    work.note_requests()
    while is_prefetching():
        await asyncio.sleep(_POLL_SECONDS)
    return work.done()


class _Work:
    """The rounds of one warm-up, and what it took."""

    def __init__(self, engine: EngineBase, max_batch_size: int) -> None:
        if max_batch_size < 0:
            raise InvalidArgumentError(
                f"max_batch_size is {max_batch_size}; give how many requests to warm up with, 0 = the engine's limit"
            )
        self._engine = engine
        self._before = engine.stats()
        self._begin = self._ran = time.perf_counter()
        # Nobody else's: a prompt is cached for those of its salt alone.
        self._salt = f"warm-up-{os.urandom(16).hex()}"
        self.rounds = tuple(rounds_of(engine, max_batch_size))

    def prompts(self, one: Round) -> list[list[int]]:
        """Return the prompts of a round: the same tokens, so that a longer one finds a shorter one cached."""
        vocab_size = self._engine.model_info.vocab_size
        ids = [(7919 * i + 1) % vocab_size for i in range(one.prompt_len)]
        return [list(ids) for _ in range(one.num_requests)]

    def params(self, one: Round) -> SamplingParams:
        """Return how a round's requests are run; their blocks go first when others want them."""
        drawn = (
            {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "seed": 1}
            if one.samples
            else {"temperature": 0.0}
        )
        room = self._engine.model_info.max_seq_len - one.prompt_len
        wanted = _DECODE_TOKENS if self._engine.options.draft_mode == "off" else _DRAFTED_TOKENS
        return SamplingParams(
            max_tokens=min(wanted, room),
            ignore_eos=True,
            detokenize=False,
            cache_salt=self._salt,
            retention=(RetentionRange(0, None, 0),),
            decode_retention_priority=0,
            **drawn,  # type: ignore[arg-type]
        )

    def note_requests(self) -> None:
        """Note that the requests have ended."""
        self._ran = time.perf_counter()

    def done(self) -> WarmUp:
        """Return what it took, and take the records of its steps."""
        end = time.perf_counter()
        self._engine.iteration_stats()
        took = self._engine.stats().since(self._before)
        return WarmUp(
            end - self._begin,
            end - self._ran,
            took.num_completed_requests,
            took.num_prompt_tokens,
            took.num_generated_tokens,
            took.iter,
            tuple(dict.fromkeys(one.num_requests for one in self.rounds)),
        )


def rounds_of(engine: EngineBase, max_batch_size: int = 0) -> Iterator[Round]:
    """Yield the rounds that warm an engine, the long prompt first: then weights are read as early as can be."""
    info, options = engine.model_info, engine.options
    most = min(one for one in (max_batch_size, options.max_batch_size, info.max_batch_size) if one > 0)
    step = min(one for one in (options.max_num_tokens, info.max_num_tokens) if one > 0)
    pools = engine.stats().max_num_blocks * info.tokens_per_block
    longest = max(1, min(info.max_input_len, info.max_seq_len - 1, pools - _DRAFTED_TOKENS))
    chunks = step + min(step, _PART_OF_A_CHUNK) if options.enable_chunked_context else step
    yield Round(1, min(longest, chunks))
    buckets = Buckets(most, -(-info.max_seq_len // info.tokens_per_block))
    for size in buckets.batch_sizes:
        yield Round(size, 1)
    yield Round(most, 1, samples=True)
    if engine.target in (None, "cpu"):
        return
    # With prompts that are cached from the second request on; without a cache, one request a width.
    sizes: Sequence[int] = buckets.batch_sizes if options.enable_block_reuse else (1,)
    for width in table_widths(info.max_seq_len, info.tokens_per_block):
        prompt_len = min(longest, (width - 1) * info.tokens_per_block + 1)
        yield Round(1, prompt_len)
        for size in sizes[1:]:
            yield Round(size, prompt_len)


def table_widths(max_seq_len: int, tokens_per_block: int) -> list[int]:
    """Return the widths of the block table, in blocks, above 1, that buckets of decode runs have."""
    most = -(-max_seq_len // tokens_per_block)
    widths = [1 << i for i in range(1, (most - 1).bit_length())]
    return [*widths, most] if most > 1 else []
