"""Quantized TensorRT-LLM checkpoints that ModelOpt itself exported, against its own simulation of them."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graph_logits import graph_logits
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.precision import of_checkpoint
from plansmith.runtime.errors import CheckpointError
from safetensors.torch import load_file
from tiny_models import VOCAB_SIZE, make_tiny
from trtllm_exports import HIDDEN, MODULES, RECIPES, SIZES, Exported, change_tensors, quantized_model

pytest.importorskip("modelopt")
pytestmark = pytest.mark.filterwarnings("ignore")


def simulated(one: Exported, layer: int, name: str) -> np.ndarray:
    """Return the weight as ModelOpt's forward pass has it, with the input's factors multiplied in."""
    module = one.model.model.layers[layer].get_submodule(MODULES[name])
    with torch.no_grad():
        if getattr(module.weight_quantizer, "num_bits", None) == (2, 1):
            return nvfp4(one.path, layer, name)
        weight = module.weight_quantizer(module.weight).float()
        factors = getattr(module.input_quantizer, "pre_quant_scale", None)
        return np.asarray(weight if factors is None else weight * factors.float())


def nvfp4(path: Path, layer: int, name: str) -> np.ndarray:
    """Return the weight as ModelOpt itself reads what it stored: its simulation of NVFP4 wants a GPU."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    tensors = load_file(path / "rank0.safetensors")
    module = {"o": "attention.dense", "gate": "mlp.fc", "up": "mlp.gate", "down": "mlp.proj"}.get(
        name, "attention.qkv"
    )
    prefix = f"transformer.layers.{layer}.{module}."
    packed = tensors[prefix + "weight"]
    stored = NVFP4QTensor(torch.Size((packed.shape[0], packed.shape[1] * 2)), torch.float32, packed)
    whole = stored.dequantize(
        torch.float32,
        scale=tensors[prefix + "weights_scaling_factor"],
        double_scale=tensors[prefix + "weights_scaling_factor_2"],
        block_sizes={-1: 16},
    ).numpy()
    rows = {"q": (0, HIDDEN), "k": (HIDDEN, 192), "v": (192, 256)}.get(name, (0, len(whole)))
    return np.asarray(whole[rows[0] : rows[1]])


def linears() -> list[tuple[int, str]]:
    return [(layer, name) for layer in range(2) for name in MODULES]


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_those_of_the_simulation(recipe: str, trtllm_exported: Callable[[str], Exported]) -> None:
    one = trtllm_exported(recipe)
    _, _, algo, scheme = RECIPES[recipe]
    checkpoint = open_checkpoint(one.path)
    quantization = checkpoint.quantization
    assert quantization is not None
    assert json.loads((one.path / "config.json").read_text())["quantization"]["quant_algo"] == algo
    schemes = dict(quantization.schemes)
    assert schemes.keys() == {f"layers.{layer}.{name}" for layer, name in linears()}  # lm_head is float
    assert schemes["layers.1.q"] == scheme
    assert quantization.name == recipe
    assert quantization.producer.startswith("modelopt 0.")
    for layer, name in linears():
        canonical = f"layers.{layer}.{name}.weight"
        got, want = checkpoint.weights.get(canonical), simulated(one, layer, name)
        # Factors of inputs are stored in float16: 2^-11 of each weight.
        tolerance = 2**-11 if schemes[canonical.removesuffix(".weight")].pre_scale else 1e-6
        far = ~np.isclose(got, want, rtol=tolerance, atol=1e-6 * float(np.abs(want).max()))
        # The exporter divides where the simulation multiplies, so a weight between two codes may become either.
        assert np.count_nonzero(far) <= 2
        np.testing.assert_allclose(got[far], want[far], rtol=0.125)


@pytest.mark.parametrize("recipe", ["fp8", "int8_sq", "w4a8_awq"])
def test_inputs_are_those_of_the_calibration(recipe: str, trtllm_exported: Callable[[str], Exported]) -> None:
    one = trtllm_exported(recipe)
    weights: Any = open_checkpoint(one.path).weights
    for layer, name in linears():
        quantizer = one.model.model.layers[layer].get_submodule(MODULES[name]).input_quantizer
        got = weights.quantized_input(f"layers.{layer}.{name}.weight")
        want = float(quantizer.amax.float().max()) / (127.0 if recipe == "int8_sq" else 448.0)
        assert got.scale == pytest.approx(want, rel=1e-6)
        if recipe == "fp8":
            assert got.pre_scale is None
        else:
            np.testing.assert_allclose(got.pre_scale, quantizer.pre_quant_scale.float(), rtol=2**-11)


@pytest.mark.parametrize(("recipe", "kv"), [("fp8", "fp8"), ("int8_sq", "int8"), ("nvfp4", "float")])
def test_scales_of_the_kv_cache(recipe: str, kv: str, trtllm_exported: Callable[[str], Exported]) -> None:
    one = trtllm_exported(recipe)
    checkpoint = open_checkpoint(one.path)
    weights: Any = checkpoint.weights
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.kv == kv
    if kv == "float":
        return
    for layer in range(2):
        attention = one.model.model.layers[layer].self_attn
        want = [
            max(1.0, float(q.amax) / 448.0)
            if kv == "fp8"
            else float(q.amax) / 127.0  # FP8's is at least 1 there
            for q in (attention.k_bmm_quantizer, attention.v_bmm_quantizer)
        ]
        assert weights.kv_scales(layer) == pytest.approx(tuple(want))


