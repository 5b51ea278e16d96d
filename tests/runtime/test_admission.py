"""Engines in less memory than they would like: what becomes smaller, what is refused, and what the refusal says."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.runtime import admission
from plansmith.runtime.admission import Admission, Demand, admit, read_plans
from plansmith.runtime.engine import Engine
from plansmith.runtime.errors import EngineFileError, OutOfMemoryError
from plansmith.runtime.opening import CpuOptions, plan_opening
from plansmith.sizing.cpu_plan import CpuPlan, RoundedInput
from plansmith.sizing.memory import ModelShape

GetPath = Callable[..., Path]
HUGE = "/sys/kernel/mm/transparent_hugepage/enabled"
# A 1B model at int8: 1.3 GB of weights, 32 KiB of KV a token, sequences of 4096.
PLAN = CpuPlan(
    shape=ModelShape(16, 32, 8, 64, 2048, 0, 128256),
    file_bytes=1_300_000_000,
    slot_widths=(2048, 2048, 3072, 16384, 8192, 128256),
    logits_slot=5,
    rounded=(RoundedInput(8192, 256, is_f8=False),),
    head_counts=(32,),
    kv_value_bytes=2,
    max_batch_size=64,
    max_num_tokens=2048,
    max_seq_len=4096,
    tokens_per_block=32,
)
DEMAND = Demand("the engine", (PLAN,), num_threads=4, max_num_tokens=512)
SEQUENCE_BYTES = 128 * PLAN.kv_block_bytes


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that says how much memory there is, and whether the system offers huge pages."""

    def have(num_bytes: int, huge_pages: bool = True) -> None:
        monkeypatch.setattr(admission, "available_memory_bytes", lambda: num_bytes)
        text = "always [madvise] never" if huge_pages else "always madvise [never]"
        monkeypatch.setattr(admission, "small_file", lambda path: text if path == HUGE else "")

    return have


