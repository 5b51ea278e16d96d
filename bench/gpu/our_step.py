"""The decode step of our kernels: kv_write with rope, paged attention, sampling, cuBLAS through torch between them.

All memory is made in advance, so that a step is kernel launches alone and can be captured in a CUDA graph.
"""

from __future__ import annotations

import ops
import torch
from bench_device import Device
from llama_shape import DecodeInputs, Layer, Shape, Weights, rotary_tables
from step_kernels import add_rms_norm, silu_mul


class OurStep:
    """A decode step over paged pools; `fill` gives them what another cache holds."""

    def __init__(
        self, device: Device, shape: Shape, weights: Weights, inputs: DecodeInputs, dtype: torch.dtype
    ) -> None:
        """Make pools of just the blocks that `inputs` needs, and every buffer of a step."""
        self.shape, self.weights, self.inputs = shape, weights, inputs
        batch, context = inputs.batch, inputs.context

        def empty(*sizes: int, of: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(sizes, dtype=of, device=device.name)

        pool = (inputs.block_table.numel(), shape.kv_num_heads, shape.block_size, shape.head_dim)
        self.k_pools = [empty(*pool) for _ in range(shape.num_layers)]
        self.v_pools = [empty(*pool) for _ in range(shape.num_layers)]
        self.tables = rotary_tables(device, shape, context)
        self.residual, self.normed = empty(batch, shape.hidden), empty(batch, shape.hidden)
        self.zeros = torch.zeros(batch, shape.hidden, dtype=dtype, device=device.name)
        self.attended = empty(batch, shape.num_heads * shape.head_dim)
        self.gate_up, self.gated = empty(batch, 2 * shape.intermediate), empty(batch, shape.intermediate)
        self.logits_out = empty(batch, shape.vocab_size, of=torch.float32)
        self.attention = ops.DecodeAttention(device, shape, inputs, dtype)
        self.sampler = ops.GreedySampler(device, batch, shape.vocab_size)

    def fill(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put keys and values (B, KVH, context, D) of a layer into the pools' scattered blocks."""
        size, table = self.shape.block_size, self.inputs.block_table
        num_blocks = table.shape[1]
        for pools, rows in ((self.k_pools, keys), (self.v_pools, values)):
            pool = pools[layer_idx]
            for n in range(num_blocks):
                block = rows[:, :, n * size : (n + 1) * size]
                pool[table[:, n].long(), :, : block.shape[2]] = block

    def logits(self) -> torch.Tensor:
        """Return the step's logits (B, V) float32, which the next step overwrites."""
        self.residual.copy_(torch.nn.functional.embedding(self.inputs.input_ids, self.weights.embedding))
        update = self.zeros
        for idx, layer in enumerate(self.weights.layers):
            add_rms_norm(update, self.residual, layer.attention_norm, self.normed, self.shape.eps)
            self._attend(idx, layer)
            update = self.attended @ layer.out.T
            add_rms_norm(update, self.residual, layer.mlp_norm, self.normed, self.shape.eps)
            torch.mm(self.normed, layer.gate_up.T, out=self.gate_up)
            silu_mul(self.gate_up, self.gated)
            update = self.gated @ layer.down.T
        add_rms_norm(update, self.residual, self.weights.norm, self.normed, self.shape.eps)
        self.logits_out.copy_(self.normed @ self.weights.head.T)
        return self.logits_out

    def _attend(self, idx: int, layer: Layer) -> None:
        """Project, write K and V into the pools, attend: `attended` from `normed`."""
        qkv = self.normed @ layer.qkv.T
        self.attention.attend(qkv, self.tables, self.k_pools[idx], self.v_pools[idx], self.attended)

    def step(self) -> torch.Tensor:
        """Return the greedy tokens (B,) int32 of the step."""
        return self.sampler.draw(self.logits())
