"""The small kernels between a decode step's matrix products: the norm with the residual's sum, and SiLU times up.

T tokens, E hidden, I intermediate. Both are limited by bytes: each reads its inputs once and writes its outputs once.
A plan's compiler makes such kernels itself; the benchmark's step has no compiler, so it brings its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_rms_norm(x, residual, weight, out, eps, E: tl.constexpr, BLOCK: tl.constexpr):
    """Add x to the residual, rounded as transformers rounds it; out = residual / rms(residual) * weight."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < E
    at = row * E + column
    # A sum or product in float32 that is rounded once more is what the narrow type's own operation gives: 24 bits are
    # more than twice 11.
    held = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    added = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    total = (held + added).to(out.dtype.element_ty)
    tl.store(residual + at, total, mask=inside)
    wide = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide) / E + eps)
    # Rounded before the weight, as transformers' LlamaRMSNorm does.
    normed = (wide * scale).to(out.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (normed * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write silu(gate) * up, where a row of gate_up is gate's WIDTH columns and then up's."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + column, (silu * up).to(out.dtype.element_ty), mask=inside)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> None:
    """Add x (T, E) to `residual` in place; write its norm times weight (E,) to out (T, E). All of one type."""
    num_tokens, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    _add_rms_norm[(num_tokens,)](x, residual, weight, out, eps, E=hidden, BLOCK=block, num_warps=8)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Write silu(gate) * up to out (T, I); gate_up (T, 2 * I), of the same type."""
    num_tokens, intermediate = out.shape
    block = min(1024, triton.next_power_of_2(intermediate))
    grid = (num_tokens, triton.cdiv(intermediate, block))
    _silu_mul[grid](gate_up, out, WIDTH=intermediate, BLOCK=block, num_warps=4)


@triton.jit
def _split_columns(qkv, q, k, v, Q: tl.constexpr, KV: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a block of one row of qkv to where it belongs; Q and KV are multiples of BLOCK."""
    row = tl.program_id(0)
    begin = tl.program_id(1) * BLOCK
    column = tl.arange(0, BLOCK)
    held = tl.load(qkv + row * (Q + 2 * KV) + begin + column)
    if begin < Q:
        tl.store(q + row * Q + begin + column, held)
    elif begin < Q + KV:
        tl.store(k + row * KV + begin - Q + column, held)
    else:
        tl.store(v + row * KV + begin - Q - KV + column, held)


def split_columns(qkv: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Copy qkv (T, Q + 2 * KV), one product's result, to q (T, Q), k and v (T, KV), which are contiguous."""
    block = 1024
    while q.shape[1] % block or k.shape[1] % block:
        block //= 2
    grid = (qkv.shape[0], qkv.shape[1] // block)
    _split_columns[grid](qkv, q, k, v, Q=q.shape[1], KV=k.shape[1], BLOCK=block, num_warps=4)
