"""Whether what a request gives depends on anything but itself: bit-identical alone and under every switch.

    python bench/batch_invariance.py [--precision int8 ...] [--quick] [--only CONFIGURATION ...]

24 requests of all kinds (greedy, sampled with penalties, log-probabilities, logits, grammars, n = 4, beams, LoRA) run
one after the other in an engine that shares, keeps and drafts nothing. Then they run together, twice over in one
engine, arriving step by step among others that are cancelled, with reuse, host memory, pauses, budgets and drafts
switched on and off. Token ids, texts, ends, log-probabilities and rows of logits are compared; output i of n with a
request of seed + i. Steps are run by hand, so a difference comes again. int8 runs it all, other precisions every third
request in the main configurations; so does --quick, which stores nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import numpy as np
from plansmith.runtime.engine import Completion, Engine, RequestHandle, SamplingParams, SequenceOutput
from plansmith.runtime.guided import GuidedParams
from plansmith.runtime.manifest import load_manifest
from plansmith.runtime.stats import EngineStats
from safetensors.numpy import save_file

Work = list[tuple[list[int], SamplingParams]]
ADAPTER = "random"
ALONE: dict[str, Any] = {"speculation": "off", "enable_block_reuse": False, "max_batch_size": 4}
ARRIVALS = 2  # requests before each step
SMALL_KV = 30 << 20  # 20 blocks of 32 tokens, two of the longest requests
HOST = 64 << 20
FIXED: dict[str, Any] = {"max_draft_len": 4, "adaptive_draft_len": False}
TIGHT: dict[str, Any] = {"scheduler_policy": "max_utilization", "kv_cache_bytes": SMALL_KV}
EQUAL: dict[str, Any] = {"chunking_policy": "equal_progress", "max_num_tokens": 64, "max_batch_size": 32}
SWAP: dict[str, Any] = {"pause_policy": "swap", "host_cache_bytes": HOST}
PRESSED: dict[str, Any] = {**TIGHT, **SWAP, "kv_cache_bytes": 2 * SMALL_KV}  # the draft's blocks count too
INT4_DRAFT: dict[str, Any] = {"draft": "int4", **FIXED}

# Name, options, the statistic that must not be 0, whether it runs in --quick and for the other precisions too.
CONFIGURATIONS: tuple[tuple[str, dict[str, Any], str, bool], ...] = (
    ("reuse", {}, "reused_tokens", True),
    ("no partial reuse", {"enable_partial_reuse": False}, "reused_blocks", False),
    ("no reuse", {"enable_block_reuse": False}, "", True),
    ("one thread, prompts whole", {"num_threads": 1, "enable_chunked_context": False}, "", False),
    ("equal progress, 64 tokens a step", EQUAL, "reused_tokens", False),
    ("37 tokens a step", {"max_num_tokens": 37, "max_batch_size": 32}, "reused_tokens", False),
    ("small cache, host memory", {"kv_cache_bytes": SMALL_KV, "host_cache_bytes": HOST}, "onboarded_blocks", True),
    ("pauses, recompute", {**TIGHT, "pause_policy": "recompute"}, "num_pauses", True),
    ("pauses, recompute, no reuse", {**TIGHT, "enable_block_reuse": False}, "num_pauses", False),
    ("pauses, swap", {**TIGHT, **SWAP}, "num_pauses", True),
    ("INT4 draft", INT4_DRAFT, "num_accepted_draft_tokens", True),
    ("INT4 draft, adaptive", {"draft": "int4"}, "", False),
    ("n-gram", {"speculation": "ngram", **FIXED}, "num_accepted_draft_tokens", True),
    ("INT4 draft, pauses, swap, equal progress", {**INT4_DRAFT, **PRESSED, **EQUAL}, "num_pauses", True),
    ("n-gram, pauses, recompute", {"speculation": "ngram", **FIXED, **TIGHT}, "num_pauses", False),
)  # fmt: skip


def requests() -> Work:
    """Return the requests: prompts that share prefixes, whole blocks and parts, with parameters of every kind."""
    loaded = common.workload()
    prompts = [one["prompt_ids"] for one in loaded["requests16"]]
    shared = prompts[11][:80]  # two blocks and a half
    base: dict[str, Any] = {"max_tokens": 32, "ignore_eos": True}
    greedy = SamplingParams(temperature=0.0, **base)
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=11, **base)
    penalties: dict[str, Any] = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    mixed = SamplingParams(temperature=1.0, top_k=50, min_p=0.02, seed=5, logprobs=5, **penalties, **base)
    guided = SamplingParams(temperature=0.9, seed=3, max_tokens=32, logprobs=2)
    answer = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    replace = dataclasses.replace
    return [
        (prompts[8], greedy),
        (shared + prompts[0], sampled),
        (shared + prompts[2][:9], replace(mixed, return_generation_logits=True)),
        (prompts[1], replace(sampled, n=4, seed=2**64 - 2, logprobs=1)),
        (shared[:50] + prompts[13][:40], replace(greedy, adapter=ADAPTER, logprobs=3)),
        (prompts[4], replace(guided, guided=GuidedParams(json_schema={**answer, "required": ["name", "age"]}))),
        (shared + prompts[0], replace(sampled, seed=12, adapter=ADAPTER)),
        (prompts[3], replace(greedy, return_generation_logits=True, repetition_penalty=1.1)),
        (prompts[1], replace(mixed, n=4, max_tokens=24, stop_token_ids=(28, 30, 284))),
        (shared + prompts[6], replace(greedy, prompt_logprobs=2, logprobs=2)),
        (prompts[11], SamplingParams(beam_width=3, max_tokens=16, temperature=0.0, logprobs=2, ignore_eos=True)),
        (prompts[5] * 3, greedy),  # its own words again: what n-gram lookup finds
        (prompts[5] * 3, replace(mixed, temperature=0.5, priority=0.9)),
        (prompts[12], replace(guided, guided=GuidedParams(regex=r"(The|A) [a-z]+ [a-z]+, 19\d\d\."))),
        (prompts[12], replace(sampled, top_k=20, logit_bias={28: -3.0, 335: 2.0}, logprobs=20)),
        (shared[:64], replace(sampled, temperature=1.5, seed=99, return_context_logits=True)),
        (shared[:64], replace(sampled, cache_salt="other", seed=7)),
        (prompts[9], replace(mixed, bad_words=((28,), (198, 198)), min_tokens=8, priority=0.1)),
        (prompts[10], replace(greedy, guided=GuidedParams(choice=["yes", "no", "perhaps not"]), ignore_eos=False)),
        (prompts[4], replace(greedy, stop=(" the", "."), min_tokens=4, logprobs=0)),
        (prompts[14], replace(sampled, n=4, max_tokens=16, adapter=ADAPTER, **penalties)),
        (prompts[7], replace(sampled, n=2, best_of=4, max_tokens=16)),
        (shared + prompts[0], replace(mixed, seed=2**63, return_generation_logits=True, adapter=ADAPTER)),
        (prompts[15], replace(greedy, max_draft_len=2, logprobs=1)),
    ]  # fmt: skip


def write_adapter(path: Path, model: Any) -> None:
    """Write a random PEFT adapter of rank 8 on three matrices a layer, large enough to matter."""
    rng = np.random.default_rng(4)
    hidden, heads = model.hidden_size, model.num_heads * model.head_dim
    sizes = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.o_proj": (heads, hidden),
        "mlp.down_proj": (model.intermediate_size, hidden),
    }
    tensors = {}
    for layer in range(model.num_layers):
        for name, (num_in, num_out) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            a = rng.standard_normal((8, num_in)) / num_in**0.5
            tensors[f"{prefix}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = (rng.standard_normal((num_out, 8)) * 0.06).astype(np.float32)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    targets = [name.rpartition(".")[2] for name in sizes]
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": targets, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))


def digest(rows: Any) -> str | None:
    """Return the hash of an array's bytes."""
    return None if rows is None else hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()


