"""Llama-3-8B's shape with random weights, shared by our step and transformers' so that both read the same bytes."""

from __future__ import annotations

import dataclasses

import torch
from bench_device import Device


@dataclasses.dataclass(frozen=True)
class Shape:
    """A decoder's dimensions, and the KV block size of our pools."""

    hidden: int = 4096
    intermediate: int = 14336
    num_layers: int = 32
    num_heads: int = 32
    kv_num_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 128256
    theta: float = 500000.0
    eps: float = 1e-5
    block_size: int = 64

    @property
    def qkv_width(self) -> int:
        """Return the columns of q, k and v together."""
        return (self.num_heads + 2 * self.kv_num_heads) * self.head_dim


LLAMA_3_8B = Shape()
SMALL = Shape(
    hidden=256,
    intermediate=512,
    num_layers=2,
    num_heads=8,
    kv_num_heads=2,
    head_dim=32,
    vocab_size=1000,
    block_size=16,
)


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's weights, all [out, in] as transformers holds them: qkv and gate_up are one matrix each."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Weights:
    """A model's weights."""

    embedding: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    head: torch.Tensor


def random_weights(device: Device, shape: Shape, dtype: torch.dtype) -> Weights:
    """Return normal weights over the root of the columns summed, so that products keep their input's size."""

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return device.normal(rows, columns, dtype=dtype, scale=columns**-0.5)

    def norm() -> torch.Tensor:
        return device.normal(shape.hidden, scale=0.1).add_(1.0).to(dtype)

    heads_width = shape.num_heads * shape.head_dim
    layers = [
        Layer(
            norm(),
            matrix(shape.qkv_width, shape.hidden),
            matrix(shape.hidden, heads_width),
            norm(),
            matrix(2 * shape.intermediate, shape.hidden),
            matrix(shape.hidden, shape.intermediate),
        )
        for _ in range(shape.num_layers)
    ]
    embedding = device.normal(shape.vocab_size, shape.hidden, dtype=dtype)
    return Weights(embedding, layers, norm(), matrix(shape.vocab_size, shape.hidden))


@dataclasses.dataclass(frozen=True)
class DecodeInputs:
    """A decode step of B sequences that hold `context` positions after it, the step's own token included."""

    input_ids: torch.Tensor  # (B,) int32
    context: int
    block_table: torch.Tensor  # (B, MB) int32: blocks in random order, as after much serving

    @property
    def batch(self) -> int:
        """Return B."""
        return self.input_ids.shape[0]


def decode_inputs(device: Device, shape: Shape, batch: int, context: int) -> DecodeInputs:
    """Return random tokens over a pool with just the blocks that they need."""
    num_blocks = -(-context // shape.block_size)
    table = device.permutation(batch * num_blocks).view(batch, num_blocks)
    return DecodeInputs(device.integers(0, shape.vocab_size, batch), context, table)


def rotary_tables(device: Device, shape: Shape, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin (positions, D/2) float32."""
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float64, device=device.name) / shape.head_dim
    angles = (
        torch.arange(positions, dtype=torch.float64, device=device.name)[:, None] * shape.theta**-exponent
    )
    return angles.cos().float(), angles.sin().float()
