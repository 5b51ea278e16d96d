"""Checkpoints quantized by every recipe, read back by an independent reader, and held against the simulation."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported_weights import Exported
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.calibration.options import QuantizeOptions, plan_quantization
from plansmith.calibration.quantize import quantize_checkpoint, quantize_model
from plansmith.calibration.recipes import RECIPES
from plansmith.runtime.errors import CheckpointError, InvalidArgumentError, OutOfMemoryError

Tiny = Callable[[str], Path]
Make = Callable[..., QuantizeOptions]

WEIGHT_ONLY = ("int8_wo", "int4_awq", "int4_wo", "nvfp4_wo")
IDS = np.random.default_rng(3).integers(3, 320, 40)


def _outputs(simulated: Any, layers: list[str]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return each layer's input and output in the simulation, and run it once on IDS."""
    seen: dict[str, torch.Tensor] = {}
    handles = [
        simulated.model.get_submodule(one).register_forward_hook(
            lambda module, arguments, output, name=one: seen.update({name: output.detach().clone()})
        )
        for one in layers
    ]
    with simulated.capture_inputs(layers) as inputs:
        simulated.logits(IDS)
    for handle in handles:
        handle.remove()
    return {name: torch.from_numpy(x) for name, x in inputs.items()}, seen


@pytest.mark.parametrize(
    ("family", "recipe"),
    [("llama", one) for one in RECIPES]
    + [(family, one) for family in ("gemma2", "phi3") for one in ("int4_awq", "int8_sq", "nvfp4")],
)
def test_the_written_layers_are_the_simulated_ones(
    family: str, recipe: str, tiny_checkpoint: Tiny, options: Make, tmp_path: Path
) -> None:
    plan = plan_quantization(tiny_checkpoint(family), options(recipe=recipe, smoothquant=_alpha(recipe)))
    simulated = quantize_model(plan)
    layers = [one.name for one in plan.layers]
    inputs, outputs = _outputs(simulated, layers)
    biases = {one: simulated.model.get_submodule(one).bias for one in layers}
    biases = {one: None if bias is None else bias.detach().clone() for one, bias in biases.items()}
    simulated.save(tmp_path)
    exported = Exported(tmp_path)
    for name in layers:
        assert exported.algorithm(name) is not None
        bias = exported.tensors.get(f"{name}.bias")
        assert (bias is None) == (biases[name] is None)
        x = exported.input(name, inputs[name])
        expected = torch.nn.functional.linear(x, exported.weight(name), bias)
        # float32 noise; a value on the edge between two codes may fall either way, which is rare
        error = (outputs[name] - expected).norm() / expected.norm()
        assert error < (2e-6 if recipe in WEIGHT_ONLY else 2e-3), (name, float(error))


def _alpha(recipe: str) -> float | None:
    return 0.6 if recipe == "int8_sq" else None


