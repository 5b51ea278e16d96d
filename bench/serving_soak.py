"""Ten minutes of 200 streams that finish, stop, cancel, disconnect or read slowly: nothing lost, mixed or leaked.

    python bench/serving_soak.py [--server triton|serve] [--streams 200] [--requests 2000] [--minutes 10]

Every answer is compared with what the in-process engine gives for the same prompt: the whole of it where the request
ended by itself, the beginning where the client left. At the end every KV block must be free, no request be open, the
server's counts must be those of the clients, and its memory flat: the median of the resident bytes (of all processes
of the server) over the last fifth of the run against that over the second fifth.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import random
import re
import statistics
import time
import urllib.request
from pathlib import Path
from typing import Any

import common
import numpy as np
from plansmith.runtime.engine import Engine, SamplingParams
from serving_clients import OpenAiClient, Outcome, TritonClient, closing, infer_request, token_tensors
from serving_servers import Server, openai_server, triton_server

# What a request does, and how often of 100.
TRITON_KINDS = {
    "finish": 40,
    "ensemble": 12,
    "stop in band": 16,
    "cancel the gRPC stream": 8,
    "disconnect from generate_stream": 12,
    "read slowly": 12,
}
SERVE_KINDS = {"finish": 50, "disconnect": 34, "read slowly": 16}


class Expected:
    """Prompts and what the in-process engine says to them: greedy, so that nothing depends on the company."""

    def __init__(self, engine_dir: Path, longest: int, threads: int) -> None:
        with Engine.open(engine_dir, num_threads=threads) as engine:
            assert engine.tokenizer is not None
            prompts = [request["prompt_ids"] for request in common.workload()["requests16"]]
            self.prompts = [engine.tokenizer.decode(ids) for ids in prompts]
            self.prompt_ids = [engine.tokenizer.encode(text) for text in self.prompts]
            params = SamplingParams(max_tokens=longest, temperature=0.0, ignore_eos=True)
            done = engine.generate(self.prompt_ids, params, new_text=True)
            self.token_ids = [list(one.token_ids) for one in done]
            self._tokenizer = engine.tokenizer

    def text(self, prompt_idx: int, length: int) -> str:
        """Return the text of the first `length` tokens."""
        return self._tokenizer.decode(self.token_ids[prompt_idx][:length])


class Soak:
    """The clients: as many workers as streams, which take one request after another."""

    def __init__(self, server: Server, expected: Expected, args: argparse.Namespace) -> None:
        self.server, self.expected, self.args = server, expected, args
        self.counts: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []
        self.tokens = 0
        self.started = 0
        self.random = random.Random(args.seed)
        self.kinds = SERVE_KINDS if server.grpc_address is None else TRITON_KINDS

    async def run(self) -> None:
        """Run until both the requests and the minutes are done."""
        self.end_s = time.monotonic() + 60 * self.args.minutes
        await asyncio.gather(*(self._worker(i) for i in range(self.args.streams)))

    async def _worker(self, index: int) -> None:
        address = self.server.grpc_address
        client: Any = OpenAiClient(self.server.http_url) if address is None else TritonClient(address)
        async with closing(client), closing(OpenAiClient(self.server.http_url)) as http:
            while self.started < self.args.requests or time.monotonic() < self.end_s:
                self.started += 1
                await self._one(client, http, f"soak-{index}-{self.started}")

    async def _one(self, client: Any, http: OpenAiClient, request_id: str) -> None:
        kind = self.random.choices(list(self.kinds), weights=list(self.kinds.values()))[0]
        prompt_idx = self.random.randrange(len(self.expected.prompts))
        length = self.random.randint(8, self.args.longest)
        leave_after = self.random.randint(1, 3)
        try:
            outcome = await self._run(kind, client, http, prompt_idx, length, leave_after, request_id)
        except Exception as error:
            self.problems.append(f"{request_id} ({kind}): {type(error).__name__}: {error}")
            return
        self.counts[kind] += 1
        self._check(kind, request_id, outcome, prompt_idx, length)

    async def _run(
        self,
        kind: str,
        client: Any,
        http: Any,
        prompt_idx: int,
        length: int,
        leave_after: int,
        request_id: str,
    ) -> Outcome:
        ids, text = self.expected.prompt_ids[prompt_idx], self.expected.prompts[prompt_idx]
        if isinstance(client, OpenAiClient):
            if kind == "finish":
                return await client.completion(ids, length, add_special_tokens=False)
            return await _openai_leaves(client, ids, length, leave_after, slow=kind == "read slowly")
        if kind == "finish":
            return await client.tokens(ids, length, request_id)  # type: ignore[no-any-return]
        if kind == "ensemble":
            return await client.text("ensemble", text, length, request_id)  # type: ignore[no-any-return]
        if kind == "disconnect from generate_stream":
            return await _generate_stream_leaves(http, text, length, leave_after)
        return await _triton_leaves(client, ids, length, leave_after, request_id, kind)

    def _check(self, kind: str, request_id: str, outcome: Outcome, prompt_idx: int, length: int) -> None:
        if outcome.error is not None:
            self.problems.append(f"{request_id} ({kind}): {outcome.error}")
            return
        ended = kind in ("finish", "ensemble", "read slowly")
        if outcome.token_ids:
            self.tokens += len(outcome.token_ids)
            wanted = self.expected.token_ids[prompt_idx][: length if ended else len(outcome.token_ids)]
            if outcome.token_ids != wanted:
                self.problems.append(
                    f"{request_id} ({kind}): {len(outcome.token_ids)} tokens, not those expected"
                )
        else:
            text = self.expected.text(prompt_idx, length)
            if outcome.text != text if ended else not text.startswith(outcome.text):
                self.problems.append(
                    f"{request_id} ({kind}): text {outcome.text[:60]!r} is not {text[:60]!r}"
                )
        if ended and not outcome.finished:
            self.problems.append(f"{request_id} ({kind}): the stream ended without its last answer")


async def _triton_leaves(
    client: TritonClient, ids: list[int], length: int, leave_after: int, request_id: str, kind: str
) -> Outcome:
    """Run a request of the engine's model that is left early, or read slowly."""
    outcome = Outcome(time.perf_counter())
    answers = client.answers(infer_request("tensorrt_llm", token_tensors(ids, length), request_id))
    async for message in answers:
        if message.error_message:
            outcome.error = message.error_message
            break
        outcome.take_tokens(message.infer_response)
        if kind == "read slowly":
            await asyncio.sleep(0.3)
        elif outcome.num_answers == leave_after and kind == "stop in band":
            await client.send(_stop_request(request_id))
        elif outcome.num_answers >= leave_after and kind == "cancel the gRPC stream":
            await answers.aclose()  # type: ignore[attr-defined]
            return outcome
    outcome.finished = True
    return outcome


