"""Warm-ups: which requests run, that nothing of them stays, and the files that are read ahead."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from plansmith.runtime.async_engine import AsyncEngine
from plansmith.runtime.engine import Engine, SamplingParams
from plansmith.runtime.errors import InvalidArgumentError
from plansmith.runtime.executors.buckets import Buckets
from plansmith.runtime.page_cache import MappedFile, is_prefetching, start_read_ahead
from plansmith.runtime.warm_up import Round, rounds_of, table_widths, warm_up, warm_up_async

GetPath = Callable[..., Path]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine_dir(tiny_engine: GetPath) -> Path:
    """Return an engine with at most 8 sequences, steps of 32 tokens, blocks of 8 and sequences of 128."""
    return tiny_engine("llama")


def test_a_prompt_of_more_than_a_chunk_then_every_batch_size(engine_dir: Path) -> None:
    with Engine.open(engine_dir, num_threads=1) as engine:
        first, *others = rounds_of(engine)
        assert first == Round(1, 64)  # two steps
        assert [one.num_requests for one in others] == [1, 2, 4, 8, 8] and others[-1].samples
        assert [one.num_requests for one in rounds_of(engine, 3)][1:] == [1, 2, 3, 3]
        assert len(list(rounds_of(engine, 100))) == 6  # the engine's limit
    with Engine.open(engine_dir, num_threads=1, max_batch_size=2, enable_chunked_context=False) as engine:
        assert next(rounds_of(engine)) == Round(1, 32)
        assert max(one.num_requests for one in rounds_of(engine)) == 2


def test_small_pools_get_shorter_prompts(engine_dir: Path) -> None:
    with Engine.open(engine_dir, num_threads=1) as engine:
        block = engine.model_info.kv_bytes_per_block
    with Engine.open(engine_dir, num_threads=1, kv_cache_bytes=6 * block) as engine:
        assert next(rounds_of(engine)).prompt_len == 6 * 8 - 24
        assert warm_up(engine).num_requests == 24


def test_on_a_gpu_every_bucket_has_its_round(engine_dir: Path) -> None:
    with Engine.open(engine_dir, num_threads=1) as engine:
        engine.target = "sm89"
        rounds = list(rounds_of(engine))
    buckets = Buckets(8, 16)
    seen = {buckets.of(one.num_requests, -(-(one.prompt_len + 1) // 8)) for one in rounds}
    assert {one.batch_size for one in seen} == set(buckets.batch_sizes)
    widest = min(16, -(-97 // 8))  # prompts have at most 96 tokens
    assert {one.table_width for one in seen} == {1, 2, 4, 8, buckets.of(1, widest).table_width}
    assert len(seen) == len(buckets.batch_sizes) * 5


@pytest.mark.parametrize(
    ("max_seq_len", "widths"), [(8, []), (16, [2]), (128, [2, 4, 8, 16]), (100, [2, 4, 8, 13])]
)
def test_widths_of_the_block_table(max_seq_len: int, widths: list[int]) -> None:
    assert table_widths(max_seq_len, 8) == widths
    most = -(-max_seq_len // 8)
    assert {1, *widths} == {Buckets(1, most).of(1, blocks).table_width for blocks in range(1, most + 1)}


def test_nothing_of_it_is_seen_afterwards(engine_dir: Path) -> None:
    prompts = [[1, 7920 % 97, 5, 6, 7, 8, 9, 10, 11, 12], list(range(3, 40))]
    with Engine.open(engine_dir, num_threads=1) as engine:
        wanted = [one.token_ids for one in engine.generate(prompts, GREEDY)]
    with Engine.open(engine_dir, num_threads=1) as engine:
        took = warm_up(engine)
        assert took.num_requests == 24 and took.batch_sizes == (1, 2, 4, 8)
        assert took.num_generated_tokens == 4 * 24 and took.num_steps >= 6 * 4
        assert 0 <= took.prefetch_s <= took.seconds
        assert engine.iteration_stats() == [] and not is_prefetching()
        before = engine.stats()
        assert before.used_num_blocks == 0
        # The very prompt of the warm-up: its blocks are cached, under a salt that nobody knows.
        ids = [(7919 * i + 1) % engine.model_info.vocab_size for i in range(64)]
        engine.generate([ids], GREEDY)
        assert engine.stats().since(before).reused_tokens == 0
        assert [one.token_ids for one in engine.generate(prompts, GREEDY)] == wanted


def test_its_blocks_are_evicted_first(engine_dir: Path) -> None:
    kept = list(range(5, 69))
    with Engine.open(engine_dir, num_threads=1) as engine:
        block = engine.model_info.kv_bytes_per_block
    with Engine.open(engine_dir, num_threads=1, kv_cache_bytes=24 * block, max_batch_size=2) as engine:
        engine.generate([kept], GREEDY)
        warm_up(engine)  # then 8 blocks of each are cached, and those of the other request are older
        engine.generate([list(range(100, 170))], GREEDY)
        before = engine.stats()
        engine.generate([kept], GREEDY)
        assert engine.stats().since(before).reused_blocks >= 7


def test_asyncio(engine_dir: Path) -> None:
    async def main() -> None:
        async with AsyncEngine.open(engine_dir, num_threads=1) as engine:
            took = await warm_up_async(engine, 2)
            assert took.batch_sizes == (1, 2) and took.num_requests == 6
            assert len((await engine.generate([1, 2, 3], GREEDY)).token_ids) == 8

    asyncio.run(main())


def test_an_engine_that_is_stepped_by_hand(engine_dir: Path) -> None:
    with Engine.open(engine_dir, num_threads=1, manual_step=True) as engine:
        assert warm_up(engine, 1).num_requests == 3


def test_a_negative_number_is_refused(engine_dir: Path) -> None:
    with Engine.open(engine_dir, num_threads=1) as engine, pytest.raises(InvalidArgumentError, match="is -1"):
        warm_up(engine, -1)


def test_speculation_is_warmed_too(engine_dir: Path) -> None:
    with Engine.open(engine_dir, num_threads=1, draft=engine_dir, max_draft_len=2) as engine:
        assert warm_up(engine, 2).num_requests == 6
        assert engine.stats().num_draft_tokens > 0


def test_reading_ahead(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(20 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    thread = start_read_ahead([path])
    assert thread is not None
    thread.join(60)
    with MappedFile(path) as mapped:
        assert mapped.resident_bytes() == 20 << 20
        mapped.read_in()
        assert 0 <= mapped.huge_bytes() <= 20 << 20
    assert start_read_ahead([tmp_path / "none"]) is None  # its reader says so
    empty = tmp_path / "empty"
    empty.touch()
    with MappedFile(empty) as mapped:
        mapped.read_in()
        assert (mapped.resident_bytes(), mapped.huge_bytes(), mapped.lock()) == (0, 0, 0)


def test_options_can_be_read(engine_dir: Path) -> None:
    with Engine.open(engine_dir, num_threads=1, max_batch_size=3) as engine:
        assert engine.options.max_batch_size == 3 and dataclasses.is_dataclass(engine.options)
