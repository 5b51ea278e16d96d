"""What serving costs: the same 16 requests in-process, through Triton and through `plansmith serve`, in one run.

    python bench/serving.py [--rounds 7] [--threads 2] [--bad-seconds 20]

Every round sends 16 requests at once (bench/workloads/workload16.json as text, forced lengths) to each front in turn:
the in-process engine in a process of its own, the model `tensorrt_llm`, the ensemble and BLS over gRPC streams, the
OpenAI server over server-sent events. All servers stay up and idle meanwhile. Clients share the two cores with the
server. The tokens and texts must be those of the in-process engine.

The time to the first token (TTFT) that serving adds is what the same request takes longer than in-process, as its
client sees it; of `tensorrt_llm` also what it spends on the way: the client's TTFT less what the engine says it took
for the request (first_token_time_ns - arrival_time_ns), while 16 are sent at once to two cores that compute. Then the
same good traffic without and with bad requests (one bad for four good) among it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import common
import numpy as np
from plansmith.runtime.engine import Engine, SamplingParams
from serving_clients import OpenAiClient, Outcome, TritonClient, closing, infer_request
from serving_servers import Server, openai_server, triton_server

WORK = common.ROOT / "build" / "bench-serving"
Requests = list[dict[str, Any]]


def requests_as_text(engine_dir: Path) -> Requests:
    """Return the workload with texts whose ids are the prompts, for fronts that take text."""
    with Engine.open(engine_dir, num_threads=1) as engine:
        assert engine.tokenizer is not None
        texts = [engine.tokenizer.decode(r["prompt_ids"]) for r in common.workload()["requests16"]]
        lengths = [r["output_len"] for r in common.workload()["requests16"]]
        encode = engine.tokenizer.encode
        return [
            {"prompt": text, "prompt_ids": encode(text), "output_len": length}
            for text, length in zip(texts, lengths, strict=True)
        ]


def texts_of(engine_dir: Path, token_ids: list[list[int]]) -> list[str]:
    """Return the outputs' texts."""
    with Engine.open(engine_dir, num_threads=1) as engine:
        assert engine.tokenizer is not None
        return [engine.tokenizer.decode(ids) for ids in token_ids]


class Fronts:
    """The clients of one round, by the name of the front."""

    def __init__(self, triton: Server, openai: Server, requests: Requests) -> None:
        self._triton, self._openai, self._requests = triton, openai, requests

    async def run(self, name: str, salt: str, one_by_one: bool = False) -> list[Outcome]:
        """Send all requests, at once or one after another; `salt` keeps rounds from sharing cached prefixes."""
        assert self._triton.grpc_address is not None
        async with (
            closing(TritonClient(self._triton.grpc_address)) as triton,
            closing(OpenAiClient(self._openai.http_url)) as http,
        ):
            # Connections are made before the clock runs, as those of a client are that lives.
            await self._one(name, triton, http, {**self._requests[0], "output_len": 1}, salt + "-warm")
            calls = [self._one(name, triton, http, request, salt) for request in self._requests]
            if one_by_one:
                return [await call for call in calls]
            return list(await asyncio.gather(*calls))

    async def _one(
        self, name: str, triton: TritonClient, http: OpenAiClient, request: dict[str, Any], salt: str
    ) -> Outcome:
        length = request["output_len"]
        if name == "openai":
            return await http.completion(request["prompt"], length, cache_salt=salt)
        if name == "tensorrt_llm":
            return await triton.tokens(request["prompt_ids"], length, cache_salt=[salt.encode()])
        return await triton.text(name, request["prompt"], length, cache_salt=[salt.encode()])


def sample(outcomes: list[Outcome], requests: Requests) -> dict[str, Any]:
    """Return one front's numbers of one round."""
    errors = [one.error for one in outcomes if one.error]
    if errors:
        raise SystemExit(f"{len(errors)} requests failed, the first with: {errors[0]}")
    begin, end = min(one.begin_s for one in outcomes), max(one.end_s for one in outcomes)
    tokens = sum(request["output_len"] for request in requests)
    added = [(one.ttft_s - one.engine_ttft_s) * 1e3 for one in outcomes if one.engine_ttft_s is not None]
    return {
        "tokens_per_s": tokens / (end - begin),
        "ttft_ms": [one.ttft_s * 1e3 for one in outcomes],
        "added_ttft_ms": added,
        "answers": sum(one.num_answers for one in outcomes),
        "load_average": os.getloadavg()[0],
    }


def in_process(engine_dir: Path, requests: Requests, threads: int) -> dict[str, Any]:
    """Return the in-process engine's numbers and tokens, from a process of its own."""
    path = WORK / "requests.json"
    path.write_text(json.dumps([{k: r[k] for k in ("prompt_ids", "output_len")} for r in requests]))
    command = [*common.PLANSMITH, "bench", str(engine_dir), "--workload", str(path)]
    printed = subprocess.check_output([*command, "--threads", str(threads), "--json"], text=True)
    result = json.loads(printed.strip().splitlines()[-1])
    return {
        "tokens_per_s": result["generated_tokens_per_s"],
        "ttft_ms": [seconds * 1e3 for seconds in result["ttft_s"]],
        "token_ids": result["token_ids"],
        "load_average": os.getloadavg()[0],
    }


