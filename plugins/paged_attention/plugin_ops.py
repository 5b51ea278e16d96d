"""The plugin nodes of a TensorRT plan: what each takes and gives, and the one kernel that it launches.

builder/targets/tensorrt/contract.py says what they compute. Nothing here needs TensorRT: dimensions are whatever adds,
multiplies and divides, TensorRT's symbols in a plugin, numbers in a test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..kernel import Constant, Kernel
from ..kv_write import spec as kv_write
from . import spec

NAMESPACE = "plansmith"
VERSION = "1"

LAUNCH_SHARED_BYTES = 48 << 10
"""Shared memory that a launch gets unasked on every GPU; TensorRT does not say whether it asks for more."""

Attribute = int | float
Dim = Any
Shapes = Mapping[str, Sequence[Dim]]
"""Dimensions of a node's inputs by their names."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """What is fixed when a node's kernel is chosen.

    dtype : of activations
    kv : "same", "fp8" or "int8", of the pools
    block_size : BS; of no meaning without pools
    """

    dtype: spec.Dtype
    kv: spec.Kv
    block_size: int
    attributes: Mapping[str, Attribute]
    sm: int

    @property
    def attention(self) -> spec.Attention:
        """The layer as the kernels' descriptions have it."""
        heads, kv_heads, dim = (int(self.attributes[name]) for name in SHAPE)
        return spec.Attention(
            self.dtype, self.kv, heads, kv_heads, dim, bool(self.attributes.get("softcap")), self.sm
        )

    @property
    def reach(self) -> int:
        """Positions that a row sees at most."""
        return int(self.attributes["window"]) or spec.NO_WINDOW


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a launch needs besides the kernel and pointers.

    numbers : the kernel's scalar arguments
    """

    grid: tuple[Dim, Dim, Dim]
    numbers: Mapping[str, Dim]


@dataclasses.dataclass(frozen=True)
class PluginOp:
    """One plugin.

    inputs, outputs : tensors in order; an output of an input's name is written in place
    attributes : name -> int or float
    like : outputs -> the input whose type they have; others are float32
    shapes : (attributes, inputs' shapes) -> the shape of each output that is no input
    kernel : of a layer, all that the layer knows compiled in
    launch : what a layer launches a kernel with, which may have another tile, for inputs of these shapes
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, type]
    kernel: Callable[[Layer], Kernel]
    launch: Callable[[Layer, Kernel, Shapes], Launch]
    like: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shapes: Callable[[Mapping[str, Attribute], Shapes], Mapping[str, tuple[Dim, ...]]] = lambda *_: {}

    def min_rows(self, layer: Layer) -> int:
        """Return the rows that a tile must have: decode's are all of a sequence, prefill's those of one token."""
        group = layer.attention.group
        return spec.power_of_two(group * int(layer.attributes["query_rows"]) if self is DECODE else group)

    def order(self, kernel: Kernel, numbers: Mapping[str, Dim]) -> list[str | None]:
        """Return the kernel's arguments as TensorRT passes them: inputs, numbers, outputs; None = not the kernel's.

        What is written in place comes as an input and as an output: the kernel takes the output.
        """
        inputs = [
            name if name in kernel.signature and name not in self.outputs else None for name in self.inputs
        ]
        return [*inputs, *numbers, *(name if name in kernel.signature else None for name in self.outputs)]


SHAPE = ("num_heads", "kv_num_heads", "head_dim")
_STEP = ("cu_query_lens", "kv_lens", "block_table")
_SCALES = ("k_scale", "v_scale")
_POOLS = ("k_pool", "v_pool")
_SHAPE_TYPES: dict[str, type] = dict.fromkeys(SHAPE, int)
_SCORES: dict[str, type] = {"scale": float, "softcap": float, "window": int}


def _constants(layer: Layer, kernel: Kernel, **values: Constant) -> Kernel:
    """Return a guarded kernel with all that the layer knows compiled in."""
    attention = layer.attention
    known: dict[str, Constant] = {
        **values,
        "group": attention.group,
        "num_kv_heads": attention.kv_num_heads,
        "block_shift": layer.block_size.bit_length() - 1,
    }
    for name in ("scale", "softcap"):
        if name in layer.attributes:
            known[name] = float(layer.attributes[name])
    for name in ("query_rows", "split_len"):
        if name in layer.attributes:
            known[name] = int(layer.attributes[name])
    fitting = {name: value for name, value in known.items() if name in kernel.signature}
    return spec.with_constants(spec.guarded(kernel), "plugin", **fitting)


def _write_of(layer: Layer) -> kv_write.KvWrite:
    heads, kv_heads, dim = (int(layer.attributes[name]) for name in SHAPE)
    return kv_write.KvWrite(layer.dtype, layer.kv, heads, kv_heads, dim)


