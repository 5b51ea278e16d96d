"""LoRA adapters in an engine: the tokens of merged weights in mixed batches, and what an engine refuses."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_adapters as tiny
import torch
from plansmith.runtime import errors
from plansmith.runtime.engine import Engine, SamplingParams

GetPath = Callable[..., Path]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1, detokenize=False)
PROMPTS = [[1, 5, 9, 33], list(range(10, 60)), [77], [8] * 9]
ARRAY_IDS = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "up_proj": 5, "down_proj": 6, "gate_proj": 7}


@pytest.fixture(scope="module")
def model(tiny_checkpoint: GetPath) -> Callable[[str], Any]:
    return functools.cache(lambda family: tiny.load_model(tiny_checkpoint(family)))


def three_adapters(model: Any, is_fused: bool) -> dict[str, tuple[tiny.TinyAdapter, dict[str, Any]]]:
    """Every module at rank 8; the attention of one layer at rank 5 in bfloat16; the MLP at ranks of its own."""
    every = tiny.FUSED if is_fused else tiny.ALL
    mlp = [name for name in every if name.split("_")[0] in ("gate", "up", "down")]
    own = {"down_proj": 3, "1.mlp.up_proj": 33}
    return {
        "every": (tiny.make_adapter(model, every, seed=1), {}),
        "attention": (
            tiny.make_adapter(
                model,
                [name for name in every if name not in mlp],
                r=5,
                scale=10 / math.sqrt(5),
                dtype=torch.bfloat16,
                layers=[1],
                seed=2,
            ),
            {"r": 5, "lora_alpha": 10, "use_rslora": True},
        ),
        "mlp": (
            tiny.make_adapter(
                model,
                mlp,
                ranks=own,
                scales={"down_proj": 7 / 3, "1.mlp.up_proj": 16 / 33},
                dtype=torch.float16,
                seed=3,
            ),
            {
                "rank_pattern": {"down_proj": 3, r"layers\.1\.mlp\.up_proj": 33},
                "alpha_pattern": {"model.layers.[0-9]+.mlp.down_proj": 7},
            },
        ),
    }


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_a_mixed_batch_has_the_tokens_of_merged_models(
    family: str, model: Callable[[str], Any], tiny_engine: GetPath, tmp_path: Path
) -> None:
    base = model(family)
    adapters = three_adapters(base, is_fused=family == "phi3")
    wanted = {None: base, **{name: adapter.merged(base) for name, (adapter, _) in adapters.items()}}
    with Engine.open(tiny_engine(family), num_threads=2, max_num_tokens=24) as engine:
        for name, (adapter, fields) in adapters.items():
            engine.load_adapter(name, tiny.write_adapter(tmp_path / name, adapter, **fields))
        jobs = [(prompt, name) for prompt in PROMPTS for name in wanted]
        completions = engine.generate(
            [prompt for prompt, _ in jobs], [dataclasses.replace(GREEDY, adapter=name) for _, name in jobs]
        )
    outputs = set()
    for (prompt, name), completion in zip(jobs, completions, strict=True):
        tokens, logprobs = tiny.greedy(wanted[name], prompt, GREEDY.max_tokens or 0)
        assert completion.logprobs is not None
        assert list(completion.token_ids) == tokens, (name, prompt)
        np.testing.assert_allclose([t.logprob for t in completion.logprobs], logprobs, atol=2e-4)
        outputs.add((tuple(prompt), *tokens, *np.round(logprobs, 2)))
    assert len(outputs) == len(jobs)  # else an adapter could be left out unseen


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_adapters_beside_rounded_weights(precision: str, tiny_checkpoint: GetPath, tmp_path: Path) -> None:
    from plansmith.builder.precision import PRECISIONS
    from tiny_engines import build_tiny
    from transformers_reference import hold_weights_as

    base = tiny.load_model(tiny_checkpoint("llama"))
    hold_weights_as(base, PRECISIONS[precision].on_cpu())
    adapter = tiny.make_adapter(base, tiny.ALL)
    merged = adapter.merged(base)
    prompt = list(range(20, 60))
    params = dataclasses.replace(GREEDY, max_tokens=1, prompt_logprobs=0)

    def of(model: Any) -> np.ndarray:
        with torch.no_grad():
            rows = torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1].double(), -1).numpy()
        return np.array(rows[range(len(prompt) - 1), prompt[1:]])

    # K and V in float32, as transformers holds them.
    path = build_tiny(tiny_checkpoint("llama"), tmp_path / "engine", precision, kv_cache_dtype="float32")
    with Engine.open(path, num_threads=1) as engine:
        engine.load_adapter("a", tiny.write_adapter(tmp_path / "a", adapter))
        got = []
        for name in (None, "a"):
            (done,) = engine.generate([prompt], dataclasses.replace(params, adapter=name))
            assert done.prompt_logprobs is not None
            got.append(np.array([t.logprob for t in done.prompt_logprobs[1:] if t is not None]))
    errors_ = [np.abs(g - of(m)).mean() for g, m in zip(got, (base, merged), strict=True)]
    # bf16 weights are exact in float32; int8 and int4 round the activations, as they do without an adapter.
    allowed = 1e-4 if precision == "bf16" else 2 * errors_[0] + 0.02
    assert errors_[1] < allowed < np.abs(of(base) - of(merged)).mean() / 4


def test_an_engine_of_a_gguf_file_takes_the_same_adapter(
    model: Callable[[str], Any], tiny_checkpoint: GetPath, tmp_path: Path
) -> None:
    from tiny_engines import build_tiny
    from tiny_gguf import write_gguf

    # Converters reorder the rows of q and k for GGUF; the engine's are in the order of the adapter again.
    gguf = write_gguf(tiny_checkpoint("llama"), tmp_path / "tiny.gguf")
    adapter = tiny.make_adapter(model("llama"), ("q_proj", "k_proj"), seed=4)
    tiny.write_adapter(tmp_path / "a", adapter)
    merged = adapter.merged(model("llama"))
    with Engine.open(build_tiny(gguf, tmp_path / "engine"), num_threads=1) as engine:
        engine.load_adapter("a", tmp_path / "a")
        done = engine.generate(PROMPTS, dataclasses.replace(GREEDY, adapter="a"))
    for prompt, completion in zip(PROMPTS, done, strict=True):
        tokens, logprobs = tiny.greedy(merged, prompt, GREEDY.max_tokens or 0)
        assert list(completion.token_ids) == tokens
        np.testing.assert_allclose([t.logprob for t in completion.logprobs or ()], logprobs, atol=2e-4)


def test_nobody_shares_a_prefix_of_another_adapter(
    model: Callable[[str], Any], tiny_engine: GetPath, tmp_path: Path
) -> None:
    base = model("llama")
    adapters = {name: adapter for name, (adapter, _) in three_adapters(base, is_fused=False).items()}
    prompt = list(range(30, 70))
    names = [None, "every", "attention", "every", None, "attention"]

    def run(engine: Engine, name: str | None) -> tuple[tuple[int, ...], int]:
        before = engine.stats().reused_tokens
        (done,) = engine.generate([prompt], dataclasses.replace(GREEDY, adapter=name))
        return tuple(done.token_ids), engine.stats().reused_tokens - before

    with Engine.open(tiny_engine("llama"), num_threads=1) as engine:
        fields: dict[str, dict[str, Any]] = {
            "every": {},
            "attention": {"r": 5, "lora_alpha": 10, "use_rslora": True},
        }
        for name in fields:
            engine.load_adapter(name, tiny.write_adapter(tmp_path / name, adapters[name], **fields[name]))
        got = [run(engine, name) for name in names]
        # A name that is used again is another adapter: what was cached under the old one is gone.
        engine.unload_adapter("every")
        engine.load_adapter("every", tmp_path / "attention")
        again = run(engine, "every")
    assert [reused > 0 for _, reused in got] == [False, False, False, True, True, True]
    for name, (tokens, _) in zip(names, got, strict=True):
        wanted = base if name is None else adapters[name].merged(base)
        assert list(tokens) == tiny.greedy(wanted, prompt, len(tokens))[0]
    assert again == (got[2][0], 0)


def test_tokens_do_not_depend_on_the_neighbours(
    model: Callable[[str], Any], tiny_engine: GetPath, tmp_path: Path
) -> None:
    base = model("qwen3")
    params = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0)
    jobs = [(PROMPTS[i % 4], [None, "a", "b"][i % 3], 100 + i) for i in range(12)]

    def run(order: list[int], **options: Any) -> dict[int, tuple[Any, ...]]:
        with Engine.open(tiny_engine("qwen3"), **options) as engine:
            engine.load_adapter("a", tmp_path / "a")
            engine.load_adapter("b", tmp_path / "b")
            own = [dataclasses.replace(params, adapter=jobs[i][1], seed=jobs[i][2]) for i in order]
            done = engine.generate([jobs[i][0] for i in order], own)
        return {
            i: (d.token_ids, [t.logprob for t in d.logprobs or ()]) for i, d in zip(order, done, strict=True)
        }

    tiny.write_adapter(tmp_path / "a", tiny.make_adapter(base, tiny.ALL, seed=5))
    tiny.write_adapter(tmp_path / "b", tiny.make_adapter(base, ("v_proj", "down_proj"), seed=6))
    alone = run(list(range(12)), num_threads=1, max_batch_size=1)
    assert run(list(range(12)), num_threads=2, max_num_tokens=9) == alone
    assert run(list(reversed(range(12))), num_threads=2, max_batch_size=5, max_num_tokens=13) == alone


def test_the_older_arrays_give_the_same(
    model: Callable[[str], Any], tiny_engine: GetPath, tmp_path: Path
) -> None:
    base = model("llama")
    adapter = tiny.make_adapter(base, tiny.ALL, ranks={"k_proj": 3})
    tiny.write_adapter(tmp_path / "peft", adapter, rank_pattern={"k_proj": 3}, alpha_pattern={"k_proj": 6})
    tiny.write_arrays(tmp_path / "arrays", adapter, ARRAY_IDS)
    with Engine.open(tiny_engine("llama"), num_threads=1) as engine:
        for name in ("peft", "arrays"):
            engine.load_adapter(name, tmp_path / name)
        done = [
            engine.generate(PROMPTS, dataclasses.replace(GREEDY, adapter=name)) for name in ("peft", "arrays")
        ]
    assert [d.token_ids for d in done[0]] == [d.token_ids for d in done[1]]
    assert [d.token_ids for d in done[0]] != [
        tuple(tiny.greedy(base, prompt, GREEDY.max_tokens or 0)[0]) for prompt in PROMPTS
    ]


def test_arrays_in_memory_are_the_same_adapter(
    model: Callable[[str], Any], tiny_engine: GetPath, tmp_path: Path
) -> None:
    adapter = tiny.make_adapter(model("llama"), tiny.ALL)
    directory = tiny.write_arrays(tmp_path / "arrays", adapter, ARRAY_IDS, np.float16)
    config = np.load(directory / "model.lora_config.npy")
    weights = np.load(directory / "model.lora_weights.npy")
    with Engine.open(tiny_engine("llama"), num_threads=1) as engine:
        ids = [engine.load_adapter("file", directory), engine.load_adapter_arrays("memory", config, weights)]
        assert engine.adapters == {"file": ids[0], "memory": ids[1]}
        want, got, base = (
            [c.token_ids for c in engine.generate(PROMPTS, dataclasses.replace(GREEDY, adapter=name))]
            for name in ("file", ids[1], None)
        )
        assert got == want != base
        with pytest.raises(errors.InvalidArgumentError, match="loaded already"):
            engine.load_adapter_arrays("memory", config, weights)
        with pytest.raises(errors.InvalidArgumentError, match="must be a text"):
            engine.load_adapter_arrays("", config, weights)
        with pytest.raises(errors.ShapeError, match="made for another model"):
            engine.load_adapter_arrays("short", config, weights[..., :10])
        with pytest.raises(errors.CheckpointError, match="wanted integers"):
            engine.load_adapter_arrays("floats", config.astype(np.float32), weights)
        assert set(engine.adapters) == {"file", "memory"}
        engine.unload_adapter("memory")


def test_an_engine_says_what_it_cannot_do(
    model: Callable[[str], Any], tiny_engine: GetPath, tmp_path: Path
) -> None:
    base = model("llama")
    good = tiny.write_adapter(tmp_path / "good", tiny.make_adapter(base, ("q_proj",)))
    large = tiny.write_adapter(tmp_path / "large", tiny.make_adapter(base, ("q_proj",), r=9), r=9)
    other = tiny.write_adapter(tmp_path / "other", tiny.make_adapter(model("mistral"), ("q_proj",)))
    damaged = tiny.make_adapter(base, ("q_proj",))
    damaged.b["model.layers.1.self_attn.q_proj"][3, 2] = float("nan")
    tiny.write_adapter(tmp_path / "damaged", damaged)
    with Engine.open(tiny_engine("llama"), num_threads=1, max_adapters=2, max_adapter_rank=8) as engine:
        assert (engine.model_info.max_adapters, engine.model_info.max_adapter_rank) == (2, 8)
        engine.load_adapter("good", good)
        with pytest.raises(errors.ShapeError, match=r"q of layer 0.*rank is 9, the executor takes 1 to 8"):
            engine.load_adapter("large", large)
        with pytest.raises(errors.ShapeError, match="96 in_features, the model has 64"):
            engine.load_adapter("other", other)
        with pytest.raises(errors.InvalidArgumentError, match=r"q of layer 1\): holds a NaN"):
            engine.load_adapter("damaged", tmp_path / "damaged")
        with pytest.raises(errors.InvalidArgumentError, match="no adapter 'large'"):
            engine.generate([[1, 2]], dataclasses.replace(GREEDY, adapter="large"))
        engine.load_adapter("second", good)
        with pytest.raises(errors.OutOfMemoryError):
            engine.load_adapter("third", good)
        # Long enough to be found running, however busy the machine is.
        slowed = dataclasses.replace(
            GREEDY, adapter="good", max_tokens=100, logits_processor=lambda _ids, _logits: time.sleep(0.05)
        )
        handle = engine.submit([1, 2, 3], slowed)
        with pytest.raises(errors.InvalidArgumentError, match="use"):
            engine.unload_adapter("good")
        handle.cancel()
        handle.result()
        engine.unload_adapter("good")
        engine.load_adapter("third", good)
        assert set(engine.adapters) == {"second", "third"}
    with (
        Engine.open(tiny_engine("llama"), num_threads=1, max_adapters=0) as engine,
        pytest.raises(errors.UnsupportedError, match="adapters"),
    ):
        engine.load_adapter("good", good)


def test_loading_and_unloading_leave_running_requests_alone(
    model: Callable[[str], Any], tiny_engine: GetPath, tmp_path: Path
) -> None:
    base = model("llama")
    for seed, name in enumerate("abc"):
        tiny.write_adapter(tmp_path / name, tiny.make_adapter(base, tiny.ALL, seed=seed))
    params = dataclasses.replace(GREEDY, max_tokens=70)
    with Engine.open(tiny_engine("llama"), num_threads=1, max_adapters=2) as engine:
        engine.load_adapter("a", tmp_path / "a")
        wanted = engine.generate(PROMPTS, dataclasses.replace(params, adapter="a"))
        handles = [engine.submit(prompt, dataclasses.replace(params, adapter="a")) for prompt in PROMPTS]
        short = {}
        for n in range(8):
            name = "bc"[n % 2]
            engine.load_adapter(name, tmp_path / name)
            (done,) = engine.generate([PROMPTS[0]], dataclasses.replace(GREEDY, adapter=name))
            assert short.setdefault(name, done.token_ids) == done.token_ids
            engine.unload_adapter(name)
        assert short["b"] != short["c"]
        assert [h.result().token_ids for h in handles] == [d.token_ids for d in wanted]
