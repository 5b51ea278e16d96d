"""Our kernels as the decode step calls them: buffers made once, so that a step is launches alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from bench_device import Device
from llama_shape import DecodeInputs, Shape
from plansmith.plugins.kv_write import spec as kv_spec
from plansmith.plugins.kv_write.run import kv_write
from plansmith.plugins.paged_attention import run as attention_run
from plansmith.plugins.paged_attention import spec as attention_spec
from plansmith.plugins.sampling import run as sampling_run
from plansmith.plugins.sampling import spec as sampling_spec
from sampling_problem import ROW
from step_kernels import split_columns

NAMES: dict[torch.dtype, Any] = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class DecodeAttention:
    """kv_write with rope, then paged attention, for one new token of each sequence; pools are each layer's own."""

    def __init__(self, device: Device, shape: Shape, inputs: DecodeInputs, dtype: torch.dtype) -> None:
        """Choose splits as an engine would, and make what all layers share."""
        name, batch, context = NAMES[dtype], inputs.batch, inputs.context
        heads = (shape.num_heads, shape.kv_num_heads, shape.head_dim)
        self.attention = attention_spec.Attention(name, "same", *heads, sm=device.sm())
        self.write_spec = kv_spec.KvWrite(name, "same", *heads, rotary_dim=shape.head_dim)
        self.table, self.scale = inputs.block_table, shape.head_dim**-0.5
        self.split_len = attention_spec.split_len(self.attention, batch, context)
        splits = attention_spec.num_splits(self.table.shape[1], shape.block_size, self.split_len)
        self.workspace = attention_run.allocate(self.attention, batch, 1, splits, device.name)
        self.positions = torch.full((batch,), context - 1, dtype=torch.int32, device=device.name)
        self.kv_lens = torch.full((batch,), context, dtype=torch.int32, device=device.name)
        self.cu_query_lens = torch.arange(batch + 1, dtype=torch.int32, device=device.name)
        widths = (shape.num_heads, shape.kv_num_heads, shape.kv_num_heads)
        self.q, self.k, self.v = (
            torch.empty(batch, width * shape.head_dim, dtype=dtype, device=device.name) for width in widths
        )

    def attend(
        self,
        qkv: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write K and V of qkv (B, (H + 2 KVH) * D) into the pools and attention's result to out (B, H*D)."""
        split_columns(qkv, self.q, self.k, self.v)
        step = (self.cu_query_lens, self.kv_lens, self.table)
        cos, sin = tables
        kv_write(
            self.write_spec, self.k, self.v, k_pool, v_pool, *step,
            q=self.q, cos=cos, sin=sin, position_ids=self.positions,
        )  # fmt: skip
        attention_run.paged_attention(
            self.attention, self.q, k_pool, v_pool, *step, out,
            scale=self.scale, split_len=self.split_len, workspace=self.workspace, has_prefill=False,
        )  # fmt: skip


class GreedySampler:
    """Sampling's kernels for rows without a temperature."""

    def __init__(self, device: Device, num_rows: int, vocab_size: int) -> None:
        """Make the rows' parameters and the workspace."""
        rows = np.zeros(num_rows, ROW)
        rows["top_p"], rows["mask_idx"] = 1.0, -1
        self.rows = torch.from_numpy(rows.view(np.int32).reshape(num_rows, -1).copy()).to(device.name)
        words = -(-vocab_size // 32)
        self.edits, self.masks = (
            torch.zeros(1, width, dtype=torch.int32, device=device.name) for width in (4, words)
        )
        self.samples = torch.zeros(
            num_rows, sampling_spec.SAMPLE_WORDS, dtype=torch.int32, device=device.name
        )
        self.workspace = sampling_run.make_workspace(num_rows, vocab_size, device.name)

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the best token of each row (R,) int32, which the next call overwrites."""
        sampling_run.sample(
            logits, self.rows, self.edits, self.masks, self.samples, self.workspace,
            sampled=False, filtered=False, logprobs=False,
        )  # fmt: skip
        return self.samples[:, 0]
