"""Reads a checkpoint in the unified Hugging Face form with safetensors and torch alone: an independent second reader.

It follows the published layout: FP8 and INT8 codes with a scale a tensor or an output; INT4 in pairs of outputs, the
low half first, with a scale a group; NVFP4 in pairs of inputs with E4M3 scales a block of 16 and one scale over all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


class Exported:
    """A quantized checkpoint directory.

    tensors : all of them, as stored
    quant : hf_quant_config.json's "quantization"
    """

    def __init__(self, directory: Path) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(str(path), "pt") as file:
                self.tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        self.config = json.loads((directory / "config.json").read_text())
        self.quant = json.loads((directory / "hf_quant_config.json").read_text())["quantization"]

    def algorithm(self, layer: str) -> str | None:
        """Return a layer's quant_algo."""
        if self.quant["quant_algo"] == "MIXED_PRECISION":
            found = self.quant["quantized_layers"].get(layer)
            return None if found is None else found["quant_algo"]
        scaled = f"{layer}.weight_scale" in self.tensors
        return self.quant["quant_algo"] if scaled else None

    def weight(self, layer: str) -> torch.Tensor:
        """Return a layer's weight [N, K] as float32, as its product uses it."""
        stored, kind = self.tensors[f"{layer}.weight"], self.algorithm(layer)
        if kind is None:
            return stored.float()
        scale = self.tensors[f"{layer}.weight_scale"]
        if kind in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "W8A16", "W8A8_SQ_PER_CHANNEL"):
            return stored.float() * (scale.float() if scale.dim() == 0 else scale.float().reshape(-1, 1))
        if kind in ("W4A16_AWQ", "W4A8_AWQ"):
            codes = torch.stack([stored & 15, stored >> 4], 1).flatten(0, 1).to(torch.int8)
            codes = torch.where(codes > 7, codes - 16, codes).float()
            weight = codes * scale.float().repeat_interleave(codes.shape[1] // scale.shape[1], 1)
            return (
                self._fp8(weight, self.tensors[f"{layer}.weight_scale_2"]) if kind == "W4A8_AWQ" else weight
            )
        assert kind in ("NVFP4", "W4A16_NVFP4"), kind
        codes = torch.stack([stored & 15, stored >> 4], 2).flatten(1, 2).long()
        blocks = scale.float() * self.tensors[f"{layer}.weight_scale_2"]
        return E2M1[codes] * blocks.repeat_interleave(16, 1)

    def input(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        """Return an input [..., K] as a layer's product takes it."""
        pre_scale = self.tensors.get(f"{layer}.pre_quant_scale")
        x = x if pre_scale is None else x * pre_scale.float()
        kind, scale = self.algorithm(layer), self.tensors.get(f"{layer}.input_scale")
        if kind in ("FP8", "W4A8_AWQ"):
            return self._fp8(x, scale)
        if kind == "FP8_PER_CHANNEL_PER_TOKEN":
            return self._fp8(x, x.abs().amax(-1, keepdim=True) / 448)
        if kind == "W8A8_SQ_PER_CHANNEL":
            assert scale is not None
            return (x / scale).round().clamp(-128, 127) * scale
        if kind == "NVFP4":
            assert scale is not None
            blocks = x.unflatten(-1, (-1, 16))
            inner = (blocks.abs().amax(-1, keepdim=True) / (6 * scale)).clamp(max=448)
            inner = inner.to(torch.float8_e4m3fn).float() * scale
            scaled = torch.where(inner > 0, blocks / inner, 0.0)
            nearest = (scaled.unsqueeze(-1) - E2M1).abs().argmin(-1)
            return (E2M1[nearest] * inner).flatten(-2)
        return x

    @staticmethod
    def _fp8(x: torch.Tensor, scale: Any) -> torch.Tensor:
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