def single_ttft(
    engine_dir: Path, triton: Server, openai: Server, requests: Requests, args: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the times to the first token of one request at a time, of each front in turn, in milliseconds."""
    short = [{**request, "output_len": 1} for request in requests]
    fronts = Fronts(triton, openai, short)
    times: dict[str, list[float]] = {name: [] for name in ("in-process", *NAMES)}
    with Engine.open(engine_dir, num_threads=args.threads) as engine:
        for i in range(args.rounds):
            for j, request in enumerate((short[0], *short)):
                salt = f"{i}-{bool(j)}"  # the first is to warm up: no other finds its blocks
                params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, cache_salt=salt)
                begin = time.perf_counter()
                engine.generate(request["prompt"], params)
                times["in-process"] += [(time.perf_counter() - begin) * 1e3][: bool(j)]
            for name in NAMES:
                outcomes = asyncio.run(fronts.run(name, f"{name}-single{i}", one_by_one=True))
                times[name] += [one.ttft_s * 1e3 for one in outcomes]
    return times


# ---------------------------------------------------------------- bad requests


def bad_triton_requests() -> list[Any]:
    """Return malformed requests of every kind that reaches the models."""
    one = np.ones((1, 1), np.int32)
    good = {"input_ids": np.ones((1, 4), np.int32), "input_lengths": one * 4, "request_output_len": one * 4}
    stream = {"streaming": np.asarray([[True]], np.bool_)}
    return [
        infer_request("tensorrt_llm", {**good, **stream, "input_ids": np.full((1, 4), 1 << 30, np.int32)}),
        infer_request("tensorrt_llm", {**good, **stream, "input_lengths": one * 99}),
        infer_request("tensorrt_llm", {**good, **stream, "request_output_len": one * 0}),
        infer_request("tensorrt_llm", {k: v for k, v in good.items() if k != "request_output_len"}),
        infer_request("tensorrt_llm", {**good, **stream, "temperature": np.full((1, 1), -1, np.float32)}),
        infer_request("tensorrt_llm", {**good, **stream, "stop_words_list": np.ones((1, 2, 3), np.int32)}),
        infer_request("tensorrt_llm", {**good, **stream, "lora_task_id": np.ones((1, 1), np.uint64) * 77}),
        infer_request(
            "tensorrt_llm",
            {
                **good,
                **stream,
                "guided_decoding_guide_type": [b"json_schema"],
                "guided_decoding_guide": [b"{"],
            },
        ),
        infer_request("ensemble", {"text_input": [b"\xff\xfe\xfd"], "max_tokens": one * 4}),
        infer_request("ensemble", {"text_input": [b"hello"], "max_tokens": one * 0}),
        infer_request("no_such_model", good),
    ]


async def good_traffic(address: str, requests: Requests, seconds: float, with_bad: bool, salt: str) -> float:
    """Return the tokens a second of 16 good workers, with one bad request for every four good ones or without."""
    bad = bad_triton_requests()
    end = time.perf_counter() + seconds
    tokens = good_done = bad_done = 0
    wanted = asyncio.Semaphore(0)

    async def good_worker(index: int) -> None:
        nonlocal tokens, good_done
        async with closing(TritonClient(address)) as client:
            turn = index
            while time.perf_counter() < end:
                request = requests[turn % len(requests)]
                outcome = await client.tokens(
                    request["prompt_ids"], 16, cache_salt=[f"{salt}-{index}-{turn}".encode()]
                )
                if outcome.error:
                    raise SystemExit(f"a good request failed: {outcome.error}")
                tokens += len(outcome.token_ids)
                turn += 1
                good_done += 1
                if good_done % 4 == 0:
                    wanted.release()

    async def bad_worker() -> None:
        nonlocal bad_done
        async with closing(TritonClient(address)) as client:
            while True:
                await wanted.acquire()
                messages = await client.send(bad[bad_done % len(bad)])
                if not any(message.error_message for message in messages):
                    raise SystemExit(f"bad request {bad_done % len(bad)} was taken")
                bad_done += 1

    task = asyncio.create_task(bad_worker()) if with_bad else None
    begin = time.perf_counter()
    await asyncio.gather(*(good_worker(i) for i in range(16)))
    wall_s = time.perf_counter() - begin
    if task is not None:
        if task.done():
            await task  # its error
        task.cancel()
        if bad_done * 4 < good_done - 32:
            raise SystemExit(f"only {bad_done} bad requests for {good_done} good ones were answered")
    return tokens / wall_s


async def bad_requests(address: str, requests: Requests, seconds: float, rounds: int) -> dict[str, Any]:
    """Return the throughput of good traffic alone and among bad requests, in turn."""
    alone, among = [], []
    for i in range(rounds):
        alone.append(await good_traffic(address, requests, seconds, False, f"alone{i}"))
        among.append(await good_traffic(address, requests, seconds, True, f"among{i}"))
        print(f"good traffic: {alone[-1]:.1f} tokens/s alone, {among[-1]:.1f} among bad requests", flush=True)
    ratio = statistics.median(b / a for a, b in zip(alone, among, strict=True))
    return {"alone": alone, "among_bad": among, "median_ratio": ratio}


# ---------------------------------------------------------------- all of it

NAMES = {
    "tensorrt_llm": "Triton gRPC, tensorrt_llm",
    "ensemble": "Triton gRPC, ensemble",
    "tensorrt_llm_bls": "Triton gRPC, tensorrt_llm_bls",
    "openai": "plansmith serve",
}


def measure(
    engine_dir: Path, fronts: Fronts, requests: Requests, args: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Run the rounds; every front's outputs are compared with the in-process engine's."""
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in ("in-process", *NAMES)}
    texts: list[str] = []
    for i in range(args.rounds):
        local = in_process(engine_dir, requests, args.threads)
        token_ids = local.pop("token_ids")
        texts = texts or texts_of(engine_dir, token_ids)
        samples["in-process"].append(local)
        for name in NAMES:
            outcomes = asyncio.run(fronts.run(name, f"{name}-{i}"))
            samples[name].append(sample(outcomes, requests))
            if name == "tensorrt_llm" and [one.token_ids for one in outcomes] != token_ids:
                raise SystemExit("tensorrt_llm gave other tokens than the in-process engine")
            if name != "tensorrt_llm" and [one.text for one in outcomes] != texts:
                raise SystemExit(f"{name} gave other texts than the in-process engine")
        line = "  ".join(f"{name} {values[-1]['tokens_per_s']:.1f}" for name, values in samples.items())
        print(f"round {i}  {line}", flush=True)
    return samples


