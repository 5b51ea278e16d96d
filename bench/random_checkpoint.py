"""A checkpoint of a known model's shape with random weights: what a size costs in time and memory needs no training.

    python bench/random_checkpoint.py --shape llama1b --output build/llama1b --tokenizer demo/smollm2

Weights are normal with a deviation of 0.02, norms are 1, so activations stay finite at every precision; texts mean
nothing. Written as bfloat16 safetensors, as such models are published; seeded, so two runs write the same bytes. One
tensor after another is made, so memory holds the largest alone. The tokenizer is another model's and may know fewer
tokens than the embedding has rows.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
import numpy.typing as npt

# Fields of config.json, those of a Llama.
SHAPES: dict[str, dict[str, Any]] = {
    # Llama 3.2 1B: 1.24 billion parameters.
    "llama1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    # Few layers and a large vocabulary, many layers and a small one: what a compile's memory depends on.
    "wide": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 131072,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "deep": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 50000,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    # Every dimension as small as kernels take it: for tests.
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
}
DEVIATION = 0.02
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def tensors(shape: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the dimensions of every tensor of a Llama."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    yield "model.embed_tokens.weight", (shape["vocab_size"], hidden)
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "self_attn.q_proj.weight", (queries, hidden)
        yield prefix + "self_attn.k_proj.weight", (keys, hidden)
        yield prefix + "self_attn.v_proj.weight", (keys, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, queries)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "mlp.gate_proj.weight", (inner, hidden)
        yield prefix + "mlp.up_proj.weight", (inner, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not shape["tie_word_embeddings"]:
        yield "lm_head.weight", (shape["vocab_size"], hidden)


def bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of finite float32 values rounded to bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _header(shape: dict[str, Any]) -> bytes:
    """Return what begins a safetensors file: the length of a JSON object in 8 bytes, and the object."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dims in tensors(shape):
        begin, end = end, end + 2 * int(np.prod(dims))
        described[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [begin, end]}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_weights(path: Path, shape: dict[str, Any], seed: int) -> None:
    """Write the weights to a safetensors file: norms of 1, the rest normal."""
    random = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(_header(shape))
        for _, dims in tensors(shape):
            values = (
                np.ones(dims, np.float32)
                if len(dims) == 1
                else random.standard_normal(dims, np.float32) * np.float32(DEVIATION)
            )
            file.write(bfloat16(values).tobytes())


def write_checkpoint(output: Path, shape_name: str, tokenizer: Path, seed: int = 0) -> None:
    """Write the checkpoint to the folder `output`; config.json comes last, so a folder that has it is whole.

    shape_name : one of SHAPES
    tokenizer : a checkpoint's folder; its tokenizer, and the ids of its special tokens where config.json has them
    """
    shape = SHAPES[shape_name]
    output.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, output / name)
    write_weights(output / "model.safetensors", shape, seed)
    other = tokenizer / "config.json"
    known = json.loads(other.read_text()) if other.exists() else {}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "bfloat16",
        **shape,
        **{key: known[key] for key in SPECIAL_IDS if known.get(key) is not None},
    }
    (output / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Let a benchmark take checkpoints that are there, and shapes of random ones; see chosen."""
    parser.add_argument("--checkpoint", type=Path, action="append", default=[])
    parser.add_argument("--shape", action="append", default=[], choices=sorted(SHAPES))
    parser.add_argument("--work", type=Path, default=common.ROOT / "build" / "bench-shapes")


def chosen(args: argparse.Namespace) -> list[Path]:
    """Return the checkpoints that add_arguments' options name; random ones are written where they are not there."""
    folders = [args.work / name for name in args.shape]
    for name, folder in zip(args.shape, folders, strict=True):
        if not (folder / "config.json").exists():
            write_checkpoint(folder, name, common.demo_checkpoint())
    return [*args.checkpoint, *folders]


def main() -> None:
    """Parse the command line and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama1b")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="a checkpoint's folder: its tokenizer is copied"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not (args.tokenizer / "tokenizer.json").exists():
        parser.error(
            f"--tokenizer {args.tokenizer}: no tokenizer.json there; give the folder of a checkpoint"
        )
    if args.seed < 0:
        parser.error(f"--seed {args.seed}: at least 0")
    write_checkpoint(args.output, args.shape, args.tokenizer, args.seed)
    size = (args.output / "model.safetensors").stat().st_size
    print(f"{args.output}: {args.shape}, {size / 2e9:.2f} billion parameters")


if __name__ == "__main__":
    main()
