"""What the scheduler costs a step, and what its policies do to thousands of requests, on the simulated executor.

    python bench/scheduler.py [--parts cost,study] [--requests 5000] [--rates 12,16] [--steps 300]

cost: microseconds a step that the core spends on deciding and packing (psm_engine_stats.plan_time_ns), with 256 and
with 2048 sequences that all generate, a KV pool of 1,000,000 blocks that earlier requests have filled, and up to
100,000 requests in line. The host's own time; run it on a quiet machine.

study: Llama 3.1 8B on one H100, requests arriving as a Poisson process, a third of which share a system prompt, and
more of them than the KV pool holds at a time. Throughput and time to first token are in simulated time, so they are
the same on every machine. Copies to and from the host overlap with nothing there.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import common
import numpy as np
from numpy.typing import NDArray
from plansmith.runtime._native import native
from plansmith.runtime.engine_options import EngineOptions
from plansmith.runtime.executor import Executor
from plansmith.runtime.simulated import GPUS, MODELS, SimulatedLimits, kv_room, simulate
from plansmith.runtime.stats import EngineStats, from_struct

EVENTS_A_POLL = 4096
FINISHED, FAILED = 2, 3


class RawEngine:
    """A manual_step engine through the C API, events left as they are: Python objects would take most of the time."""

    def __init__(self, executor: Executor, options: EngineOptions) -> None:
        core = self._core = native()
        out = core.ffi.new("psm_engine**")
        options = dataclasses.replace(options, manual_step=True)
        core.check(core.lib.psm_engine_create(executor.struct, options.to_struct(), out))
        self._engine = out[0]
        self._did_work = core.ffi.new("int32_t*")
        self._id, self._count = core.ffi.new("uint64_t*"), core.ffi.new("size_t*")
        self._events = core.ffi.new("psm_event[]", EVENTS_A_POLL)
        self._view = _event_view(core, self._events)

    def submit(
        self,
        prompt: NDArray[np.int32],
        max_tokens: int,
        *,
        client_id: int = 0,
        priority: float = 0.5,
        end_id: int | None = None,
    ) -> None:
        """Queue a greedy request."""
        core = self._core
        request = core.ffi.new("psm_request*")
        core.lib.psm_request_init(request)
        request.prompt_ids = core.ffi.from_buffer("int32_t[]", prompt)
        request.num_prompt_ids = len(prompt)
        request.max_tokens = max_tokens
        request.temperature = 0.0
        request.client_id = client_id
        request.priority = priority
        end_ids = core.ffi.new("int32_t[]", [end_id or 0])
        request.end_ids, request.num_end_ids = end_ids, int(end_id is not None)
        core.check(core.lib.psm_engine_submit(self._engine, request, self._id))

    def step(self) -> bool:
        """Run one step; False when nothing was left to run."""
        self._core.check(self._core.lib.psm_engine_step(self._engine, self._did_work))
        return bool(self._did_work[0])

    def ends(self) -> Iterator[Any]:
        """Yield the psm_event of every request that has ended, and drop the tokens."""
        core = self._core
        while True:
            core.check(core.lib.psm_engine_poll(self._engine, self._events, EVENTS_A_POLL, 0, self._count))
            kinds = self._view[: self._count[0]]
            for i in np.flatnonzero(kinds >= FINISHED):
                if kinds[i] == FAILED:
                    raise SystemExit(f"a request failed: {core.text(self._events[i].message)}")
                if kinds[i] == FINISHED:
                    yield self._events[i]
            if self._count[0] < EVENTS_A_POLL:
                return

    def stats(self) -> EngineStats:
        """Return the totals so far."""
        stats = self._core.new("psm_engine_stats")
        self._core.check(self._core.lib.psm_engine_get_stats(self._engine, stats))
        return from_struct(EngineStats, stats)

    def close(self) -> None:
        """Release the engine."""
        self._core.lib.psm_engine_destroy(self._engine)


def _event_view(core: Any, events: Any) -> NDArray[Any]:
    """Return the kinds of the events as an array over their memory."""
    fields = dict(core.ffi.typeof("psm_event").fields)
    layout = np.dtype(
        {
            "names": ["kind"],
            "formats": [np.int32],
            "offsets": [fields["kind"].offset],
            "itemsize": core.ffi.sizeof("psm_event"),
        }
    )
    view: NDArray[Any] = np.frombuffer(core.ffi.buffer(events), layout)["kind"]
    return view


# ---------------------------------------------------------------- the cost of a step

NUM_BLOCKS = 1_000_000
COST_BLOCK = 32


def fill_cache(engine: RawEngine, rng: np.random.Generator, vocab_size: int) -> None:
    """Run long prompts that nobody shares until every block of the pool holds one's."""
    while engine.stats().cached_num_blocks < 0.98 * NUM_BLOCKS:
        for _ in range(16):
            engine.submit(rng.integers(0, vocab_size, 8192, dtype=np.int32), 1)
        while engine.step():
            pass
        for _ in engine.ends():
            pass


