"""LoRA adapters: the tokens of merged weights in mixed batches, and what is refused, from PEFT and from arrays."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_adapters as tiny
import torch
from plansmith.runtime import errors
from plansmith.runtime.engine import Engine, SamplingParams
from plansmith.runtime.lora import LoraAdapter, LoraMatrix, Widths, load_adapter_dir
from plansmith.runtime.lora_arrays import adapter_from_arrays

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
def test_adapters_beside_rounded_weights(
    precision: str, tiny_checkpoint: GetPath, tiny_engine: GetPath, tmp_path: Path
) -> None:
    from transformers_reference import _hold_weights_as

    base = tiny.load_model(tiny_checkpoint("llama"))
    _hold_weights_as(base, precision)
    adapter = tiny.make_adapter(base, tiny.ALL)
    merged = adapter.merged(base)
    prompt = list(range(20, 60))
    params = dataclasses.replace(GREEDY, max_tokens=1, prompt_logprobs=0)

    def of(model: Any) -> np.ndarray:
        with torch.no_grad():
            rows = torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1].double(), -1).numpy()
        return np.array(rows[range(len(prompt) - 1), prompt[1:]])

    with Engine.open(tiny_engine("llama", precision), num_threads=1) as engine:
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


def test_fused_arrays_are_cut_apart() -> None:
    widths = Widths(num_layers=2, q=6, kv=2, hidden=4, intermediate=5)
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 4)).astype(np.float16), rng.normal(size=(10, 3)).astype(np.float16)
    config = np.array([[[0, 1, 3]]], np.int32)
    weights = np.concatenate([a.ravel(), b.ravel(), np.zeros(7, np.float16)])[None]
    adapter = adapter_from_arrays(config, weights, widths)
    assert [m.matrix for m in adapter.modules] == [LoraMatrix.Q, LoraMatrix.K, LoraMatrix.V]
    for module, rows in zip(adapter.modules, (b[:6], b[6:8], b[8:]), strict=True):
        assert (module.layer_idx, module.scale, module.rank) == (1, 1.0, 3)
        np.testing.assert_array_equal(module.a, a.astype(np.float32))
        np.testing.assert_array_equal(module.b, rows.astype(np.float32))


WIDTHS = Widths(num_layers=2, q=8, kv=4, hidden=6, intermediate=10)


@pytest.mark.parametrize(
    ("config", "weights", "error", "text"),
    [
        ([[8, 0, 1]], np.zeros((1, 40)), errors.CheckpointError, "module id 8"),
        ([[1, 0, 0]], np.zeros((1, 40)), errors.CheckpointError, "rank 0"),
        ([[1, -1, 1]], np.zeros((1, 40)), errors.CheckpointError, "layer -1"),
        ([[1, 2, 1]], np.zeros((1, 14)), errors.ShapeError, "q of layer 2, the model has 2 layers"),
        ([[1, 0, 4]], np.zeros((1, 40)), errors.ShapeError, "needs 56 weights for 6 inputs and 8 outputs"),
        ([[1, 0, 1]], np.ones((1, 15)), errors.ShapeError, "weights behind the 14"),
        ([[1, 0, 1, 1]], np.zeros((1, 40)), errors.CheckpointError, "DoRA"),
        ([[1, 0, 1]], np.zeros((2, 40)), errors.CheckpointError, "with the config's 1 rows"),
        ([[1, 0, 1]], np.zeros((1, 40), np.int32), errors.CheckpointError, "int32"),
        ([[1.0, 0.0, 1.0]], np.zeros((1, 40)), errors.CheckpointError, "wanted integers"),
        ([1, 0, 1], np.zeros((1, 40)), errors.CheckpointError, "two dimensions"),
        ([[1, 0, 1]] * 2, np.zeros((2, 40)), errors.CheckpointError, "q of layer 0 twice"),
        (np.zeros((0, 3), np.int32), np.zeros((0, 40)), errors.CheckpointError, "no weights"),
    ],
)
def test_bad_arrays_are_refused(config: Any, weights: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        adapter_from_arrays(np.asarray(config), weights, WIDTHS)


def test_arrays_need_the_widths_of_the_model() -> None:
    widths = Widths(num_layers=2, q=8, kv=4)
    with pytest.raises(errors.CheckpointError, match="open the engine from its directory"):
        adapter_from_arrays(np.array([[1, 0, 1]]), np.zeros((1, 40)), widths)


def test_files_of_arrays_that_are_damaged_are_refused(tmp_path: Path) -> None:
    config, weights = tmp_path / "model.lora_config.npy", tmp_path / "model.lora_weights.npy"
    np.save(config, np.array([[1, 0, 1]], np.int32))
    with pytest.raises(errors.CheckpointError, match=r"lora_weights\.npy: is missing"):
        load(tmp_path)
    weights.write_bytes(b"\x93NUMPY")
    with pytest.raises(errors.CheckpointError, match=r"no \.npy file"):
        load(tmp_path)
    np.save(weights, np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(errors.CheckpointError, match=r"no \.npy file"):
        load(tmp_path)
    with weights.open("wb") as file:
        np.savez(file, a=np.zeros(3))
    with pytest.raises(errors.CheckpointError, match="archive"):
        load(tmp_path)


@dataclasses.dataclass
class Info:
    """The fields of a ModelInfo that an adapter is read with."""

    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32


def load(path: Path) -> LoraAdapter:
    return load_adapter_dir(path, Info())  # type: ignore[arg-type]


@pytest.fixture
def peft(model: Callable[[str], Any], tmp_path: Path) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
    """Return a good directory and its tensors, to be changed and saved again."""
    adapter = tiny.make_adapter(model("llama"), tiny.ALL)
    tiny.write_adapter(tmp_path, adapter)
    assert len(load(tmp_path).modules) == 14
    yield tmp_path, adapter.tensors()


def resave(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"use_dora": True}, "is DoRA"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "trained biases"),
        ({"modules_to_save": ["lm_head"]}, "whole layers"),
        ({"trainable_token_indices": [1]}, "embeddings of tokens"),
        ({"layer_replication": [[0, 2]]}, "repeats layers"),
        ({"target_parameters": ["mlp.experts"]}, "experts"),
        ({"alora_invocation_tokens": [5]}, "activated LoRA"),
        ({"use_qalora": True}, "QA-LoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "replaces the base model's weights"),
        ({"use_something_new": True}, "use_something_new = True, which this plansmith does not know"),
        ({"r": 0}, "r is 0"),
        ({"r": "8"}, "r is '8'"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"use_rslora": 1.5}, "use_rslora is 1.5"),
        ({"rank_pattern": [8]}, r"rank_pattern is \[8\]"),
        ({"rank_pattern": {"q_proj": 2.5}}, "wanted ranks"),
        ({"alpha_pattern": {"(": 2}}, "no regular expression"),
        ({"alpha_pattern": {"q_proj": "x"}}, r"alpha_pattern\['q_proj'\] is 'x'"),
    ],
)
def test_configs_that_are_not_applied_are_refused(
    fields: dict[str, Any], text: str, peft: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    tiny.write_config(peft[0], **fields)
    with pytest.raises(errors.CheckpointError, match=text):
        load(peft[0])


@pytest.mark.parametrize(
    "fields",
    [
        {"use_something_new": None, "another": False, "third": {}},
        {"init_lora_weights": "gaussian"},
        {"fan_in_fan_out": True},
        {"modules_to_save": []},
    ],
)
def test_fields_that_are_off_or_change_nothing_are_fine(
    fields: dict[str, Any], peft: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    tiny.write_config(peft[0], **fields)
    assert {m.scale for m in load(peft[0]).modules} == {2.0}


LAYER = "base_model.model.model.layers.0."


@pytest.mark.parametrize(
    ("name", "shape", "error", "text"),
    [
        (LAYER + "self_attn.q_proj.lora_magnitude_vector", (8,), errors.CheckpointError, "is of DoRA"),
        (LAYER + "self_attn.q_proj.lora_B.bias", (8,), errors.CheckpointError, "is a bias"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (8, 320), errors.CheckpointError, "embedding"),
        ("base_model.model.lm_head.modules_to_save.weight", (8, 8), errors.CheckpointError, "whole layer"),
        ("base_model.model.model.embed_tokens.weight", (320, 64), errors.CheckpointError, "the embedding"),
        ("base_model.model.lm_head.base_layer.weight", (320, 64), errors.CheckpointError, "the output layer"),
        (LAYER + "self_attn.q_proj.weight", (8, 8), errors.CheckpointError, "is not known"),
        (LAYER + "self_attn.q_proj.lora_A.other.weight", (8, 64), errors.CheckpointError, "more than one"),
        (LAYER + "self_attn.r_proj.lora_A.weight", (8, 64), errors.CheckpointError, "r_proj"),
        ("base_model.model.lm_head.lora_A.weight", (8, 64), errors.CheckpointError, "lm_head"),
        (LAYER + "self_attn.q_proj.lora_A.weight", (7, 64), errors.ShapeError, r"lora_A \[7, 64\]"),
        (LAYER + "self_attn.q_proj.lora_A.weight", (64,), errors.ShapeError, "wanted"),
        (LAYER + "self_attn.q_proj.lora_A.weight", (8, 0), errors.ShapeError, "wanted"),
        (LAYER + "self_attn.k_proj.lora_B.weight", (128, 8), errors.ShapeError, "128 out_features"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_applied_are_refused(
    name: str,
    shape: tuple[int, ...],
    error: type[Exception],
    text: str,
    peft: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    path, tensors = peft
    resave(path, {**tensors, name: torch.zeros(shape)})
    with pytest.raises(error, match=text):
        load(path)


def test_what_is_missing_or_contradicts_is_named(
    peft: tuple[Path, dict[str, torch.Tensor]], model: Callable[[str], Any], tmp_path: Path
) -> None:
    path, tensors = peft
    name = LAYER + "mlp.up_proj.lora_B.weight"
    resave(path, {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(errors.CheckpointError, match=r"layers\.0\.mlp\.up_proj' has no lora_B"):
        load(path)
    resave(path, tensors)
    tiny.write_config(path, r=16)
    with pytest.raises(errors.ShapeError, match=r"has rank 8, adapter_config\.json says 16"):
        load(path)
    tiny.write_config(path)
    resave(path, {k.replace("layers.0.", "layers.2."): v for k, v in tensors.items()})
    with pytest.raises(errors.ShapeError, match="layer 2, the model has 2 layers"):
        load(path)
    resave(path, {k.replace(".weight", ".default.weight"): v for k, v in tensors.items()})
    assert len(load(path).modules) == 14  # as a state_dict names them


def test_files_that_are_damaged_or_of_another_kind_are_refused(
    peft: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    path, _ = peft
    weights, config = path / "adapter_model.safetensors", path / "adapter_config.json"
    data = weights.read_bytes()
    for damaged in (data[:-5], data[:100], b"", data + b"x", b"\xff" * 8 + data):
        weights.write_bytes(damaged)
        with pytest.raises(errors.CheckpointError, match=r"adapter_model\.safetensors: "):
            load(path)
    weights.rename(path / "adapter_model.bin")
    with pytest.raises(errors.CheckpointError, match=r"is a pickle.*save_file"):
        load(path)
    (path / "adapter_model.bin").unlink()
    with pytest.raises(errors.CheckpointError, match=r"has no adapter_model\.safetensors"):
        load(path)
    for text in ("[]", "{", '{"r": '):
        config.write_text(text)
        with pytest.raises(errors.CheckpointError, match=r"adapter_config\.json"):
            load(path)
    config.unlink()
    with pytest.raises(errors.CheckpointError, match="is missing"):
        load(path)
    with pytest.raises(errors.CheckpointError, match="does not exist"):
        load(path / "none")
    with pytest.raises(errors.CheckpointError, match="is a file"):
        load(Path(__file__))


def test_a_pickle_is_converted_by_the_command_in_its_error(
    peft: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    import shlex
    import subprocess
    import sys

    path, tensors = peft
    (path / "adapter_model.safetensors").unlink()
    torch.save(tensors, path / "adapter_model.bin")
    with pytest.raises(errors.CheckpointError) as caught:
        load(path)
    command = shlex.split(str(caught.value).partition("trust it: ")[2])
    subprocess.run([sys.executable, *command[1:]], cwd=path, check=True)
    assert len(load(path).modules) == 14


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
        handle = engine.submit([1, 2, 3], dataclasses.replace(GREEDY, adapter="good", max_tokens=100))
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


def test_the_config_may_be_written_by_an_older_peft(peft: tuple[Path, dict[str, torch.Tensor]]) -> None:
    fields = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "target_modules": ["q_proj"],
              "task_type": "CAUSAL_LM", "modules_to_save": None, "fan_in_fan_out": False, "lora_dropout": 0.1,
              "base_model_name_or_path": "tiny", "inference_mode": True}  # fmt: skip
    (peft[0] / "adapter_config.json").write_text(json.dumps(fields))
    adapter = load(peft[0])
    assert adapter.max_rank == 8 and {m.scale for m in adapter.modules} == {2.0}
    assert adapter.num_bytes == sum(4 * t.numel() for t in peft[1].values())