@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_a_plain_model_with_the_written_weights_is_the_simulation(
    family: str, tiny_checkpoint: Tiny, options: Make, tmp_path: Path
) -> None:
    """Norms and embeddings included: AWQ's factors are folded into the norms."""
    import transformers

    source = tiny_checkpoint(family)
    plan = plan_quantization(source, options(recipe="int4_awq"))
    simulated = quantize_model(plan)
    expected = simulated.logits(IDS)
    simulated.save(tmp_path)
    exported = Exported(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    names = {one.name for one in plan.layers}
    factors = {name: exported.tensors.get(f"{name}.pre_quant_scale") for name in names}
    state = {name: value for name, value in exported.tensors.items() if name.rpartition(".")[0] not in names}
    for name in names:
        factor = factors[name]
        weight = exported.weight(name)
        state[f"{name}.weight"] = weight if factor is None else weight * factor.float()
    result = model.load_state_dict(state, strict=False)
    assert not result.unexpected_keys and set(result.missing_keys) <= {"lm_head.weight"}
    with torch.no_grad():
        logits = model(torch.from_numpy(IDS)[None]).logits[0].numpy()
    np.testing.assert_allclose(logits, expected, atol=2e-4 * np.abs(expected).max())
    folded = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(state[folded], model.__class__.from_pretrained(source).get_parameter(folded))


def test_int4_groups_follow_each_layers_inputs(tiny_checkpoint: Tiny, options: Make, tmp_path: Path) -> None:
    report = quantize_checkpoint(tiny_checkpoint("llama"), tmp_path / "out", options(recipe="int4_wo"))
    exported = Exported(tmp_path / "out")
    for name, facts in report["layers"].items():
        scale = exported.tensors[f"{name}.weight_scale"]
        wanted = {64: 64, 96: 32, 128: 128}[exported.weight(name).shape[1]]
        assert facts["group_size"] == wanted == exported.weight(name).shape[1] // scale.shape[1]
    assert report["quant_algo"] == "MIXED_PRECISION"
    forced = quantize_checkpoint(
        tiny_checkpoint("llama"), tmp_path / "forced", options(recipe="int4_awq", group_size=32)
    )
    assert forced["quant_algo"] == "W4A16_AWQ"
    assert {one["group_size"] for one in forced["layers"].values()} == {32}


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_kv_scales_are_the_largest_keys_and_values(
    kv: str, tiny_checkpoint: Tiny, options: Make, tmp_path: Path
) -> None:
    import transformers

    source = tiny_checkpoint("llama")
    made = options(recipe="int8_wo", kv_cache=kv)
    report = quantize_checkpoint(source, tmp_path / "out", made)
    exported = Exported(tmp_path / "out")
    assert exported.quant["kv_cache_quant_algo"] == kv.upper() and report["kv_cache"] == kv
    samples = plan_quantization(source, made).samples
    assert samples is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        cache = model(torch.from_numpy(samples.ids), use_cache=True).past_key_values
    weights: Any = open_checkpoint(tmp_path / "out").weights
    for n, layer in enumerate(cache.layers):
        for one, values in (("k", layer.keys), ("v", layer.values)):
            scale = exported.tensors[f"model.layers.{n}.self_attn.{one}_proj.{one}_scale"]
            largest = {"fp8": 448.0, "int8": 127.0}[kv]
            # weights that are rounded to INT8 already are what is calibrated with
            assert scale.numel() == 1 and float(scale) in weights.kv_scales(n)
            assert float(scale) * largest == pytest.approx(float(values.abs().max()), rel=0.05)


def test_the_same_seed_gives_the_same_bits(tiny_checkpoint: Tiny, options: Make, tmp_path: Path) -> None:
    source = tiny_checkpoint("llama")
    found = []
    for n, seed in enumerate((5, 5, 6)):
        made = options(recipe="w4a8_awq", seed=seed, kv_cache="fp8")
        report = quantize_checkpoint(source, tmp_path / str(n), made)
        assert report["seed"] == seed
        found.append(Exported(tmp_path / str(n)).tensors)
    first, again, other = found
    assert first.keys() == again.keys()
    for name in first:
        assert torch.equal(_bits(first[name]), _bits(again[name])), name
    scales = [name for name in first if name.endswith("input_scale")]
    assert scales and any(not torch.equal(_bits(first[name]), _bits(other[name])) for name in scales)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_what_is_left_out_keeps_its_bits(tiny_checkpoint: Tiny, options: Make, tmp_path: Path) -> None:
    source = tiny_checkpoint("llama")
    made = options(recipe="fp8", exclude=("*down_proj", "layers.1"))
    report = quantize_checkpoint(source, tmp_path / "out", made)
    exported = Exported(tmp_path / "out")
    original = _source_tensors(source)
    assert all(name.startswith("model.layers.0.") for name in report["layers"])
    for name in report["left_out"]:
        assert torch.equal(exported.tensors[f"{name}.weight"], original[f"{name}.weight"])
        assert exported.algorithm(name) is None
    assert "model.layers.0.mlp.down_proj" in report["left_out"] and "lm_head" in report["left_out"]


def _source_tensors(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def test_lm_head_that_shares_the_embedding_gets_a_table_of_its_own(
    tiny_checkpoint: Tiny, options: Make, tmp_path: Path
) -> None:
    source = tiny_checkpoint("llama_linear")
    quantize_checkpoint(source, tmp_path / "out", options(recipe="fp8", quantize_lm_head=True))
    exported = Exported(tmp_path / "out")
    table = _source_tensors(source)["model.embed_tokens.weight"]
    assert exported.config["tie_word_embeddings"] is False
    assert torch.equal(exported.tensors["model.embed_tokens.weight"], table)
    assert exported.tensors["lm_head.weight"].dtype == torch.float8_e4m3fn
    error = (exported.weight("lm_head") - table).abs()
    assert bool((error <= table.abs() / 16 + table.abs().max() / 448).all())


def test_unquantized_weights_are_stored_as_asked(
    tiny_checkpoint: Tiny, options: Make, tmp_path: Path
) -> None:
    source = tiny_checkpoint("llama")
    plan = plan_quantization(source, options(recipe="int4_awq", dtype="bfloat16"))
    simulated = quantize_model(plan)
    norm = simulated.model.get_parameter("model.layers.0.input_layernorm.weight").clone()
    simulated.save(tmp_path)
    exported = Exported(tmp_path)
    stored = exported.tensors["model.layers.0.input_layernorm.weight"]
    assert stored.dtype == torch.bfloat16 and exported.config["torch_dtype"] == "bfloat16"
    assert torch.equal(stored.float(), norm)  # the simulation has the rounding too
    assert exported.tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert exported.tensors["model.layers.0.self_attn.q_proj.weight_scale"].dtype == torch.float32


def test_a_budget_of_bits(tiny_checkpoint: Tiny, options: Make, tmp_path: Path) -> None:
    source = tiny_checkpoint("llama")
    made = options(auto_bits=6.0, auto_recipes=("int4_awq", "fp8"), kv_cache="int8")
    report = quantize_checkpoint(source, tmp_path / "out", made)
    exported = Exported(tmp_path / "out")
    assert report["effective_bits"] <= 6.0 and report["quant_algo"] == "MIXED_PRECISION"
    chosen = {name: one["recipe"] for name, one in report["layers"].items()}
    assert set(chosen.values()) <= {"int4_awq", "fp8", "none"} and len(set(chosen.values())) > 1
    bits = {"int4_awq": 4, "fp8": 8, "none": 16}
    algorithms = {"int4_awq": "W4A16_AWQ", "fp8": "FP8", "none": None}
    sizes = {name: exported.weight(name).numel() for name in chosen}
    mean = sum(bits[chosen[name]] * size for name, size in sizes.items()) / sum(sizes.values())
    assert mean == pytest.approx(report["effective_bits"], abs=1e-6)
    for name, recipe in chosen.items():
        assert exported.algorithm(name) == algorithms[recipe], name
        scores = report["layers"][name]["scores"]
        assert set(scores) == {"int4_awq", "fp8", "none"} and scores["none"] == 0 < scores["fp8"]
    assert chosen["model.layers.0.self_attn.q_proj"] == chosen["model.layers.0.self_attn.k_proj"]
    assert "model.layers.1.self_attn.v_proj.v_scale" in exported.tensors


def test_a_budget_over_groups_of_several_sizes(tiny_checkpoint: Tiny, options: Make, tmp_path: Path) -> None:
    """Llama's inputs of 64, 96 and 128 have groups of their own, and NVFP4 counts its scales."""
    made = options(auto_bits=4.6, auto_recipes=("w4a8_awq", "nvfp4"))
    report = quantize_checkpoint(tiny_checkpoint("llama"), tmp_path / "out", made)
    exported = Exported(tmp_path / "out")
    bits = {"w4a8_awq": 4.0, "nvfp4": 4.5, "none": 16.0}
    sizes = {name: exported.weight(name).numel() for name in report["layers"]}
    total = sum(bits[one["recipe"]] * sizes[name] for name, one in report["layers"].items())
    mean = total / sum(sizes.values())
    assert mean == pytest.approx(report["effective_bits"]) and mean <= 4.6


def test_a_budget_that_leaves_all_layers_alone_writes_nothing(
    tiny_checkpoint: Tiny, options: Make, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgumentError, match="leaves every layer as it is"):
        quantize_checkpoint(
            tiny_checkpoint("llama"), tmp_path / "out", options(auto_bits=16.0, kv_cache="fp8")
        )
    assert list(tmp_path.iterdir()) == []


def test_a_search_smooths_with_the_given_alpha(tiny_checkpoint: Tiny, options: Make, tmp_path: Path) -> None:
    weights = []
    for alpha in (0.1, 0.9):
        made = options(auto_bits=8.0, auto_recipes=("int8_sq",), smoothquant=alpha)
        quantize_checkpoint(tiny_checkpoint("llama"), tmp_path / str(alpha), made)
        weights.append(
            Exported(tmp_path / str(alpha)).tensors["model.layers.0.self_attn.q_proj.pre_quant_scale"]
        )
    assert not torch.equal(*weights)


def test_smoothquant_takes_the_best_of_what_it_tried(
    tiny_checkpoint: Tiny, options: Make, tmp_path: Path
) -> None:
    report = quantize_checkpoint(tiny_checkpoint("llama"), tmp_path / "out", options(recipe="int8_sq"))
    tried = report["smoothquant_search"]
    assert set(tried) == {"0.5", "0.6", "0.7", "0.8", "0.9"}
    assert tried[f"{report['smoothquant_alpha']:g}"] == min(tried.values())


def test_alpha_is_not_searched_where_a_second_model_does_not_fit(
    tiny_checkpoint: Tiny, options: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plansmith.calibration.quantize.available_memory_bytes", lambda: 1000)
    found = quantize_model(plan_quantization(tiny_checkpoint("llama"), options(recipe="int8_sq"))).facts
    assert found["smoothquant_alpha"] == 0.7 and "smoothquant_search" not in found
    assert any("was not searched" in note and "--smoothquant" in note for note in found["notes"])


def test_the_report_leads_back_to_the_source(tiny_checkpoint: Tiny, options: Make, tmp_path: Path) -> None:
    source = tiny_checkpoint("llama")
    report = quantize_checkpoint(source, tmp_path / "out", options(recipe="fp8"))
    assert json.loads((tmp_path / "out" / "plansmith_quantize.json").read_text()) == report
    assert report["source"]["path"] == str(source.resolve())
    assert report["source"]["fingerprint"] == open_checkpoint(source).fingerprint()
    assert report["calibration"]["samples"] == 8 and report["peak_memory_bytes"] > 0
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    kept = json.loads((source / "config.json").read_text())
    written = Exported(tmp_path / "out").config
    assert {key: written[key] for key in kept if key not in ("dtype", "torch_dtype")} == {
        key: value for key, value in kept.items() if key not in ("dtype", "torch_dtype")
    }


def test_a_gguf_file(tiny_checkpoint: Tiny, options: Make, tmp_path: Path) -> None:
    from tiny_gguf import write_gguf

    gguf = write_gguf(tiny_checkpoint("llama"), tmp_path / "model.gguf")
    report = quantize_checkpoint(gguf, tmp_path / "out", options(recipe="int8_wo"))
    assert report["source"]["path"] == str(gguf)
    assert not (tmp_path / "out" / "source").exists()
    assert Exported(tmp_path / "out").weight("model.layers.0.self_attn.q_proj").shape == (128, 64)


# ---------------------------------------------------------------- errors, and what is left behind


def test_weights_that_no_recipe_touches_are_looked_at_too(
    tiny_checkpoint: Tiny, options: Make, tmp_path: Path
) -> None:
    """A checkpoint with them would be written, and no engine could be built of it."""
    for name in ("model.embed_tokens", "lm_head", "model.norm"):
        source = _changed(tiny_checkpoint("llama"), tmp_path / name, f"{name}.weight", np.nan)
        with pytest.raises(CheckpointError, match=f"the weight of {name} holds NaN"):
            quantize_checkpoint(source, tmp_path / "out", options(recipe="int8_wo"))


def test_smoothing_channels_that_are_pruned(tiny_checkpoint: Tiny, options: Make, tmp_path: Path) -> None:
    """Columns of zeros, under a norm that makes the same inputs zero as well: 0 / 0 without care."""
    from safetensors.torch import load_file, save_file

    source = tmp_path / "source"
    shutil.copytree(tiny_checkpoint("llama"), source)
    tensors, layer = load_file(source / "model.safetensors"), "model.layers.0"
    for part in ("gate_proj", "up_proj"):
        tensors[f"{layer}.mlp.{part}.weight"][:, :9] = 0
    tensors[f"{layer}.post_attention_layernorm.weight"][:3] = 0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for alpha in (0.0, 0.5, 1.0):
        out = tmp_path / str(alpha)
        quantize_checkpoint(source, out, options(recipe="int8_sq", smoothquant=alpha))
        stored = Exported(out)
        for part in ("gate_proj", "up_proj"):
            assert stored.tensors[f"{layer}.mlp.{part}.pre_quant_scale"].isfinite().all()
            weight = stored.weight(f"{layer}.mlp.{part}")
            factors = stored.tensors[f"{layer}.mlp.{part}.pre_quant_scale"].float()
            assert (weight * factors)[:, :9].abs().max() < 1e-5 * weight.abs().max()


def test_a_source_that_changes_meanwhile(
    tiny_checkpoint: Tiny, options: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from plansmith.calibration import model

    load, source = model.load_model, tmp_path / "source"
    shutil.copytree(tiny_checkpoint("llama"), source)
    other = _changed(source, tmp_path / "other", "model.norm.weight", 2)

    def change(*given: Any) -> Any:
        (other / "model.safetensors").replace(source / "model.safetensors")
        return load(*given)

    monkeypatch.setattr(model, "load_model", change)
    with pytest.raises(CheckpointError, match="files changed while it was quantized"):
        quantize_checkpoint(source, tmp_path / "out", options(recipe="int8_wo"))
    assert not (tmp_path / "out").exists()


def test_damaged_weights_are_named(tiny_checkpoint: Tiny, options: Make, tmp_path: Path) -> None:
    source = _changed(tiny_checkpoint("llama"), tmp_path / "nan", "model.layers.1.mlp.up_proj.weight", np.nan)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj holds NaN"):
        quantize_checkpoint(source, tmp_path / "out", options(recipe="int8_wo"))
    source = _changed(
        tiny_checkpoint("llama"), tmp_path / "zero", "model.layers.0.self_attn.q_proj.weight", 0
    )
    with pytest.raises(CheckpointError, match=r"q_proj is 0 throughout.*--exclude"):
        quantize_checkpoint(source, tmp_path / "out", options(recipe="int8_wo"))
    source = _changed(
        tiny_checkpoint("llama"), tmp_path / "norm", "model.layers.1.input_layernorm.weight", 3e38
    )
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj.* is NaN or infinite"):
        quantize_checkpoint(source, tmp_path / "out", options(recipe="fp8"))
    source = _changed(
        tiny_checkpoint("llama"), tmp_path / "dead", "model.layers.1.post_attention_layernorm.weight", 0
    )
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.gate_proj.* was 0 for all samples"):
        quantize_checkpoint(source, tmp_path / "out", options(recipe="fp8"))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["dead", "nan", "norm", "zero"]


def _changed(source: Path, copy: Path, name: str, value: float) -> Path:
    import shutil

    from safetensors.torch import save_file

    shutil.copytree(source, copy)
    tensors = _source_tensors(source)
    tensors[name] = torch.full_like(tensors[name], value)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def test_layers_that_no_sample_reaches_are_named() -> None:
    from plansmith.calibration.calibrate import ActivationWatch, forward_loop
    from plansmith.calibration.progress import Progress

    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def run(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
            return self.used(input_ids.float())

        @property
        def model(self) -> Any:
            return self.run

    net = Half()
    loop = forward_loop([torch.ones(1, 4)], ActivationWatch(["used", "idle"]), Progress())
    with pytest.raises(CheckpointError, match="no sample reached idle"):
        loop(net)


def test_a_quantized_checkpoint_is_refused(tiny_checkpoint: Tiny, options: Make, tmp_path: Path) -> None:
    quantize_checkpoint(tiny_checkpoint("llama"), tmp_path / "out", options(recipe="int8_wo"))
    with pytest.raises(CheckpointError, match="is quantized already"):
        quantize_checkpoint(tmp_path / "out", tmp_path / "again", options(recipe="fp8"))
    assert not (tmp_path / "again").exists()


def test_an_output_that_is_there(tiny_checkpoint: Tiny, options: Make, tmp_path: Path) -> None:
    source, made = tiny_checkpoint("llama"), options(recipe="int8_wo")
    first = quantize_checkpoint(source, tmp_path / "out", made)
    with pytest.raises(InvalidArgumentError, match="--force"):
        quantize_checkpoint(source, tmp_path / "out", made)
    second = quantize_checkpoint(source, tmp_path / "out", options(recipe="int4_wo"), force=True)
    assert first["recipe"] != second["recipe"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(InvalidArgumentError, match="not made here"):
        quantize_checkpoint(source, tmp_path / "other", made, force=True)
    with pytest.raises(InvalidArgumentError, match="lies in the checkpoint"):
        quantize_checkpoint(source, source / "out", made)
    assert (tmp_path / "other" / "thesis.txt").read_text() == "mine"


def test_an_output_that_the_source_lies_in(tiny_checkpoint: Tiny, options: Make, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    source = shutil.copytree(tiny_checkpoint("llama"), outer / "source")
    (outer / "plansmith_quantize.json").write_text("{}")
    with pytest.raises(InvalidArgumentError, match="is replaced as a whole"):
        quantize_checkpoint(source, outer, options(recipe="int8_wo"), force=True)
    assert (source / "config.json").is_file()


def test_a_model_that_does_not_fit_is_no_damaged_checkpoint(
    tiny_checkpoint: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from plansmith.calibration.model import load_model

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    with pytest.raises(OutOfMemoryError, match="does not fit into the memory of cpu in float32"):
        load_model(tiny_checkpoint("llama"), "cpu", False)


CHILD = """
import json, os, resource, signal, sys
from plansmith.calibration.quantize import QuantizeOptions, quantize_checkpoint

source, out, stage, max_file_bytes, fields = sys.argv[1:]
options = QuantizeOptions(**{k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(fields).items()})

def report(who, phase, done, total):
    if stage and phase.startswith(stage) and (stage != "calibrating" or done):
        os.kill(os.getpid(), signal.SIGKILL)

if int(max_file_bytes):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(max_file_bytes),) * 2)
try:
    quantize_checkpoint(source, out, options, report=report)
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def in_a_process(
    source: Path, out: Path, options: QuantizeOptions, *, kill_at: str = "", max_file_bytes: int = 0
) -> subprocess.CompletedProcess[str]:
    """Quantize in a process of its own: a fork of this one would inherit locks of threads that it does not have."""
    words = [str(source), str(out), kill_at, str(max_file_bytes), json.dumps(dataclasses.asdict(options))]
    return subprocess.run([sys.executable, "-c", CHILD, *words], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("stage", ["loading", "calibrating", "writing"])
def test_a_kill_leaves_nothing(stage: str, tiny_checkpoint: Tiny, options: Make, tmp_path: Path) -> None:
    source, out = tiny_checkpoint("llama"), tmp_path / "out"
    done = in_a_process(source, out, options(recipe="w4a8_awq"), kill_at=stage)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()
    quantize_checkpoint(source, out, options(recipe="int8_wo"))
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_a_full_disk(tiny_checkpoint: Tiny, options: Make, tmp_path: Path) -> None:
    """A limit on the size of files stands for it: the library that writes the weights has errors of its own."""
    out = tmp_path / "out"
    done = in_a_process(tiny_checkpoint("llama"), out, options(recipe="int8_wo"), max_file_bytes=100_000)
    assert "OutOfMemoryError: the output does not fit on the disk of " in done.stderr
    assert done.returncode == 1 and list(tmp_path.iterdir()) == []


def test_memory_that_ran_out() -> None:
    from plansmith.calibration.third_party import explained

    with pytest.raises(OutOfMemoryError, match="smaller --batch-size"), explained():
        torch.empty(1 << 60)
    with pytest.raises(KeyError), explained():
        raise KeyError("others go through")


def test_an_interruption_leaves_nothing(tiny_checkpoint: Tiny, options: Make, tmp_path: Path) -> None:
    def interrupt(who: str, phase: str, done: int, total: int) -> None:
        if phase.startswith("writing"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(
            tiny_checkpoint("llama"), tmp_path / "deep" / "out", options(recipe="int8_wo"), report=interrupt
        )
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- built and run


@pytest.mark.parametrize("recipe", ["int4_awq", "int8_wo"])
def test_the_built_engine_computes_the_simulation(
    recipe: str, tiny_checkpoint: Tiny, options: Make, tmp_path: Path
) -> None:
    from plansmith.builder.batch import BatchPlanner
    from plansmith.builder.targets.cpu.session import CpuSession
    from tiny_engines import build_tiny

    plan = plan_quantization(tiny_checkpoint("llama"), options(recipe=recipe))
    simulated = quantize_model(plan)
    expected = simulated.logits(IDS)
    simulated.save(tmp_path / "out")
    opened = open_checkpoint(tmp_path / "out")
    exported = Exported(tmp_path / "out")
    down = exported.weight("model.layers.0.mlp.down_proj")
    factors = exported.tensors.get("model.layers.0.mlp.down_proj.pre_quant_scale")
    plain = down if factors is None else down * factors
    np.testing.assert_allclose(opened.weights.get("layers.0.down.weight"), plain.numpy(), rtol=1e-6)
    engine = build_tiny(tmp_path / "out", tmp_path / "engine", precision="auto", kv_cache_dtype="float32")
    planner = BatchPlanner([IDS.tolist()], num_blocks=16, tokens_per_block=8, max_blocks_per_seq=16)
    found = np.zeros_like(expected)
    with CpuSession(engine / "targets" / "cpu" / "model.plan", 16) as session:
        for step in planner:
            logits = session.step(step.batch)
            for row, (_, position) in zip(logits, step.rows, strict=True):
                found[position] = row
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())