def _stop_request(request_id: str) -> Any:
    """Return the older stack's stop: the same id, stop = true, empty lengths."""
    one = np.zeros((1, 1), np.int32)
    tensors = {"input_ids": one, "input_lengths": one, "request_output_len": one}
    return infer_request("tensorrt_llm", {**tensors, "stop": np.asarray([[True]], np.bool_)}, request_id)


async def _openai_leaves(
    client: OpenAiClient, ids: list[int], length: int, leave_after: int, *, slow: bool
) -> Outcome:
    body = {"model": "default", "prompt": ids, "max_tokens": length, "temperature": 0, "ignore_eos": True}
    return await _read_events(
        client, "/v1/completions", {**body, "stream": True}, None if slow else leave_after, slow, "choices"
    )


async def _generate_stream_leaves(http: OpenAiClient, text: str, length: int, leave_after: int) -> Outcome:
    body = {"text_input": text, "max_tokens": length, "end_id": -1, "top_k": 1, "stream": True}
    path = "/v2/models/ensemble/generate_stream"
    return await _read_events(http, path, body, leave_after, False, "text_output")


async def _read_events(
    client: OpenAiClient, path: str, body: dict[str, Any], leave_after: int | None, slow: bool, key: str
) -> Outcome:
    outcome = Outcome(time.perf_counter())
    async with contextlib.aclosing(client.events(path, body, outcome)) as events:
        async for event in events:
            value = event.get(key)
            if value:
                outcome.note()
                outcome.text += value if isinstance(value, str) else value[0]["text"]
            if slow:
                await asyncio.sleep(0.3)
            if leave_after is not None and outcome.num_answers >= leave_after:
                break
    return outcome


