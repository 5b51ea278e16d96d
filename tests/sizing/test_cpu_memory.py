"""What is predicted for the cpu target against what a process that opens a plan really takes."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.builder.targets.cpu.plan_file import HEADER, OP, SLOT, TENSOR
from plansmith.builder.targets.registry import find_targets
from plansmith.builder.weight_sizes import assumed_recipe, plan_sizes
from plansmith.runtime.errors import EngineFileError
from plansmith.sizing import cpu_plan
from plansmith.sizing.cpu_memory import (
    Allocation,
    CpuLoad,
    allocations,
    cpu_use,
    default_num_blocks,
    mapped_bytes,
)
from plansmith.sizing.cpu_plan import CpuPlan, read_cpu_plan
from random_weights import MIDDLE, spec_of, write_plan

# Like no other allocation, so that stacks can be told by their size.
STACK_BYTES = (8 << 20) + (64 << 10)
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
TINY = MIDDLE | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320}
GetPlan = Callable[[str, str], tuple[Path, Any]]


@pytest.fixture(scope="session")
def plan_of(tmp_path_factory: pytest.TempPathFactory) -> GetPlan:
    """Return (size, precision) -> a plan file and its limits, made once a session."""
    made: dict[tuple[str, str], tuple[Path, Any]] = {}

    def get(size: str, precision: str) -> tuple[Path, Any]:
        if (size, precision) not in made:
            config = MIDDLE if size == "middle" else TINY
            path = tmp_path_factory.mktemp("plan") / "model.plan"
            made[size, precision] = write_plan(
                config, precision, path, max_batch_size=16, max_num_tokens=512, tokens_per_block=16
            )
        return made[size, precision]

    return get


def opened(plan: Path, **options: Any) -> dict[str, int]:
    """Open a plan in a process of its own and return what it measured."""
    script = Path(__file__).with_name("measure_opening.py")

    def limit_stack() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))

    done = subprocess.run(
        [sys.executable, str(script), str(plan), json.dumps(options), str(STACK_BYTES)],
        capture_output=True,
        text=True,
        preexec_fn=limit_stack,
        check=False,
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the kernel tells no mappings")
@pytest.mark.parametrize(
    ("size", "precision", "weights", "threads", "tokens", "engine"),
    [
        ("tiny", "int8", "mapped", 2, 64, {}),
        ("middle", "fp16", "mapped", 1, 512, {}),
        ("middle", "fp16", "huge_pages", 2, 128, {"kv_cache_bytes": 50_000_000}),
        (
            "middle",
            "int8",
            "huge_pages",
            3,
            64,
            {"kv_cache_bytes": 9_000_000, "host_cache_bytes": 30_000_000},
        ),
        ("middle", "int4", "mapped", 2, 256, {"max_batch_size": 4}),
        ("middle", "fp8", "mapped", 2, 512, {"kv_cache_bytes": 20_000_000}),
        ("middle", "fp32", "huge_pages", 1, 16, {"max_batch_size": 2}),
    ],
)
def test_an_opened_engine_takes_what_was_predicted(
    plan_of: GetPlan,
    size: str,
    precision: str,
    weights: Any,
    threads: int,
    tokens: int,
    engine: dict[str, int],
) -> None:
    offered = HUGE_PAGES.exists() and "[never]" not in HUGE_PAGES.read_text(encoding="utf-8")
    if weights == "huge_pages" and not offered:
        pytest.skip("this system offers no huge pages")
    path, _ = plan_of(size, precision)
    plan = read_cpu_plan(path)
    found = opened(path, num_threads=threads, weights=weights, engine=engine | {"max_num_tokens": tokens})
    batch = engine.get("max_batch_size", plan.max_batch_size)
    blocks = default_num_blocks(plan, min(batch, tokens), plan.kv_block_bytes)
    if "kv_cache_bytes" in engine:
        blocks = engine["kv_cache_bytes"] // plan.kv_block_bytes
    assert found["num_blocks"] == blocks
    host = engine.get("host_cache_bytes", 0) // plan.kv_block_bytes
    load = CpuLoad(threads, blocks, tokens, host, weights)
    assert found["grown_bytes"] == pytest.approx(mapped_bytes(allocations(plan, load)), rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4", "fp8"])
def test_a_plan_is_known_before_it_is_built(plan_of: GetPlan, precision: str) -> None:
    path, limits = plan_of("tiny", precision)
    spec = spec_of(TINY)
    sizes = plan_sizes(spec, assumed_recipe(precision, spec), limits, find_targets(["cpu"])[0])
    assert sizes.cpu_plan == read_cpu_plan(path)
    assert sizes.weight_bytes == path.stat().st_size


def test_records_are_those_of_the_writer() -> None:
    """The tables are read without numpy, so their sizes are written a second time."""
    for record, other in (("_HEADER", HEADER), ("_SLOT", SLOT), ("_TENSOR", TENSOR), ("_OP", OP)):
        assert getattr(cpu_plan, record).size == other.itemsize


def a_plan(**changes: Any) -> CpuPlan:
    """Return the numbers of a small plan."""
    plan = CpuPlan(
        shape=cpu_plan.ModelShape(2, 8, 4, 64, 512, 0, 1000),
        file_bytes=10_000_000,
        slot_widths=(512, 1000),
        logits_slot=1,
        rounded=(cpu_plan.RoundedInput(512, 16, is_f8=False),),
        head_counts=(8,),
        kv_value_bytes=2,
        max_batch_size=8,
        max_num_tokens=256,
        max_seq_len=128,
        tokens_per_block=16,
    )
    return dataclasses.replace(plan, **changes)


def test_memory_is_by_what_it_is_for() -> None:
    plan, load = a_plan(), CpuLoad(num_threads=1, num_blocks=4, max_num_tokens=100)
    use = cpu_use(plan, load)
    assert use.weights == 10_000_000
    block = 2 * 2 * 4 * 64 * 16 * 2  # K and V, layers, KV heads, head size, positions, bytes
    assert plan.kv_block_bytes == block
    assert 4 * block < use.kv < 4 * block + 10_000  # the core's tables
    assert use.logits > 4 * 1000 * 100
    sums = sum(one.num_bytes for one in allocations(plan, load))
    assert use.total == sums


def test_fewer_tokens_and_threads_take_less() -> None:
    plan = a_plan()
    many, few = (cpu_use(plan, CpuLoad(1, 4, tokens)) for tokens in (256, 32))
    assert few.activations < many.activations and few.logits < many.logits and few.kv == many.kv
    alone, together = (cpu_use(plan, CpuLoad(threads, 4)) for threads in (1, 3))
    assert together.activations - alone.activations > 3 * (4 << 20)
    assert cpu_use(plan, CpuLoad(1, 4)) == many  # 0 tokens are the plan's


def test_pages_begin_on_huge_pages_from_their_size_on() -> None:
    small, large = (Allocation("kv", "pool", size) for size in ((2 << 20) - 1, 2 << 20))
    assert small.mapped_bytes == 2 << 20 and large.mapped_bytes == 4 << 20
    assert Allocation("weights", "plan", 2 << 20, is_aligned=False).mapped_bytes == 2 << 20


def test_the_default_pool_is_a_full_batch_within_a_gibibyte() -> None:
    plan = a_plan()
    assert default_num_blocks(plan, 8, plan.kv_block_bytes) == 8 * 8
    assert default_num_blocks(plan, 8, 1 << 28) == 4
    assert default_num_blocks(plan, 8, 1 << 40) == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: b"", "is no cpu plan"),
        (lambda data: b"NOTAPLAN" + data[8:], "is no cpu plan"),
        (lambda data: data[:8] + (9).to_bytes(4, "little") + data[12:], "format version 9"),
        (lambda data: data[:300], "tables are damaged"),
        (lambda data: data[:20] + (1 << 19).to_bytes(4, "little") + data[24:], "tables are damaged"),
    ],
)
def test_what_is_no_plan_is_refused(
    plan_of: GetPlan, tmp_path: Path, damage: Callable[[bytes], bytes], words: str
) -> None:
    path, _ = plan_of("tiny", "fp32")
    damaged = tmp_path / "model.plan"
    damaged.write_bytes(damage(path.read_bytes()))
    with pytest.raises(EngineFileError, match=words):
        read_cpu_plan(damaged)


def test_a_missing_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineFileError, match="cannot be read: No such file"):
        read_cpu_plan(tmp_path / "absent.plan")