def _write_kernel(layer: Layer) -> Kernel:
    return _constants(layer, kv_write.kernel(_write_of(layer)))


def _write(layer: Layer, kernel: Kernel, shapes: Shapes) -> Launch:
    numbers = {
        "num_sequences": shapes["kv_lens"][0],
        "table_stride": shapes["block_table"][1],
        "num_blocks": shapes["k_pool"][0],
    }
    return Launch(kv_write.grid(_write_of(layer), shapes["k"][0]), numbers)


def _bounds(shapes: Shapes) -> Mapping[str, Dim]:
    """Return what a guarded kernel is held within."""
    return {"num_tokens": shapes["q"][0], "num_blocks": shapes["k_pool"][0]}


def _splits(attributes: Mapping[str, Attribute], shapes: Shapes) -> Dim:
    """Return S: splits of the longest context that the table can hold."""
    length = int(attributes["split_len"])
    return (shapes["block_table"][1] * shapes["k_pool"][2] + (length - 1)) // length


def _decode_kernel(layer: Layer) -> Kernel:
    rows, length = int(layer.attributes["query_rows"]), int(layer.attributes["split_len"])
    kernel = spec.decode_kernel(layer.attention, rows)
    positions = kernel.constants["N"]
    if length % int(positions or 1):  # a tile must not reach over the end of a split
        raise ValueError(f"split_len {length} is no multiple of the {positions} positions of a tile")
    return _constants(layer, kernel, reach=layer.reach)


def _decode(layer: Layer, kernel: Kernel, shapes: Shapes) -> Launch:
    splits = _splits(layer.attributes, shapes)
    return Launch(
        spec.decode_grid(layer.attention, shapes["kv_lens"][0], splits),
        {"num_splits": splits, "table_stride": shapes["block_table"][1], **_bounds(shapes)},
    )


def _decode_shapes(attributes: Mapping[str, Attribute], shapes: Shapes) -> Mapping[str, tuple[Dim, ...]]:
    heads, dim, batch = int(attributes["num_heads"]), int(attributes["head_dim"]), shapes["kv_lens"][0]
    slots = (batch, int(attributes["query_rows"]), heads, _splits(attributes, shapes))
    return {"out": tuple(shapes["q"]), "partials": (*slots, dim), "stats": (*slots, 2)}


def _combine_kernel(layer: Layer) -> Kernel:
    return _constants(layer, spec.combine_kernel(layer.attention), reach=layer.reach)


def _combine(layer: Layer, kernel: Kernel, shapes: Shapes) -> Launch:
    rows = int(layer.attributes["query_rows"])
    return Launch(
        spec.combine_grid(layer.attention, shapes["kv_lens"][0], rows),
        {"num_splits": shapes["partials"][3], "num_tokens": shapes["out"][0]},
    )


def _prefill_kernel(layer: Layer) -> Kernel:
    return _constants(layer, spec.prefill_kernel(layer.attention), reach=layer.reach)


def _prefill(layer: Layer, kernel: Kernel, shapes: Shapes) -> Launch:
    batch = shapes["kv_lens"][0]
    return Launch(
        spec.prefill_grid(layer.attention, shapes["q"][0], batch, kernel),
        {"table_stride": shapes["block_table"][1], "num_sequences": batch, **_bounds(shapes)},
    )


KV_WRITE = PluginOp(
    name="KvWrite",
    inputs=("k", "v", *_POOLS, *_STEP, *_SCALES),
    outputs=_POOLS,
    attributes=_SHAPE_TYPES,
    kernel=_write_kernel,
    launch=_write,
)
DECODE = PluginOp(
    name="PagedAttentionDecode",
    inputs=("q", *_POOLS, *_STEP, *_SCALES),
    outputs=("out", "partials", "stats"),
    attributes={**_SHAPE_TYPES, **_SCORES, "query_rows": int, "split_len": int},
    kernel=_decode_kernel,
    launch=_decode,
    like={"out": "q"},
    shapes=_decode_shapes,
)
COMBINE = PluginOp(
    name="PagedAttentionCombine",
    inputs=("out", "partials", "stats", "cu_query_lens", "kv_lens", "v_scale"),
    outputs=("out",),
    attributes={**_SHAPE_TYPES, "window": int, "query_rows": int, "split_len": int},
    kernel=_combine_kernel,
    launch=_combine,
)
PREFILL = PluginOp(
    name="PagedAttentionPrefill",
    inputs=("out", "q", *_POOLS, *_STEP, *_SCALES),
    outputs=("out",),
    attributes={**_SHAPE_TYPES, **_SCORES, "query_rows": int},
    kernel=_prefill_kernel,
    launch=_prefill,
)
OPS = (KV_WRITE, DECODE, COMBINE, PREFILL)