def metric(text: str, name: str, **labels: str) -> float:
    """Return the value of one sample of an exposition."""
    for line in text.splitlines():
        match = re.match(r"(\w+)(?:\{(.*)\})? (\S+)$", line)
        if match and match[1] == name and all(f'{k}="{v}"' in (match[2] or "") for k, v in labels.items()):
            return float(match[3])
    raise SystemExit(f"the exposition has no {name} with {labels}")


def scrape(url: str) -> str:
    """Return the text of a metrics page."""
    with urllib.request.urlopen(url, timeout=10) as response:
        text: str = response.read().decode()
    return text


async def watch_memory(server: Server, samples: list[tuple[float, int]], every_s: float) -> None:
    """Note the server's resident bytes until cancelled."""
    begin = time.monotonic()
    while True:
        samples.append((time.monotonic() - begin, server.resident_bytes()))
        await asyncio.sleep(every_s)


def books(server: Server) -> dict[str, float]:
    """Return what must be zero, and what has been counted, once nothing runs."""
    text = scrape(server.metrics_url)
    return {
        "active requests": metric(text, "nv_trt_llm_request_metrics", request_type="active"),
        "used blocks": metric(text, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="used"),
        "requests counted": metric(text, "nv_llm_input_token_len_count"),
        "output tokens counted": metric(text, "nv_llm_output_token_len_sum"),
    }


async def soak(server: Server, expected: Expected, args: argparse.Namespace) -> dict[str, Any]:
    """Run the clients against a server and return the result."""
    clients = Soak(server, expected, args)
    before = books(server)
    memory: list[tuple[float, int]] = []
    watcher = asyncio.create_task(watch_memory(server, memory, 2.0))
    begin = time.monotonic()
    await clients.run()
    wall_s = time.monotonic() - begin
    watcher.cancel()
    await asyncio.sleep(2)  # cancels are looked for at intervals, and metrics too
    after = books(server)
    fifth = wall_s / 5
    early = statistics.median(size for at, size in memory if fifth < at < 2 * fifth)
    late = statistics.median(size for at, size in memory if at > 4 * fifth)
    counted = after["requests counted"] - before["requests counted"]
    return {
        "server": server.name,
        "streams": args.streams,
        "requests": clients.started,
        "of each kind": dict(clients.counts),
        "minutes": wall_s / 60,
        "problems": clients.problems,
        "active requests at the end": after["active requests"],
        "used blocks at the end": after["used blocks"],
        "requests the server counted": counted,
        "output tokens the server counted": after["output tokens counted"] - before["output tokens counted"],
        "resident MiB, second fifth": early / 2**20,
        "resident MiB, last fifth": late / 2**20,
        "memory growth": late / early - 1,
        "memory_samples": [(round(at, 1), size) for at, size in memory],
    }


def main() -> None:
    """Run the soak, print the table, store the result; exit 1 when something was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", choices=("triton", "serve", "both"), default="both")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--longest", type=int, default=128, help="output tokens of a request")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    engine_dir = common.engine("int8")
    expected = Expected(engine_dir, args.longest, args.threads)
    results = []
    for name, start in (("triton", triton_server), ("serve", openai_server)):
        if args.server in (name, "both"):
            with start(engine_dir, args.threads) as server:
                results.append(asyncio.run(soak(server, expected, args)))
    shown = [key for key in results[0] if key not in ("memory_samples", "problems", "of each kind")]
    rows = [[key, *(_cell(result[key]) for result in results)] for key in shown]
    rows.append(["problems", *(len(result["problems"]) for result in results)])
    print(common.table(["", *(result["server"] for result in results)], rows))
    for result in results:
        print(f"{result['server']}: {result['of each kind']}")
        for problem in result["problems"][:20]:
            print("  " + problem)
    name = "serving_soak" if args.server == "both" else f"serving_soak_{args.server}"
    common.store(name, {"args": vars(args), "results": results})
    clean = all(
        not r["problems"] and not r["active requests at the end"] and not r["used blocks at the end"]
        for r in results
    )
    raise SystemExit(0 if clean else 1)


def _cell(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 1
        else f"{value:,.6g}"
        if isinstance(value, float)
        else str(value)
    )


if __name__ == "__main__":
    main()
