"""Every family against transformers: weights, rope, and logits of a plain numpy decoder that knows only the spec."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from plansmith.builder.checkpoint import Checkpoint, open_checkpoint
from plansmith.builder.spec import DecoderSpec, RopeSpec, weight_shapes
from tiny_models import FAMILIES, make_tiny

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TinyCheckpoint = Callable[[str], Path]
PROMPT = [int(i) for i in np.random.default_rng(7).integers(3, 320, 40)]


def hf_model(path: Path, **kwargs: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", **kwargs)


# The decoder of DecoderSpec's docstring, in float64 but for the rotary angles, which transformers has in float32.


def rmsnorm(x: np.ndarray, w: np.ndarray, spec: DecoderSpec) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + spec.norm_eps) * (w + spec.norm_offset)


def rotate(x: np.ndarray, rope: RopeSpec) -> np.ndarray:
    """(T, heads, D), the first rotary_dim columns as two halves."""
    angle = (np.arange(len(x), dtype=np.float32)[:, None] * np.float32(rope.inv_freq)).astype(np.float64)
    cos, sin = (np.tile(f(angle), 2)[:, None] * rope.mscale for f in (np.cos, np.sin))
    part, rest = x[..., : rope.rotary_dim], x[..., rope.rotary_dim :]
    half = rope.rotary_dim // 2
    turned = np.concatenate([-part[..., half:], part[..., :half]], -1)
    return np.concatenate([part * cos + turned * sin, rest], -1)


def activate(x: np.ndarray, spec: DecoderSpec) -> np.ndarray:
    if spec.activation == "silu":
        return x / (1 + np.exp(-x))
    assert spec.activation == "gelu_tanh"
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softcap(x: np.ndarray, cap: float) -> np.ndarray:
    return cap * np.tanh(x / cap) if cap else x


def numpy_logits(checkpoint: Checkpoint, ids: list[int]) -> np.ndarray:
    spec, weights = checkpoint.spec, checkpoint.weights
    shapes = weight_shapes(spec)

    def get(name: str) -> np.ndarray:
        return weights.get(name).astype(np.float64)

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        bias = get(f"{name}.bias") if f"{name}.bias" in shapes else 0.0
        return x @ get(f"{name}.weight").T + bias

    def heads(x: np.ndarray) -> np.ndarray:
        return x.reshape(len(ids), -1, spec.head_dim)

    x = get("embed.weight")[ids] * spec.embed_scale
    distance = np.arange(len(ids))[:, None] - np.arange(len(ids))[None]
    for n, layer in enumerate(spec.layers):
        p = f"layers.{n}."
        h = rmsnorm(x, get(p + "attn_norm.weight"), spec)
        q, k, v = (heads(linear(h, p + name)) for name in "qkv")
        if spec.qk_norm:
            q, k = (rmsnorm(t, get(p + w), spec) for t, w in ((q, "q_norm.weight"), (k, "k_norm.weight")))
        if layer.rope_idx >= 0:
            q, k = (rotate(t, spec.ropes[layer.rope_idx]) for t in (q, k))
        k, v = (np.repeat(t, spec.num_heads // spec.num_kv_heads, axis=1) for t in (k, v))
        scores = softcap(np.einsum("qhd,khd->hqk", q, k) * spec.attn_scale, spec.attn_softcap)
        visible = (distance >= 0) & (distance < (layer.window or len(ids)))
        scores = np.where(visible, scores, -np.inf)
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        a = linear(np.einsum("hqk,khd->qhd", probs, v).reshape(len(ids), -1), p + "o")
        x = x + (rmsnorm(a, get(p + "post_attn_norm.weight"), spec) if spec.post_norms else a)
        h = rmsnorm(x, get(p + "mlp_norm.weight"), spec)
        m = linear(activate(linear(h, p + "gate"), spec) * linear(h, p + "up"), p + "down")
        x = x + (rmsnorm(m, get(p + "post_mlp_norm.weight"), spec) if spec.post_norms else m)
    x = rmsnorm(x, get("final_norm.weight"), spec)
    head = get("embed.weight" if spec.tie_embeddings else "lm_head.weight")
    return softcap(x @ head.T, spec.final_softcap)


def assert_same_logits(checkpoint: Checkpoint, path: Path, ids: list[int]) -> None:
    with torch.no_grad():
        want = hf_model(path)(torch.tensor([ids])).logits[0].double().numpy()
    got = numpy_logits(checkpoint, ids)
    assert want.std() > 0.5  # a model that says nothing proves nothing
    np.testing.assert_allclose(got, want, atol=2e-4)  # float32 rounding of transformers over 4 layers


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tiny_checkpoint: TinyCheckpoint) -> None:
    path = tiny_checkpoint(family)
    assert_same_logits(open_checkpoint(path), path, PROMPT)


def test_longrope_takes_the_long_factors_for_a_long_engine(tiny_checkpoint: TinyCheckpoint) -> None:
    path = tiny_checkpoint("phi3_longrope")  # trained on 64 positions, 256 with the long factors
    long = open_checkpoint(path, max_seq_len=256)
    ids = [int(i) for i in np.random.default_rng(8).integers(3, 320, 80)]
    assert_same_logits(long, path, ids)
    assert long.spec.max_position_embeddings == 256
    for max_seq_len in (None, 64):
        short = open_checkpoint(path, max_seq_len)
        assert short.spec.max_position_embeddings == 64
        assert short.spec.ropes[0].inv_freq != long.spec.ropes[0].inv_freq
        assert short.spec.ropes[0].mscale == long.spec.ropes[0].mscale > 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_equal_transformers(family: str, tiny_checkpoint: TinyCheckpoint) -> None:
    path = tiny_checkpoint(family)
    checkpoint, state = open_checkpoint(path), hf_model(path).state_dict()
    used = 0
    for name in checkpoint.weights.names():
        value = checkpoint.weights.get(name)
        assert value.shape == checkpoint.weights.shape(name) == weight_shapes(checkpoint.spec)[name]
        assert value.dtype == np.float32 and not value.flags.writeable and value.flags.c_contiguous
        used += value.size
    total = sum(
        t.numel() for n, t in state.items() if n != "lm_head.weight" or not checkpoint.spec.tie_embeddings
    )
    assert (
        used == total == checkpoint.describe()["num_parameters"]
    )  # with the logits above: each is in its place


def test_fused_slices_are_views(tiny_checkpoint: TinyCheckpoint) -> None:
    path = tiny_checkpoint("phi3")
    checkpoint, state = open_checkpoint(path), hf_model(path).state_dict()
    spec, w = checkpoint.spec, checkpoint.weights
    qkv = np.concatenate([w.get(f"layers.1.{name}.weight") for name in "qkv"])
    np.testing.assert_array_equal(qkv, state["model.layers.1.self_attn.qkv_proj.weight"].numpy())
    gate_up = np.concatenate([w.get("layers.1.gate.weight"), w.get("layers.1.up.weight")])
    np.testing.assert_array_equal(gate_up, state["model.layers.1.mlp.gate_up_proj.weight"].numpy())
    assert not w.get("layers.1.k.weight").flags.owndata
    assert w.get("layers.1.k.weight").shape == (spec.kv_width, spec.hidden_size)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_kept_as_stored(dtype: str, tmp_path: Path) -> None:
    path = make_tiny("qwen3", tmp_path / "m", dtype=dtype)
    checkpoint, state = open_checkpoint(path), hf_model(path, dtype=getattr(torch, dtype)).state_dict()
    got = checkpoint.weights.get("layers.0.down.weight")
    assert checkpoint.spec.dtype == dtype == got.dtype.name == checkpoint.describe()["dtype"]
    assert got.dtype in (np.float16, ml_dtypes.bfloat16)
    want = state["model.layers.0.mlp.down_proj.weight"].float().numpy()
    np.testing.assert_array_equal(got.astype(np.float32), want)


def test_spec_values(tiny_checkpoint: TinyCheckpoint) -> None:
    specs = {family: open_checkpoint(tiny_checkpoint(family)).spec for family in FAMILIES}
    for family, spec in specs.items():
        assert len(spec.layers) == spec.num_layers and spec.vocab_size == 320, family
        assert (spec.bos_token_id, spec.eos_token_ids, spec.pad_token_id) == (1, (2,), 0), family
    llama = specs["llama"]
    assert llama.qkv_bias and llama.o_bias and llama.mlp_bias and not llama.tie_embeddings
    assert (llama.head_dim, llama.num_heads, llama.num_kv_heads) == (32, 4, 2) and llama.norm_eps == 1e-5
    assert [layer.window for layer in specs["mistral"].layers] == [8, 8]
    assert [layer.window for layer in specs["qwen2"].layers] == [0, 0, 8, 8]
    assert specs["qwen2"].qkv_bias and not specs["qwen2"].o_bias
    assert specs["qwen3"].qk_norm and not specs["qwen3"].qkv_bias and specs["qwen3"].tie_embeddings
    gemma2 = specs["gemma2"]
    assert [layer.window for layer in gemma2.layers] == [8, 0, 8, 0]
    assert (gemma2.attn_softcap, gemma2.final_softcap, gemma2.norm_offset, gemma2.embed_scale) == (3, 5, 1, 8)
    assert gemma2.attn_scale == 24**-0.5 and gemma2.post_norms and gemma2.activation == "gelu_tanh"
    gemma3 = specs["gemma3"]
    assert [(layer.window, layer.rope_idx) for layer in gemma3.layers] == [(8, 1), (8, 1), (0, 0), (8, 1)]
    assert [rope.kind for rope in gemma3.ropes] == ["linear", "default"] and gemma3.qk_norm
    assert specs["phi3"].ropes[0].rotary_dim == 12 and specs["phi3"].head_dim == 16