def test_older_files_have_one_scale_for_keys_and_values(
    trtllm_exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    out = shutil.copytree(trtllm_exported("int8_sq").path, tmp_path / "t")

    def one_scale(tensors: dict[str, torch.Tensor]) -> None:
        for name in [
            name for name in tensors if name.endswith((".k_cache_scaling_factor", ".v_cache_scaling_factor"))
        ]:
            del tensors[name]
        for name in [name for name in tensors if name.endswith(".kv_cache_scaling_factor")]:
            tensors[name] = torch.tensor([0.25])
            tensors[name.replace("kv_cache_scaling", "kv_cache_rcp_scaling")] = torch.tensor([4.0])

    change_tensors(out, one_scale)
    weights: Any = open_checkpoint(out).weights
    assert weights.kv_scales(1) == (0.25, 0.25)


@pytest.mark.parametrize("recipe", ["int8_wo", "int4_awq"])
def test_graph_gives_the_logits_of_the_simulation(
    recipe: str, trtllm_exported: Callable[[str], Exported]
) -> None:
    """Inputs stay float, so the whole model can be compared; rounded inputs are compared layer by layer elsewhere."""
    one = trtllm_exported(recipe)
    checkpoint = open_checkpoint(one.path)
    assert checkpoint.quantization is not None
    rng = np.random.default_rng(5)
    sequences = [rng.integers(3, VOCAB_SIZE, n).tolist() for n in (40, 9)]
    got = graph_logits(checkpoint, of_checkpoint(checkpoint.quantization, "float32"), sequences)
    model = copy.deepcopy(one.model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or parameter.shape[0] == VOCAB_SIZE:
                parameter.copy_(parameter.half().float())  # exported in float16
        for module in model.modules():
            if getattr(module, "_pre_quant_scale", None) is not None:
                module._pre_quant_scale.copy_(module._pre_quant_scale.half().float())
        for ids, logits in zip(sequences, got, strict=True):
            want = model(torch.tensor([ids])).logits[0].numpy()
            np.testing.assert_allclose(logits, want, atol=2e-5 * float(np.abs(want).max()))


@pytest.mark.parametrize(
    ("recipe", "tp_size", "pp_size"),
    [("fp8", 2, 1), ("int8_sq", 2, 1), ("int8_wo", 1, 2), ("fp8_per_channel", 2, 1), ("int4_awq", 2, 1)],
)
def test_ranks_that_modelopt_made_are_one_model(
    recipe: str, tp_size: int, pp_size: int, trtllm_exported: Callable[[str], Exported]
) -> None:
    one = trtllm_exported(recipe)
    if recipe == "int4_awq":  # groups of 128 do not divide half of 128 inputs
        with pytest.raises(NotImplementedError):
            one.export("ranks", tp_size, pp_size)
        return
    many, whole = open_checkpoint(one.export("ranks", tp_size, pp_size)), open_checkpoint(one.path)
    assert many.quantization == whole.quantization
    assert many.spec == whole.spec
    for name in whole.weights.names():
        np.testing.assert_array_equal(many.weights.get(name), whole.weights.get(name))


def test_fp8_in_older_files_is_stored_as_bytes(
    trtllm_exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    one = trtllm_exported("fp8")
    out = shutil.copytree(one.path, tmp_path / "t")
    change_tensors(
        out,
        lambda t: t.update({k: v.view(torch.int8) for k, v in t.items() if v.dtype == torch.float8_e4m3fn}),
    )
    got, want = open_checkpoint(out).weights, open_checkpoint(one.path).weights
    for name in want.names():
        np.testing.assert_array_equal(got.get(name), want.get(name))


@pytest.mark.parametrize("algo", ["W8A16", "FP8_PER_CHANNEL_PER_TOKEN"])
def test_weights_that_the_builder_was_to_quantize(algo: str, trtllm_llama: Path) -> None:
    """That stack's converter leaves them float and asks its builder to quantize; here --precision asks for that."""
    path = trtllm_llama / "config.json"
    config = json.loads(path.read_text())
    config["quantization"]["quant_algo"] = algo
    path.write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"to be quantized to .* set quant_algo to null .* --precision int8"
    ):
        open_checkpoint(trtllm_llama)


def test_vocabulary_that_was_padded_for_awq(tmp_path: Path) -> None:
    """ModelOpt pads it with rows of zeros and writes the new size down; such a token would have the logit 0."""
    source = make_tiny("llama3", tmp_path / "hf", **SIZES, vocab_size=325)
    model = quantized_model(source, "int4_awq")
    del model.config.rope_parameters["rope_type"]
    one = Exported.__new__(Exported)
    one.source, one.folder, one.model = source, tmp_path, model
    out = one.export("t")
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 384
    checkpoint = open_checkpoint(out)
    assert checkpoint.spec.vocab_size == 325
    table = checkpoint.weights.get("embed.weight")
    assert table.shape == (325, HIDDEN)
    assert table[-1].any()
    assert checkpoint.weights.get("lm_head.weight").shape == (325, HIDDEN)
