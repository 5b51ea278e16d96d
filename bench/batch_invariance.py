"""Whether a request's logits and tokens depend on anything but itself: bit-identical alone and among 31 neighbours.

    python bench/batch_invariance.py

Three probes (greedy; sampled; sampled with penalties) run alone first. Then each runs among 31 other requests, under
every token budget, both scheduler policies, and a KV cache so small that requests pause and are recomputed. An executor
around the cpu one keeps the logits of every history of tokens it sees, and compares bits when a history comes again.
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import common
import numpy as np
from plansmith.runtime.engine import Engine
from plansmith.runtime.executor import Batch, Executor, ModelInfo, PythonExecutor, cpu_executor
from plansmith.runtime.native_engine import EngineOptions
from plansmith.runtime.sampling import SamplingParams

BUDGETS = (37, 64, 256, 2048)
NUM_NEIGHBOURS = 31


class Recorder:
    """Passes steps on and compares the logits after equal histories of tokens."""

    def __init__(self, inner: Executor, seen: dict[bytes, bytes]) -> None:
        self.inner, self.seen = inner, seen
        self.compared = self.different = 0

    def describe(self) -> ModelInfo:
        """Return the inner executor's sizes."""
        info = self.inner.describe()
        self.block = info.tokens_per_block
        return info

    def open(self, num_blocks: int) -> None:
        """Open the inner executor; keep which token lies where."""
        self.tokens = np.full((num_blocks, self.block), -1, np.int32)
        self.inner.open(num_blocks)

    def step(self, batch: Batch) -> np.ndarray:
        """Run the step; compare each row with what the same history gave before."""
        seqs = np.repeat(np.arange(len(batch.query_lens)), batch.query_lens)
        blocks = batch.block_table[seqs, batch.position_ids // self.block]
        self.tokens[blocks, batch.position_ids % self.block] = batch.input_ids
        logits = self.inner.step(batch)
        for row, token_row in enumerate(batch.logits_rows):
            seq, length = seqs[token_row], batch.position_ids[token_row] + 1
            held = self.tokens[batch.block_table[seq, : -(-length // self.block)]].reshape(-1)[:length]
            key = hashlib.sha256(held.tobytes()).digest()
            bits = hashlib.sha256(logits[row].tobytes()).digest()
            if key in self.seen:
                self.compared += 1
                self.different += self.seen[key] != bits
            self.seen[key] = bits
        return logits

    def close(self) -> None:
        """Close the inner executor."""
        self.inner.close()


def probes() -> list[tuple[list[int], SamplingParams]]:
    """Return the requests that are compared."""
    requests = common.workload()["requests16"]
    common_params: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True}
    return [
        (requests[8]["prompt_ids"], SamplingParams(temperature=0.0, **common_params)),
        (requests[3]["prompt_ids"], SamplingParams(temperature=0.8, top_p=0.9, seed=11, **common_params)),
        (
            requests[10]["prompt_ids"],
            SamplingParams(temperature=1.0, top_k=50, repetition_penalty=1.2, seed=5, **common_params),
        ),
    ]


def neighbours(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Return 31 requests of random lengths over the workload's text."""
    rng = random.Random(seed)
    text = [token for request in common.workload()["requests16"] for token in request["prompt_ids"]]
    drawn = []
    for _ in range(NUM_NEIGHBOURS):
        start, length = rng.randrange(len(text) - 300), rng.randint(1, 300)
        params = SamplingParams(
            max_tokens=rng.randint(4, 64), temperature=0.7, seed=rng.randrange(1 << 30), ignore_eos=True
        )
        drawn.append((text[start : start + length], params))
    return drawn


def run(
    plan: Path, work: list[tuple[list[int], SamplingParams]], seen: dict[bytes, bytes], options: EngineOptions
) -> tuple[list[list[int]], Recorder, int]:
    """Return each request's tokens, the recorder, and how often a request was paused."""
    recorder = Recorder(cpu_executor(plan, num_threads=2), seen)
    with Engine.from_executor(PythonExecutor(recorder), options) as engine:
        handles = [engine.submit(ids, params) for ids, params in work]
        tokens = [list(handle.result().token_ids) for handle in handles]
        pauses = engine.stats().num_pauses
    return tokens, recorder, pauses


def main() -> None:
    """Compare, print the table, store the results; exit 1 on any difference."""
    rows, results, failed = [], {}, False
    for precision in ("fp32", "bf16", "int8", "int4"):
        plan = common.engine(precision) / "targets" / "cpu" / "model.plan"
        seen: dict[bytes, bytes] = {}
        alone = [run(plan, [probe], seen, EngineOptions())[0][0] for probe in probes()]
        compared = different = pauses = schedules = 0
        equal = True
        for budget in BUDGETS if precision == "int8" else BUDGETS[:2]:
            for policy, kv_bytes in (("guaranteed_no_evict", 0), ("max_utilization", 48 << 20)):
                options = EngineOptions(
                    max_num_tokens=budget, scheduler_policy=policy, kv_cache_bytes=kv_bytes
                )
                options = EngineOptions(**{**vars(options), "max_batch_size": min(32, budget)})
                others = neighbours(schedules)
                work = [*others[:10], probes()[0], *others[10:20], probes()[1], *others[20:], probes()[2]]
                tokens, recorder, paused = run(plan, work, seen, options)
                equal &= [tokens[10], tokens[21], tokens[-1]] == alone
                compared += recorder.compared
                different += recorder.different
                pauses += paused
                schedules += 1
        failed |= different > 0 or not equal
        rows.append([precision, schedules, pauses, compared, different, "yes" if equal else "NO"])
        results[precision] = dict(
            zip(
                ["schedules", "pauses", "compared_rows", "different_rows", "tokens_equal"],
                rows[-1][1:],
                strict=True,
            )
        )
    header = ["precision", "schedules", "pauses", "logits rows compared", "rows that differ", "tokens equal"]
    print(common.table(header, rows))
    common.store("batch_invariance", results)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
