"""What the parameters of a repository make of an engine on a GPU: on its double, through Engine.open."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_machine import Machine
from plansmith.runtime.engine import Engine, SamplingParams
from plansmith.runtime.errors import OutOfMemoryError, UnsupportedError
from plansmith.runtime.executors.executor import TensorRtExecutor
from plansmith.serving.triton.lora_cache import LoraCache, LoraRequest
from plansmith.serving.triton.parameters import PARAMETERS, Settings, read_parameters

TARGET = "sm89"
GetEngine = Callable[..., Any]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def settings(path: Path, **texts: str) -> Settings:
    """Return what a repository says as it is written: every key at its default, and these."""
    written = {row.key: row.default for row in PARAMETERS}
    found, notes = read_parameters({**written, "gpt_model_path": str(path), "target": TARGET, **texts})
    assert not notes
    return found


def open_on(machine: Machine, path: Path, **texts: str) -> Engine:
    with machine.installed():
        return Engine.open(**settings(path, **texts).open_arguments())


def executor_of(engine: Engine) -> TensorRtExecutor:
    assert engine._gpu is not None
    return engine._gpu


def test_a_repository_as_it_is_written_opens_a_gpu_target(rtx_engine: GetEngine) -> None:
    built = rtx_engine()
    machine = Machine(built)
    with open_on(machine, built.path) as engine:
        assert len(engine.generate([[5, 6]], PARAMS)[0].token_ids) == 6
        cache = LoraCache(engine, max_adapters=8)
        with pytest.raises(UnsupportedError, match="the engine takes no LoRA adapters"):
            cache.acquire(LoraRequest(7))
    assert machine.problems() == []
    with pytest.raises(
        UnsupportedError, match="lora_prefetch_dir is '/loras', and target sm89 takes no LoRA"
    ):
        settings(built.path, lora_prefetch_dir="/loras").open_arguments()


def test_the_pools_get_their_share_of_what_is_free(rtx_engine: GetEngine) -> None:
    built = rtx_engine()
    sizes = {}
    for text in ("0.25", "0.5", ""):
        machine = Machine(built)
        with open_on(machine, built.path, kv_cache_free_gpu_mem_fraction=text) as engine:
            sizes[text] = engine.stats().kv_cache_bytes
            block = engine.model_info.kv_bytes_per_block
        assert machine.problems() == []
    for text, share in (("0.25", 0.25), ("0.5", 0.5)):
        assert abs(sizes[text] - sizes[""] * share / 0.9) <= 2 * block
    with open_on(
        Machine(built), built.path, kv_cache_free_gpu_mem_fraction="0.5", kv_cache_bytes=str(7 * block)
    ) as engine:
        assert engine.stats().kv_cache_bytes == 7 * block
    with open_on(Machine(built), built.path, max_tokens_in_paged_kv_cache="100") as engine:
        assert engine.stats().max_num_blocks == 13  # of 8 tokens
    with pytest.raises(OutOfMemoryError, match=r"are free beside the plan|does not fit on"):
        open_on(Machine(built), built.path, max_tokens_in_paged_kv_cache=str(1 << 28))


def test_a_device_is_chosen_by_its_older_key(rtx_engine: GetEngine) -> None:
    built = rtx_engine()
    with open_on(Machine(built), built.path, gpu_device_ids="0") as engine:
        assert engine.device_use() is not None
    with pytest.raises(UnsupportedError, match="device '3' is not there; choose one of 0: "):
        open_on(Machine(built), built.path, gpu_device_ids="3")


def test_graphs_are_captured_as_asked(rtx_engine: GetEngine) -> None:
    built = rtx_engine()
    prompts = [[n, n + 1] for n in range(3, 6)]
    for texts, wanted in (
        ({"cuda_graph_mode": "false"}, 0),
        ({"cuda_graph_mode": "true"}, 0),  # TensorRT-RTX's own
        ({"cuda_graphs": "own"}, 2),  # tables of one and of two blocks
        ({"cuda_graphs": "own", "cuda_graph_cache_size": "1"}, 1),
    ):
        machine = Machine(built)
        with open_on(machine, built.path, **texts) as engine:
            long = dataclasses.replace(PARAMS, max_tokens=12)
            engine.generate(prompts, long)
            graphs = executor_of(engine)._parts.graphs
            assert (0 if graphs is None else len(graphs)) == wanted, texts
        assert machine.problems() == []


def test_the_share_of_the_weights_on_the_device(rtx_engine: GetEngine) -> None:
    built = rtx_engine()
    weights, total = 40 << 20, 256 << 20

    def used(text: str, **options: Any) -> int:
        machine = Machine(built, total_bytes=total, plan_options={"weights_bytes": weights, **options})
        try:
            with open_on(machine, built.path, gpu_weights_percent=text, kv_cache_bytes="1048576") as engine:
                use = engine.device_use()
                assert use is not None
                return use.used
        finally:
            assert machine.problems() == []

    streamable = {"streamable_bytes": 36 << 20}
    whole = used("", **streamable)
    assert used("1.0", **streamable) == whole
    half = used("0.5", **streamable)
    scratch = 2 << 20  # streaming's own, and what allocations are rounded up by
    assert whole - (18 << 20) <= half <= whole - (18 << 20) + scratch
    assert used("0", **streamable) <= whole - (36 << 20) + scratch
    assert used("1.0") == used("")
    with pytest.raises(
        UnsupportedError, match=r"gpu_weights_percent is 0\.5.*have to be on the device.*--weight-streaming"
    ):
        used("0.5")


def test_settings_of_an_older_repository_reach_the_gpu(rtx_engine: GetEngine, tmp_path: Path) -> None:
    """From the command line through config.pbtxt, carried over once, to the executor."""
    built = rtx_engine()
    said = {
        "kv_cache_free_gpu_mem_fraction": "0.5",
        "gpu_device_ids": "0",
        "cuda_graph_mode": "true",
        "cuda_graph_cache_size": "1",
        "cuda_graphs": "own",
    }

    def write(name: str, *words: str) -> Path:
        command = [sys.executable, "-m", "plansmith.cli", "triton-repo", str(built.path), "-o", name, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0 and "no effect" not in done.stderr, done.stderr
        return tmp_path / name / "tensorrt_llm" / "config.pbtxt"

    write(
        "old",
        "--target",
        TARGET,
        *(word for key, text in said.items() for word in ("--set", f"{key}={text}")),
    )
    config = write("new", "--from", "old").read_text(encoding="utf-8")
    texts = dict(re.findall(r'parameters \{ key: "(\w+)" value: \{ string_value: "([^"]*)" \} \}', config))
    assert said.items() <= texts.items() and texts["target"] == TARGET
    found, notes = read_parameters(texts, tmp_path / "new")
    assert not notes
    machine = Machine(built)
    with machine.installed(), Engine.open(**found.open_arguments()) as engine:
        engine.generate([[n, n + 1] for n in range(3, 6)], dataclasses.replace(PARAMS, max_tokens=12))
        graphs = executor_of(engine)._parts.graphs
        assert graphs is not None and len(graphs) == 1
        half = engine.stats().kv_cache_bytes
    assert machine.problems() == []
    with open_on(Machine(built), built.path, kv_cache_free_gpu_mem_fraction="1") as engine:
        block = engine.model_info.kv_bytes_per_block
        assert abs(2 * half - engine.stats().kv_cache_bytes) <= 3 * block


def test_a_share_that_does_not_fit_is_said(rtx_engine: GetEngine) -> None:
    built = rtx_engine()
    options = {"weights_bytes": 40 << 20, "streamable_bytes": 36 << 20}
    machine = Machine(built, total_bytes=44 << 20, plan_options=options)
    with pytest.raises(OutOfMemoryError):
        open_on(machine, built.path, gpu_weights_percent="1.0", kv_cache_bytes=str(16 << 20))
    assert machine.problems() == []