def main() -> None:
    """Start the servers, run everything, print the tables, store the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bad-seconds", type=float, default=20.0, help="of good traffic, each; 0 = none")
    parser.add_argument("--bad-rounds", type=int, default=5)
    args = parser.parse_args()
    engine_dir = common.engine("int8")
    WORK.mkdir(parents=True, exist_ok=True)
    requests = requests_as_text(engine_dir)
    with triton_server(engine_dir, args.threads) as triton, openai_server(engine_dir, args.threads) as openai:
        fronts = Fronts(triton, openai, requests)
        samples = measure(engine_dir, fronts, requests, args)
        single = single_ttft(engine_dir, triton, openai, requests, args)
        bad: dict[str, Any] = {}
        if args.bad_seconds:
            assert triton.grpc_address is not None
            address = triton.grpc_address
            bad = asyncio.run(bad_requests(address, requests, args.bad_seconds, args.bad_rounds))
    print_tables(samples, single, bad)
    common.store("serving", {"args": vars(args), "samples": samples, "single_ttft_ms": single, "bad": bad})


def print_tables(
    samples: dict[str, list[dict[str, Any]]], single: dict[str, list[float]], bad: dict[str, Any]
) -> None:
    """Print what docs/benchmarks.md shows."""
    base = [one["tokens_per_s"] for one in samples["in-process"]]
    alone = single["in-process"]
    rows = []
    for name, values in samples.items():
        speeds = [one["tokens_per_s"] for one in values]
        share = statistics.median(b / a for a, b in zip(base, speeds, strict=True))
        added = [ms for one in values for ms in one.get("added_ttft_ms", [])]
        at_once = [
            theirs - ours
            for one, base_one in zip(values, samples["in-process"], strict=True)
            for ours, theirs in zip(base_one["ttft_ms"], one["ttft_ms"], strict=True)
        ]
        later = statistics.median(b - a for a, b in zip(alone, single[name], strict=True))
        rows.append(
            [
                NAMES.get(name, name),
                common.spread(speeds),
                f"{share:.3f}",
                "-" if name == "in-process" else f"{statistics.median(at_once):.1f}",
                f"{statistics.median(added):.1f}" if added else "-",
                "-" if name == "in-process" else f"{later:.1f}",
                f"{statistics.mean(one['answers'] for one in values):.0f}" if "answers" in values[0] else "-",
            ]
        )
    header = [
        "front",
        "generated tokens/s",
        "of in-process",
        "TTFT added, ms: 16 at once",
        "of it on the way",
    ]
    print(common.table([*header, "one at a time", "answers"], rows))
    if bad:
        print(
            f"good traffic among 20 % bad requests: {bad['median_ratio']:.3f} of what it is alone "
            f"({common.spread(bad['among_bad'])} against {common.spread(bad['alone'])} tokens/s)"
        )


if __name__ == "__main__":
    main()
