"""Tiny quantized models, and the TensorRT-LLM checkpoints that ModelOpt exports of them."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from plansmith.builder.scheme import ROW, WHOLE, Scheme
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE

HIDDEN = 128
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 256, "num_hidden_layers": 2}
MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
MIXED = [
    {"quantizer_name": "*mlp*weight_quantizer", "cfg": {"num_bits": 8, "axis": 0}},
    {"quantizer_name": "*mlp*input_quantizer", "enable": False},
]
KV = {
    "fp8": [
        {"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}, "enable": True}
    ],
    "int8": [{"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": 8, "axis": None}, "enable": True}],
}
AWQ = Scheme("int4", 128, pre_scale=True)
W4A8 = Scheme("int4", 128, input="fp8", input_group=WHOLE, pre_scale=True, fp8_grid=True)
# name -> (ModelOpt's configuration, additions to it, quant_algo, scheme of q)
RECIPES: dict[str, tuple[str, list[Any], str | None, Scheme | None]] = {
    "fp8": ("FP8_DEFAULT_CFG", KV["fp8"], "FP8", Scheme("fp8", WHOLE, input="fp8", input_group=WHOLE)),
    "fp8_per_channel": (
        "FP8_PER_CHANNEL_PER_TOKEN_CFG",
        [],
        "FP8_PER_CHANNEL_PER_TOKEN",
        Scheme("fp8", ROW, input="fp8", input_group=ROW),
    ),
    "int8_sq": (
        "INT8_SMOOTHQUANT_CFG",
        KV["int8"],
        "W8A8_SQ_PER_CHANNEL",
        Scheme("int8", ROW, input="int8", input_group=WHOLE, pre_scale=True),
    ),
    "int8_wo": ("INT8_WEIGHT_ONLY_CFG", [], "W8A16", Scheme("int8", ROW)),
    "int4_awq": ("INT4_AWQ_CFG", [], "W4A16_AWQ", AWQ),
    "w4a8_awq": ("W4A8_AWQ_BETA_CFG", [], "W4A8_AWQ", W4A8),
    "nvfp4": ("NVFP4_DEFAULT_CFG", [], "NVFP4", Scheme("fp4", 16, input="fp4")),
    "mixed": (
        "FP8_DEFAULT_CFG",
        MIXED,
        "MIXED_PRECISION",
        Scheme("fp8", WHOLE, input="fp8", input_group=WHOLE),
    ),
}


class Exported:
    """One recipe: the model that simulates it, and the directories that ModelOpt wrote, with the tokenizer beside."""

    def __init__(self, source: Path, folder: Path, recipe: str) -> None:
        self.source, self.folder = source, folder
        self.model = quantized_model(source, recipe)
        self.path = self.export("one")

    def export(self, name: str, tp_size: int = 1, pp_size: int = 1) -> Path:
        from modelopt.torch.export import export_tensorrt_llm_checkpoint

        out = self.folder / name
        export_tensorrt_llm_checkpoint(
            self.model,
            "llama",
            torch.float16,
            out,
            inference_tensor_parallel=tp_size,
            inference_pipeline_parallel=pp_size,
        )
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(self.source / file, out)
        return out


def quantized_model(source: Path, recipe: str) -> Any:
    import modelopt.torch.quantization as mtq
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    # transformers 5 holds it in rope_parameters, where this exporter does not look.
    model.config.rope_theta = model.config.rope_parameters["rope_theta"]
    name, additions, _, _ = RECIPES[recipe]
    config = copy.deepcopy(getattr(mtq, name))
    config["quant_cfg"] = [*config["quant_cfg"], *additions]
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(3, VOCAB_SIZE, (1, 24), generator=generator) for _ in range(2)]
    mtq.quantize(model, config, lambda m: [m(batch) for batch in batches])
    return model


def change_tensors(out: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Rewrite rank 0 of a directory."""
    tensors = load_file(out / "rank0.safetensors")
    change(tensors)
    save_file(tensors, out / "rank0.safetensors")