def contents(output: SequenceOutput) -> tuple[Any, ...]:
    """Return what must be the same of an output: floats are compared as such, so by their bits but for 0.0 and -0.0."""
    ends = output.finish_reason, output.stop_reason
    numbers = output.logprobs, output.cumulative_logprob, digest(output.generation_logits)
    return output.token_ids, output.text, *ends, *numbers


def signature(completion: Completion) -> tuple[Any, ...]:
    """Return what must be the same of a request."""
    prompt = completion.prompt_logprobs, digest(completion.context_logits)
    return (*prompt, *(contents(output) for output in completion.outputs))


def run_alone(engine_dir: Path, adapter: Path, work: Work) -> list[tuple[Any, ...]]:
    """Return the signature of each request by itself; of n outputs those of n requests."""
    signatures = []
    with Engine.open(engine_dir, num_threads=2, **ALONE) as engine:
        engine.load_adapter(ADAPTER, adapter)
        for prompt, params in work:
            if params.n > 1 and not params.is_ranked:
                seeds = [((params.seed or 0) + i) % 2**64 for i in range(params.n)]
                singles = [dataclasses.replace(params, n=1, seed=seed) for seed in seeds]
                parts = [signature(engine.generate([prompt], single)[0]) for single in singles]
                signatures.append((*parts[0][:2], *(part[2] for part in parts)))
            else:
                signatures.append(signature(engine.generate([prompt], params)[0]))
    return signatures