def step_cost(
    num_running: int, num_waiting: int, prompt_len: int, num_steps: int, draft: str
) -> dict[str, Any]:
    """Return the plan time of steady steps, microseconds: median, least and 95th percentile."""
    limits = SimulatedLimits(
        max_batch_size=num_running,
        max_num_tokens=max(8192, 2 * num_running),
        max_input_len=8192,
        max_seq_len=16384,
        tokens_per_block=COST_BLOCK,
        vocab_size=16,
    )
    executor = simulate("SmolLM2-135M", "H100-SXM", limits)
    kv_bytes = MODELS["SmolLM2-135M"].kv_bytes_per_token * COST_BLOCK * NUM_BLOCKS
    engine = RawEngine(
        executor, EngineOptions(kv_cache_bytes=kv_bytes, max_queue_size=1_000_000, draft_mode=draft)
    )
    rng = np.random.default_rng(1)
    fill_cache(engine, rng, limits.vocab_size)
    for _ in range(num_running):
        length = int(rng.integers(prompt_len // 2, prompt_len + prompt_len // 2))
        engine.submit(rng.integers(0, limits.vocab_size, length, dtype=np.int32), 4096)
    while (
        engine.stats().num_generated_tokens < 2 * num_running
        or engine.stats().num_active_requests < num_running
    ):
        engine.step()
    for _ in range(num_waiting):
        engine.submit(rng.integers(0, limits.vocab_size, prompt_len, dtype=np.int32), 64, priority=0.25)
    for _ in range(20):
        engine.step()
    for _ in engine.ends():
        pass
    times = []
    for _ in range(num_steps):
        before = engine.stats()
        engine.step()
        times.append(engine.stats().since(before).plan_time_ns / 1000)
        for _ in engine.ends():
            raise SystemExit("a request ended: the step was not steady")
    stats = engine.stats()
    engine.close()
    return {
        "running": stats.num_active_requests,
        "waiting": stats.num_queued_requests,
        "blocks": stats.max_num_blocks,
        "blocks_used": stats.used_num_blocks,
        "blocks_cached": stats.cached_num_blocks,
        "draft_mode": draft,
        "plan_us": round(statistics.median(times), 1),
        "plan_us_min": round(min(times), 1),
        "plan_us_p95": round(float(np.percentile(times, 95)), 1),
    }


def run_cost(num_steps: int) -> list[dict[str, Any]]:
    """Measure every size and print the table."""
    # Blocks a sequence: about 16; the last one about 400, so that they hold most of the pool.
    cases = [
        (256, 0, 512, "off"),
        (256, 10_000, 512, "off"),
        (256, 100_000, 512, "off"),
        (256, 0, 512, "ngram"),
        (2048, 0, 512, "off"),
        (2048, 10_000, 512, "off"),
        (2048, 100_000, 512, "off"),
        (2048, 0, 5461, "off"),
    ]
    results = []
    for running, waiting, prompt_len, draft in cases:
        results.append(step_cost(running, waiting, prompt_len, num_steps, draft))
        print(results[-1], file=sys.stderr)
    header = ["sequences", "waiting", "blocks used of 1,000,000", "draft", "us a step: median (min-p95)"]
    rows = []
    for r in results:
        spread = f"{r['plan_us']} ({r['plan_us_min']}-{r['plan_us_p95']})"
        rows.append([r["running"], r["waiting"], r["blocks_used"], r["draft_mode"], spread])
    print(common.table(header, rows))
    return results


# ---------------------------------------------------------------- policies at scale

STUDY_BLOCK = 64
BASE = EngineOptions(max_queue_size=1_000_000)
HOST_BYTES = 64 << 30
POLICIES: Mapping[str, EngineOptions] = {
    "guaranteed": BASE,
    "guaranteed, no reuse": dataclasses.replace(BASE, enable_block_reuse=False),
    "guaranteed, equal progress": dataclasses.replace(BASE, chunking_policy="equal_progress"),
    "max utilization, recompute": dataclasses.replace(
        BASE, scheduler_policy="max_utilization", pause_policy="recompute"
    ),
    "max utilization, swap": dataclasses.replace(
        BASE, scheduler_policy="max_utilization", pause_policy="swap", host_cache_bytes=HOST_BYTES
    ),
    "max utilization, auto": dataclasses.replace(
        BASE, scheduler_policy="max_utilization", pause_policy="auto", host_cache_bytes=HOST_BYTES
    ),
    "max utilization, auto, equal progress": dataclasses.replace(
        BASE,
        scheduler_policy="max_utilization",
        pause_policy="auto",
        host_cache_bytes=HOST_BYTES,
        chunking_policy="equal_progress",
    ),
}


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One request of the study; `time_s` after the beginning."""

    time_s: float
    prompt: NDArray[np.int32]


# An output ends when the simulated model draws this one of its tokens: lengths are geometric, with a mean of VOCAB_SIZE
# or of MAX_TOKENS. What a client asks for is rarely what it needs, and a guarantee has to cover all of it.
END_ID, VOCAB_SIZE, MAX_TOKENS = 0, 512, 1024


def arrivals(num_requests: int, rate: float) -> list[Arrival]:
    """Return a Poisson process of requests whose prompts have 100 to 6,000 tokens, log-uniform.

    A third begin with one of four system prompts of 1,024 tokens besides.
    """
    chance = random.Random(7)
    rng = np.random.default_rng(7)
    system = [rng.integers(0, VOCAB_SIZE, 1024, dtype=np.int32) for _ in range(4)]
    out, now = [], 0.0
    for _ in range(num_requests):
        now += chance.expovariate(rate)
        length = int(100 * (6000 / 100) ** chance.random())
        prompt = rng.integers(0, VOCAB_SIZE, length, dtype=np.int32)
        if chance.random() < 1 / 3:
            prompt = np.concatenate([chance.choice(system), prompt])
        out.append(Arrival(now, prompt))
    return out


def serve(requests: list[Arrival], options: EngineOptions, limits: SimulatedLimits) -> dict[str, Any]:
    """Run the requests through one engine; all times simulated, but for host_s."""
    model, gpu = "Llama-3.1-8B", "H100-SXM"
    executor = simulate(model, gpu, limits)
    clock = executor.struct
    options = dataclasses.replace(options, kv_cache_bytes=kv_room(model, gpu))
    engine = RawEngine(executor, options)
    begin_ns = clock.now_ns(clock.self)
    idle_s = 0.0  # nothing to do until the next arrival: the simulated clock stands still, so add it by hand
    ttft, e2e, in_flight, steps, arrived = [], [], 0, 0, 0
    host_begin = time.perf_counter()

    def now_s() -> float:
        return (clock.now_ns(clock.self) - begin_ns) / 1e9 + idle_s

    skipped = []  # idle_s at each arrival
    while True:
        while arrived < len(requests) and requests[arrived].time_s <= now_s():
            engine.submit(requests[arrived].prompt, MAX_TOKENS, client_id=arrived, end_id=END_ID)
            skipped.append(idle_s)
            arrived += 1
        if engine.step():
            steps += 1
            in_flight += engine.stats().num_active_requests
        elif arrived < len(requests):
            idle_s += requests[arrived].time_s - now_s() + 1e-9
        else:
            break
        for event in engine.ends():
            one = requests[event.client_id]
            base = begin_ns / 1e9 - skipped[event.client_id] + one.time_s
            ttft.append(event.stats.first_token_time_ns / 1e9 - base)
            e2e.append(event.stats.last_token_time_ns / 1e9 - base)
    stats = engine.stats()
    wall = now_s()
    engine.close()
    return {
        "requests": len(ttft),
        "simulated_s": round(wall, 1),
        "generated_tokens_per_s": round(stats.num_generated_tokens / wall, 1),
        "mean_ttft_s": round(statistics.fmean(ttft), 3),
        "p95_ttft_s": round(float(np.percentile(ttft, 95)), 3),
        "mean_e2e_s": round(statistics.fmean(e2e), 3),
        "mean_in_flight": round(in_flight / steps, 1),
        "steps": steps,
        "pauses": stats.num_pauses,
        "reused_tokens": stats.reused_tokens,
        "computed_prompt_tokens": stats.num_prompt_tokens,
        "hit_rate": round(stats.kv_cache_hit_rate, 4),
        "offloaded_blocks": stats.offloaded_blocks,
        "onboarded_blocks": stats.onboarded_blocks,
        "plan_us_per_step": round(stats.plan_time_ns / stats.iter / 1000, 1),
        "host_s": round(time.perf_counter() - host_begin, 1),
    }


def run_study(num_requests: int, rate: float) -> dict[str, Any]:
    """Serve the same arrivals under every policy and print the table."""
    limits = SimulatedLimits(
        max_batch_size=512,
        max_num_tokens=4096,
        max_input_len=8192,
        max_seq_len=8192 + MAX_TOKENS,
        tokens_per_block=STUDY_BLOCK,
        vocab_size=VOCAB_SIZE,
    )
    requests = arrivals(num_requests, rate)
    results = {}
    for name, options in POLICIES.items():
        results[name] = serve(requests, options, limits)
        print(name, results[name], file=sys.stderr)
    header = [
        "policy",
        "tokens/s",
        "mean TTFT s",
        "p95 TTFT s",
        "mean total s",
        "in flight",
        "pauses",
        "hit rate",
    ]
    keys = (
        "generated_tokens_per_s",
        "mean_ttft_s",
        "p95_ttft_s",
        "mean_e2e_s",
        "mean_in_flight",
        "pauses",
        "hit_rate",
    )
    print(common.table(header, [[name, *(r[key] for key in keys)] for name, r in results.items()]))
    return {
        "model": dataclasses.asdict(MODELS["Llama-3.1-8B"]),
        "gpu": dataclasses.asdict(GPUS["H100-SXM"]),
        "limits": dataclasses.asdict(limits),
        "arrivals_per_s": rate,
        "mean_prompt_tokens": round(statistics.fmean(len(r.prompt) for r in requests), 1),
        "policies": results,
    }


def main() -> None:
    """Run the parts that were asked for and store them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="cost,study")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument(
        "--rates", default="12,16", help="arrivals a simulated second: near what it can do, and beyond"
    )
    parser.add_argument("--steps", type=int, default=300, help="steady steps of a cost measurement")
    parser.add_argument("--no-store", action="store_true", help="print only")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    if "cost" in args.parts.split(","):
        results["cost"] = run_cost(args.steps)
    if "study" in args.parts.split(","):
        results["study"] = [run_study(args.requests, float(rate)) for rate in args.rates.split(",")]
    if not args.no_store:
        common.store("scheduler", results)


if __name__ == "__main__":
    main()
