"""The field "kernels" of the plugin library (plugin.h): a layer's kernels, how they are launched, and their workspace.

    plansmith-kernels 1
    workspace NAME FORMULA                                    bytes
    kernel NAME SYMBOL THREADS SHARED ARGUMENTS IMAGE_BYTES
    FORMULA, three lines                                      the grid
    pointer NAME | number FORMULA                             a line each argument, in the kernel's order
    image

Lines end in a newline; an image is IMAGE_BYTES bytes. A formula is of T, B, MB and NB, in reverse Polish notation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..aot import compile_kernels
from .plugin_ops import OPS, SHAPE, Attribute, Layer

MAGIC = "plansmith-kernels 1"


class Formula:
    """A number in terms of a step's dimensions, as text."""

    def __init__(self, text: str | int) -> None:
        self.text = str(text)

    def _with(self, other: Formula | int, operator: str) -> Formula:
        second = other.text if isinstance(other, Formula) else str(other)
        return Formula(f"{self.text} {second} {operator}")

    def __add__(self, other: Formula | int) -> Formula:
        return self._with(other, "+")

    def __mul__(self, other: Formula | int) -> Formula:
        return self._with(other, "*")

    def __floordiv__(self, other: Formula | int) -> Formula:
        return self._with(other, "/")


def kernels_field(
    attributes: Mapping[str, Attribute], dtype: Any, kv: Any, block_size: int, sm: int, max_seq_len: int
) -> bytes:
    """Return the field for a layer's PagedAttention, its kernels compiled for one GPU.

    attributes : of the op (builder/graph/contract.py), with query_rows and split_len (builder/targets/tensorrt)
    dtype, kv : "fp16" or "bf16" of activations; "same", "fp8" or "int8" of the pools
    block_size : BS
    sm : e.g. 90
    max_seq_len : a sequence's positions at most; the kernel that puts splits together is left out where one holds all
    raises : what compile_kernels raises
    """
    tensors = _tensors(attributes, block_size)
    lines: list[bytes] = [f"{MAGIC}\n".encode()]
    kernels = []
    for op in OPS:
        if op.name.endswith("Combine") and max_seq_len <= int(attributes["split_len"]):
            continue
        own = {name: kind(attributes[name]) for name, kind in op.attributes.items()}
        layer = Layer(dtype, kv, block_size, own, sm)
        shapes = {name: tensors[name] for name in op.inputs}
        for name, shape in op.shapes(own, shapes).items():
            tensors[name] = tuple(one if isinstance(one, Formula) else Formula(one) for one in shape)
            if name not in op.like:
                size = math.prod(tensors[name][1:], start=tensors[name][0]) * 4
                lines.append(f"workspace {name} {size.text}\n".encode())
        kernel = op.kernel(layer)
        kernels.append((op.name, kernel, op.launch(layer, kernel, shapes)))
    for (name, kernel, launch), made in zip(
        kernels, compile_kernels([k for _, k, _ in kernels], [sm]), strict=True
    ):
        head = f"kernel {name} {made.symbol} {32 * made.num_warps} {made.shared_bytes} "
        lines.append(f"{head}{len(kernel.signature)} {len(made.cubin)}\n".encode())
        arguments = [
            f"number {_text(launch.numbers[one])}" if one in launch.numbers else f"pointer {one}"
            for one in kernel.signature
        ]
        lines += [f"{line}\n".encode() for line in (*map(_text, launch.grid), *arguments)]
        lines.append(made.cubin)
    return b"".join(lines)


def _text(number: Any) -> str:
    return number.text if isinstance(number, Formula) else str(number)


def _tensors(attributes: Mapping[str, Attribute], block_size: int) -> dict[str, tuple[Any, ...]]:
    """Return the shapes of the op's inputs."""
    heads, kv_heads, dim = (int(attributes[name]) for name in SHAPE)
    tokens, batch, table = Formula("T"), Formula("B"), Formula("MB")
    pool = (Formula("NB"), kv_heads, block_size, dim)
    return {
        "q": (tokens, heads * dim),
        "k": (tokens, kv_heads * dim),
        "v": (tokens, kv_heads * dim),
        "k_pool": pool,
        "v_pool": pool,
        "cu_query_lens": (batch + 1,),
        "kv_lens": (batch,),
        "block_table": (batch, table),
        "k_scale": (),
        "v_scale": (),
    }