def margin(available: int) -> int:
    return min(64 << 20, available // 32)


def test_with_memory_enough_nothing_changes(room: Callable[..., None]) -> None:
    room(64 << 30)
    found = admit(DEMAND)
    assert (found.weights, found.kv_cache_bytes) == ("auto", 0)
    assert found.use.weights == PLAN.file_bytes and found.use.kv > 1 << 30
    room(1 << 62)  # nothing tells how much there is
    assert admit(DEMAND).weights == "auto"


def test_the_default_pool_follows_the_memory(
    room: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    beside = DEMAND.use(0, mapped=False).total
    available = beside + (600 << 20) + (64 << 20)
    room(available)
    with caplog.at_level(logging.WARNING):
        found = admit(DEMAND)
    assert 500 << 20 < found.kv_cache_bytes <= 600 << 20
    assert found.kv_cache_bytes % PLAN.kv_block_bytes == 0
    assert found.use.total <= available - margin(available)
    assert "the KV cache gets" in caplog.text and "instead of 1.0 GiB" in caplog.text


@pytest.mark.parametrize("spare", [0, 1 << 20, 33 << 20])
def test_what_is_given_out_fits_to_the_block(room: Callable[..., None], spare: int) -> None:
    """Whatever the memory, the pool is as large as it can be, within a few blocks for tables that double."""
    for megabytes in range(1700, 2600, 37):
        available = (megabytes << 20) + spare
        room(available)
        found = admit(DEMAND)
        within = available - margin(available)
        assert found.use.total <= within
        if found.kv_cache_bytes:
            mapped = found.weights == "mapped"
            blocks = found.kv_cache_bytes // PLAN.kv_block_bytes
            assert DEMAND.use(blocks + 2 + blocks // 32, mapped=mapped).total > within


def test_weights_are_mapped_before_a_sequence_loses_its_blocks(room: Callable[..., None]) -> None:
    # Huge pages would fit by the core's own rule, and leave too little for one sequence beside the activations.
    asked = dataclasses.replace(DEMAND, max_num_tokens=2048)
    available = PLAN.file_bytes + (300 << 20)
    assert asked.use(128, mapped=False).total > available
    room(available)
    found = admit(asked)
    assert found.weights == "mapped" and found.use.weights == 0
    assert found.kv_cache_bytes == 0 or found.kv_cache_bytes >= SEQUENCE_BYTES


def test_what_the_core_maps_by_itself_is_left_to_it(room: Callable[..., None]) -> None:
    room(64 << 30, huge_pages=False)
    assert admit(DEMAND).weights == "auto" and admit(DEMAND).use.weights == 0
    small = dataclasses.replace(DEMAND, plans=(dataclasses.replace(PLAN, file_bytes=1 << 20),))
    room(64 << 30)
    assert admit(small).weights == "auto" and admit(small).use.weights == 0
    assert admit(dataclasses.replace(DEMAND, weights="mapped")).weights == "mapped"


def test_what_was_asked_for_by_number_is_never_made_smaller(room: Callable[..., None]) -> None:
    asked = dataclasses.replace(DEMAND, kv_cache_bytes=800 << 20)
    needed = asked.use(asked.num_blocks, mapped=True).total
    room(needed + (70 << 20))
    found = admit(asked)
    assert found.kv_cache_bytes == 800 << 20 and found.use.total == needed
    room(needed - (10 << 20))
    with pytest.raises(OutOfMemoryError, match="the engine does not fit into memory"):
        admit(asked)


def refusal(demand: Demand) -> str:
    with pytest.raises(OutOfMemoryError) as error:
        admit(demand)
    return str(error.value)


def test_a_refusal_names_everything_and_every_advice_works(room: Callable[..., None]) -> None:
    asked = dataclasses.replace(DEMAND, kv_cache_bytes=800 << 20, weights="huge_pages")
    available = 1_500_000_000
    room(available)
    text = refusal(asked)
    for part in ("weights 1.2 GiB,", "KV cache 80", "activations", "logits", "1.4 GiB are available here"):
        assert part in text
    assert "weights mapped (--weights mapped)" in text
    assert admit(dataclasses.replace(asked, weights="mapped")).weights == "mapped"
    room(2_000_000_000)
    text = refusal(asked)
    kv = int(re.search(r"kv_cache_bytes of at most (\d+) \(room for \d+ tokens\)", text)[1])  # type: ignore[index]
    assert admit(dataclasses.replace(asked, kv_cache_bytes=kv)).kv_cache_bytes == kv
    with pytest.raises(OutOfMemoryError):
        admit(dataclasses.replace(asked, kv_cache_bytes=kv + 64 * PLAN.kv_block_bytes))


def test_fewer_tokens_a_step_are_advised_where_they_help(room: Callable[..., None]) -> None:
    asked = dataclasses.replace(DEMAND, weights="mapped", max_num_tokens=2048)
    wanted = dataclasses.replace(asked, max_num_tokens=128)
    room(int((wanted.use(128, mapped=True).total + (8 << 20)) * 1.04))
    text = refusal(asked)
    found = re.search(r"max_num_tokens (\d+)", text)
    assert found is not None and int(found[1]) == 128
    assert "KV cache 128" in text and "for one sequence of full length" in text
    assert "(mapped, so not counted)" in text
    assert isinstance(admit(wanted), Admission)
    room(int((dataclasses.replace(asked, max_num_tokens=16).use(128, mapped=True).total + (1 << 20)) * 1.04))
    assert "max_num_tokens 16 with max_batch_size 16" in refusal(asked)


def test_without_any_way_the_memory_is_named(room: Callable[..., None]) -> None:
    room(10 << 20)
    assert refusal(DEMAND).endswith("what helps: free memory, or raise the container's limit")


def test_a_draft_and_host_blocks_count(room: Callable[..., None]) -> None:
    draft = dataclasses.replace(PLAN, file_bytes=500_000_000)
    both = dataclasses.replace(DEMAND, plans=(PLAN, draft))
    assert both.block_bytes == 2 * PLAN.kv_block_bytes
    assert both.use(10, mapped=False).weights == 1_800_000_000
    hosted = dataclasses.replace(DEMAND, host_cache_bytes=1 << 30)
    assert hosted.use(10, mapped=False).kv - DEMAND.use(10, mapped=False).kv > (1 << 30) - PLAN.kv_block_bytes


@pytest.fixture
def engine_dir(tiny_engine: GetPath) -> Path:
    return tiny_engine("llama", "int8")


def test_an_engine_opens_in_exactly_what_it_was_said_to_need(
    engine_dir: Path, room: Callable[..., None]
) -> None:
    options = {"kv_cache_bytes": 1 << 20, "max_num_tokens": 16}
    (plan,) = read_plans([engine_dir / "targets" / "cpu" / "model.plan"])
    demand = Demand("it", (plan,), 1, "mapped", **options)
    needed = demand.use(demand.num_blocks, mapped=True).total
    enough = next(size for size in range(needed, 2 * needed, 4096) if size - margin(size) >= needed)
    room(enough)
    with Engine.open(engine_dir, num_threads=1, weights="mapped", **options) as engine:  # type: ignore[arg-type]
        assert engine.generate([[5, 6, 7]])[0].outputs[0].token_ids
    room(enough - 8192)
    with pytest.raises(OutOfMemoryError, match=r"target cpu of .* does not fit into memory"):
        Engine.open(engine_dir, num_threads=1, weights="mapped", **options)  # type: ignore[arg-type]


def test_an_engine_with_a_smaller_pool_still_generates(engine_dir: Path, room: Callable[..., None]) -> None:
    (plan,) = read_plans([engine_dir / "targets" / "cpu" / "model.plan"])
    sequence = -(-plan.max_seq_len // plan.tokens_per_block)
    demand = Demand("it", (plan,), 1, "mapped", max_num_tokens=16)
    room(int(demand.use(2 * sequence, mapped=True).total * 32 / 31) + 4096)
    with Engine.open(engine_dir, num_threads=1, weights="mapped", max_num_tokens=16) as engine:
        assert sequence <= engine.stats().max_num_blocks < demand.num_blocks
        assert engine.generate([[5, 6, 7]])[0].outputs[0].token_ids


def test_a_damaged_plan_is_the_cores_to_refuse(engine_dir: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "model.plan"
    damaged.write_bytes(b"nothing")
    assert read_plans([damaged]) == ()
    found = plan_opening(engine_dir, "cpu", None, "auto", {})
    other: Any = dataclasses.replace(found.manifest, root=tmp_path)
    path = tmp_path / "targets" / "cpu" / "model.plan"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"nothing")
    with pytest.raises(EngineFileError, match="a plan's header alone has"):
        dataclasses.replace(found, manifest=other).executors(CpuOptions(num_threads=1))