def run_together(
    engine_dir: Path, adapter: Path, work: Work, options: dict[str, Any]
) -> tuple[list[list[tuple[Any, ...]]], EngineStats]:
    """Return the signatures of two passes over `work` in one engine, the second meeting what the first left cached."""
    passes = []
    rng = random.Random(0)
    with Engine.open(engine_dir, **{"num_threads": 2, "manual_step": True, **options}) as engine:
        engine.load_adapter(ADAPTER, adapter)
        for _ in range(2):
            order = rng.sample(range(len(work)), len(work))
            handles: dict[int, RequestHandle] = {}
            cancelled: list[RequestHandle] = []
            for arrival, i in enumerate(order):
                handles[i] = engine.submit(*work[i])
                if arrival % 6 == 5:
                    cancelled.append(engine.submit(*work[order[arrival - 1]]))
                if arrival % ARRIVALS == ARRIVALS - 1:
                    engine.step()
                if arrival % 6 == 2 and cancelled:
                    cancelled[-1].cancel()
            for handle in cancelled:
                handle.cancel()
            passes.append([signature(handles[i].result()) for i in range(len(work))])
            while engine.step():
                pass
        stats = engine.stats()
    if stats.used_num_blocks or stats.num_active_requests or stats.num_queued_requests:
        raise SystemExit(f"the engine still holds blocks or requests: {stats}")
    return passes, stats


def compare(name: str, wanted: list[tuple[Any, ...]], passes: list[list[tuple[Any, ...]]]) -> int:
    """Return how many requests differ, and say where."""
    names = ("tokens", "text", "finish reason", "stop reason", "logprobs", "cumulative logprob", "logits")
    different = 0
    for pass_idx, got in enumerate(passes):
        for i, (want, have) in enumerate(zip(wanted, got, strict=True)):
            if want == have:
                continue
            different += 1
            pairs = zip(want[2:], have[2:], strict=False)
            places = [
                f"{names[k]} of output {o}"
                for o, (a, b) in enumerate(pairs)
                for k in range(7)
                if a[k] != b[k]
            ]
            print(f"DIFFERENT: {name}, pass {pass_idx}, request {i}: {', '.join(places) or 'the prompt'}")
    return different


def measure(precision: str, adapter: Path, *, every: int, chosen: set[str] | None) -> list[dict[str, Any]]:
    """Return a row of the table for each configuration that runs."""
    engine_dir = common.engine(precision)
    work = requests()[::every]
    begin = time.perf_counter()
    wanted = run_alone(engine_dir, adapter, work)
    print(f"{precision}: alone, {time.perf_counter() - begin:.0f} s", flush=True)
    rows = []
    for name, given, must_happen, is_quick in CONFIGURATIONS:
        if (every > 1 and not is_quick) or (chosen and name not in chosen):
            continue
        options = dict(given)
        if "draft" in options:
            options["draft"] = common.engine(options["draft"])
        begin = time.perf_counter()
        passes, stats = run_together(engine_dir, adapter, work, options)
        row = {
            "precision": precision,
            "configuration": name,
            "requests": 2 * len(work),
            "tokens": sum(len(out[0]) for got in passes for one in got for out in one[2:]),
            "reused_tokens": stats.reused_tokens,
            "onboarded_blocks": stats.onboarded_blocks,
            "pauses": stats.num_pauses,
            "accepted_draft_tokens": stats.num_accepted_draft_tokens,
            "different": compare(f"{precision}, {name}", wanted, passes),
        }
        rows.append(row)
        print(
            f"{precision}: {name}, {time.perf_counter() - begin:.0f} s, {row['different']} differ", flush=True
        )
        if must_happen and not getattr(stats, must_happen) and every == 1:
            raise SystemExit(
                f"{precision}, {name}: {must_happen} is 0, so nothing was tried; make the cache smaller"
            )
    return rows


def main() -> None:
    """Compare, print the table, store the results; exit 1 on any difference."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precision", nargs="+", default=["int8", "fp32", "bf16", "int4"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", help="names of configurations")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        adapter = Path(folder) / "adapter"
        write_adapter(adapter, load_manifest(common.engine(args.precision[0])).model)
        for precision in args.precision:
            every = 3 if args.quick or precision != "int8" else 1
            rows += measure(precision, adapter, every=every, chosen=set(args.only or ()))
    print(common.table([name.replace("_", " ") for name in rows[0]], [list(row.values()) for row in rows]))
    if any(row["different"] for row in rows):
        raise SystemExit(1)
    if not args.quick and not args.only:
        common.store("batch_invariance", {"rows": rows})


if __name__ == "__main__":
    main()
