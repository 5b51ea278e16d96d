"""The tensors of a program, each once however many ops use it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from . import packing
from .constants import initializer_array
from .plan_file import DType, Layout, Tensor
from .weight_tensors import packed_tensor, vector_tensor
from .weights import Weight

Array = npt.NDArray[Any]


@dataclasses.dataclass
class _Matrix:
    """Weights under one another."""

    parts: list[Weight]
    group_size: int
    in_product: bool

    def tensor(self, name: str) -> Tensor:
        """Return the tensor; floats that no product reads are row-major, a row for each token id."""
        dtype = self.parts[0].dtype
        plain = not self.in_product and dtype in (DType.F32, DType.BF16, DType.F16)
        layout = Layout.ROW_MAJOR if plain else packing.PACKED[dtype]
        return packed_tensor(name, self.parts, layout, self.group_size)


@dataclasses.dataclass
class _Vector:
    """A float32 vector or table."""

    rows: int
    cols: int
    fetch: Callable[[], Array]

    def tensor(self, name: str) -> Tensor:
        """Return the tensor, row-major."""
        return vector_tensor(name, self.rows, self.cols, self.fetch)


class TensorPool:
    """Collects tensors in the order of their first use. A tied table is one tensor, packed for the product."""

    def __init__(self) -> None:
        self._index: dict[tuple[Any, ...], int] = {}
        self._entries: list[tuple[str, _Matrix | _Vector]] = []

    def matrix(self, parts: Sequence[Weight], *, product_group_size: int | None = None) -> int:
        """Return the index of the weights under one another.

        product_group_size : given when a product reads them: the groups that its kernel wants, 0 = none
        """
        key = ("matrix", *((p.values, p.swapped) for p in parts))
        name = joined_names([p.values.name or "" for p in parts])
        index = self._add(key, name, _Matrix(list(parts), parts[0].group_size, False))
        entry = self._entries[index][1]
        assert isinstance(entry, _Matrix)
        if product_group_size is None:
            return index
        if entry.in_product and entry.group_size != product_group_size:  # products that round differently
            made = _Matrix(list(parts), product_group_size, True)
            return self._add((*key, product_group_size), name, made)
        entry.in_product, entry.group_size = True, product_group_size
        return index

    def vector(self, value: ir.Value, rows: int, cols: int) -> int:
        """Return the index of a float32 vector or table, row-major."""
        source = _behind_casts(value)
        entry = _Vector(rows, cols, lambda: initializer_array(source))
        return self._add(("vector", source), source.name or "", entry)

    def side_by_side(self, values: Sequence[ir.Value | None], sizes: Sequence[int]) -> int:
        """Return the index of vectors side by side, e.g. biases, zeros where a part has none."""
        sources = [None if v is None else _behind_casts(v) for v in values]

        def fetch() -> Array:
            parts = [
                np.zeros(size, np.float32) if s is None else np.asarray(initializer_array(s), np.float32)
                for s, size in zip(sources, sizes, strict=True)
            ]
            return np.concatenate([p.reshape(-1) for p in parts])

        name = joined_names([s.name or "" for s in sources if s is not None])
        return self._add(("side_by_side", *sources), name, _Vector(1, sum(sizes), fetch))

    def _add(self, key: tuple[Any, ...], name: str, entry: _Matrix | _Vector) -> int:
        if key not in self._index:
            self._index[key] = len(self._entries)
            self._entries.append((name, entry))
        return self._index[key]

    def tensors(self) -> list[Tensor]:
        """Return the tensors in order."""
        return [entry.tensor(name) for name, entry in self._entries]


def _behind_casts(value: ir.Value) -> ir.Value:
    while not value.is_initializer():
        node = value.producer()
        if node is None or node.op_type != "Cast" or node.inputs[0] is None:
            break
        value = node.inputs[0]
    return value


def joined_names(names: Sequence[str]) -> str:
    """Return one name of several: "layers.0.q.weight", "layers.0.k.weight" -> "layers.0.q|k.weight"."""
    parts = [name.split(".") for name in names]
    lead, trail = 0, 0
    shortest = min(map(len, parts))
    while lead < shortest - 1 and len({p[lead] for p in parts}) == 1:
        lead += 1
    while trail < shortest - lead - 1 and len({p[-1 - trail] for p in parts}) == 1:
        trail += 1
    middle = "|".join(".".join(p[lead : len(p) - trail]) for p in parts)
    return ".".join([*parts[0][:lead], middle, *parts[0][len(parts[0]) - trail :]])
