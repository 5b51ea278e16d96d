"""OpenVINO GenAI's continuous batching on a workload, as one JSON line; `prepare` makes its environment and model.

Runs in an environment of its own (`venv-openvino` in the work folder), so it imports nothing of plansmith. `run` prints
{"engine", "version", "load_s", "wall_s", "generated_tokens", "ttft_s": [...], "token_ids": [[...]]}.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

VERSION = "2026.4.1"
RUN_REQUIREMENTS = [f"openvino-genai=={VERSION}.0", f"openvino=={VERSION}", "numpy"]
EXPORT_REQUIREMENTS = [
    "optimum-intel",
    f"openvino=={VERSION}",
    f"openvino-tokenizers=={VERSION}.0",
    "nncf==3.4.0",
]

COMPRESS = """
import sys, nncf, openvino
source, target = sys.argv[1:]
model = openvino.Core().read_model(source)
model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
openvino.save_model(model, target, compress_to_fp16=False)
"""


def make_environment(path: Path, requirements: list[str], torch_index: str | None = None) -> Path:
    """Return the interpreter of an environment at `path` that holds `requirements`, made if it is not there."""
    python = path / "bin" / "python"
    if (path / ".ready").exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", str(path)], check=True)
    pip = [str(python), "-m", "pip", "install", "-q"]
    if torch_index is not None:
        subprocess.run([*pip, "--extra-index-url", torch_index, "torch==2.13.0"], check=True)
    subprocess.run([*pip, *requirements], check=True)
    # torchvision from the default index does not load beside a CPU build of torch and breaks transformers' imports.
    subprocess.run([str(python), "-m", "pip", "uninstall", "-q", "-y", "torchvision"], check=True)
    (path / ".ready").touch()
    return python


def prepare(checkpoint: Path, work: Path, torch_index: str) -> None:
    """Export `checkpoint` to fp32 and int8 OpenVINO models under `work`, once."""
    make_environment(work / "venv-openvino", RUN_REQUIREMENTS)
    convert = make_environment(work / "venv-openvino-export", EXPORT_REQUIREMENTS, torch_index)
    fp32, int8 = work / "openvino-fp32", work / "openvino-int8"
    if not (fp32 / "openvino_model.xml").exists():
        command = [str(convert.parent / "optimum-cli"), "export", "openvino", "-m", str(checkpoint), "--task"]
        subprocess.run(
            [*command, "text-generation-with-past", "--weight-format", "fp32", str(fp32)], check=True
        )
    if not (int8 / "openvino_model.xml").exists():
        int8.mkdir(exist_ok=True)
        for file in fp32.iterdir():
            if not file.name.startswith("openvino_model."):
                shutil.copy(file, int8 / file.name)
        source, target = fp32 / "openvino_model.xml", int8 / "openvino_model.xml"
        subprocess.run([str(convert), "-c", COMPRESS, str(source), str(target)], check=True)


def run(model: Path, requests: list[dict], threads: int) -> dict:
    """Return what `requests` ({"prompt_ids", "output_len"}), all sent at once, took; one short request warms up."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    start = time.perf_counter()
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.max_num_seqs = 16
    scheduler.max_num_batched_tokens = 512
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    pipeline = genai.ContinuousBatchingPipeline(
        str(model), scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}, {}
    )
    load_s = time.perf_counter() - start

    def serve(batch: list[dict], first_id: int) -> tuple[float, list[float], list[list[int]]]:
        begin = time.perf_counter()
        handles = []
        for idx, request in enumerate(batch):
            config = genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = request["output_len"]
            config.ignore_eos = True
            config.do_sample = False
            ids = ov.Tensor(np.array([request["prompt_ids"]], dtype=np.int64))
            handles.append(pipeline.add_request(first_id + idx, ids, config))
        ttft = [0.0] * len(batch)
        tokens: list[list[int]] = [[] for _ in batch]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - begin
            for idx, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        if output.generated_ids and not tokens[idx]:
                            ttft[idx] = now
                        tokens[idx] += list(output.generated_ids)
        return time.perf_counter() - begin, ttft, tokens

    serve([{"prompt_ids": [29990, *requests[0]["prompt_ids"][1:]], "output_len": 16}], 0)
    wall_s, ttft, tokens = serve(requests, 1)
    return {
        "engine": f"openvino-genai {model.name.removeprefix('openvino-')}",
        "version": VERSION,
        "load_s": load_s,
        "wall_s": wall_s,
        "generated_tokens": sum(map(len, tokens)),
        "ttft_s": ttft,
        "token_ids": tokens,
    }


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["prepare", "run"])
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--torch-index", default="https://download.pytorch.org/whl/cpu")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--requests", type=Path, help="JSON list of {prompt_ids, output_len}")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.action == "prepare":
        prepare(args.checkpoint.resolve(), args.work.resolve(), args.torch_index)
    else:
        print(json.dumps(run(args.model, json.loads(args.requests.read_text()), args.threads)))


if __name__ == "__main__":
    main()
