"""Generated tokens a second for 16 requests at once, beside OpenVINO GenAI and transformers, in one run.

    python bench/throughput.py [--rounds 5] [--threads 2]

Every round runs each engine once, one after another, each in a process of its own, on the same token ids and output
lengths (bench/workloads/workload16.json, end tokens ignored). transformers serves one request after another, as a
script without a server does; it is slow, so it runs in the first round only. The first token id of every prompt is
changed each round, so that no cache of an earlier round could help.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import common

PEER = common.ROOT / "bench" / "peers" / "ov_genai.py"
PEER_WORK = common.ROOT / "build" / "peers"

TRANSFORMERS = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(int(sys.argv[3]))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
requests = json.load(open(sys.argv[2]))
begin, ttft, tokens = time.perf_counter(), [], []
for request in requests:
    ids = torch.tensor([request["prompt_ids"]])
    n = request["output_len"]
    with torch.inference_mode():
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=n, min_new_tokens=n, do_sample=False)
    tokens.append(out[0, ids.shape[1]:].tolist())
wall = time.perf_counter() - begin
print(json.dumps({"engine": "transformers fp32, one at a time", "wall_s": wall,
                  "generated_tokens": sum(map(len, tokens)), "ttft_s": [], "token_ids": tokens}))
"""


def run_json(command: list[str], threads: int) -> dict[str, Any]:
    """Return the JSON object on the last line that `command` prints."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
    result: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return result


def bench_command(engine_dir: Path, requests: Path, threads: int) -> list[str]:
    """Return the command that runs the requests through plansmith's own in-process engine."""
    command = [*common.PLANSMITH, "bench", str(engine_dir), "--workload", str(requests)]
    return [*command, "--threads", str(threads), "--json"]


def salted(requests: list[dict[str, Any]], round_idx: int) -> list[dict[str, Any]]:
    """Return the requests with another first token id each round."""
    return [
        {"prompt_ids": [1000 + 7 * round_idx, *r["prompt_ids"][1:]], "output_len": r["output_len"]}
        for r in requests
    ]


def main() -> None:
    """Run the rounds, print the table with ratios, store everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precisions", default="int8,int4,fp32", help="of plansmith")
    parser.add_argument("--isa", default="avx2", help="run plansmith with these kernels too; empty for no")
    parser.add_argument("--peers", default="int8,fp32", help="OpenVINO precisions; empty for none")
    parser.add_argument("--torch-index", default="https://download.pytorch.org/whl/cpu")
    args = parser.parse_args()
    checkpoint = common.demo_checkpoint()
    precisions = args.precisions.split(",")
    engines = {precision: common.engine(precision) for precision in precisions}
    peers = [p for p in args.peers.split(",") if p]
    if peers:
        prepare = [sys.executable, str(PEER), "prepare", "--checkpoint", str(checkpoint)]
        subprocess.run([*prepare, "--work", str(PEER_WORK), "--torch-index", args.torch_index], check=True)

    requests = PEER_WORK / "requests.json"
    requests.parent.mkdir(parents=True, exist_ok=True)
    runs = {f"plansmith {p}": bench_command(engines[p], requests, args.threads) for p in precisions}
    if args.isa:
        for p in precisions:
            command = bench_command(engines[p], requests, args.threads)
            runs[f"plansmith {p} ({args.isa} kernels)"] = [*command, "--isa", args.isa]
    python = PEER_WORK / "venv-openvino" / "bin" / "python"
    for precision in peers:
        command = [str(python), str(PEER), "run", "--model", str(PEER_WORK / f"openvino-{precision}")]
        command += ["--requests", str(requests), "--threads", str(args.threads)]
        runs[f"openvino-genai {precision}"] = command
    slow = [sys.executable, "-c", TRANSFORMERS, str(checkpoint), str(requests), str(args.threads)]

    lengths = [request["output_len"] for request in common.workload()["requests16"]]
    samples: list[dict[str, Any]] = []
    for round_idx in range(args.rounds):
        requests.write_text(json.dumps(salted(common.workload()["requests16"], round_idx)))
        once = {"transformers fp32, one at a time": slow} if round_idx == 0 else {}
        for name, command in {**runs, **once}.items():
            load = os.getloadavg()[0]
            sample = {
                **run_json(command, args.threads),
                "engine": name,
                "round": round_idx,
                "load_average": load,
            }
            tokens = sample.pop("token_ids")
            if [len(t) for t in tokens] != lengths:
                raise SystemExit(f"{name} generated other lengths than it was asked for")
            sample["tokens_per_s"] = sample["generated_tokens"] / sample["wall_s"]
            print(f"round {round_idx}  {name:34s} {sample['tokens_per_s']:8.1f} tokens/s", flush=True)
            samples.append(sample)

    report(samples)
    common.store("throughput", {"threads": args.threads, "samples": samples})


def report(samples: list[dict[str, Any]]) -> None:
    """Print medians, spreads and the ratio to each engine."""
    names = list(dict.fromkeys(sample["engine"] for sample in samples))
    median = {n: statistics.median(s["tokens_per_s"] for s in samples if s["engine"] == n) for n in names}
    ours = [n for n in names if n.startswith("plansmith") and "kernels" not in n]
    rows = []
    for name in names:
        own = [s for s in samples if s["engine"] == name]
        ttft = [statistics.mean(s["ttft_s"]) for s in own if s["ttft_s"]]
        rows.append(
            [
                name,
                common.spread([s["tokens_per_s"] for s in own]),
                common.spread(ttft, 2) if ttft else "-",
                *[f"{median[our] / median[name]:.2f}" for our in ours],
            ]
        )
    print()
    print(
        common.table(
            ["engine", "generated tokens/s", "mean TTFT s", *[f"{our} is x times" for our in ours]], rows
        )
    )


if __name__ == "__main__":
    main()
