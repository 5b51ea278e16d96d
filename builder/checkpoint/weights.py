"""Weights on demand: canonical names over a checkpoint's own tensors, checked by shape before any is read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ...runtime.errors import CheckpointError
from ..spec import DecoderSpec, weight_shapes
from .families import Family, Part

Array = npt.NDArray[Any]


class WeightSource(Protocol):
    """The weights of one checkpoint under their canonical names (builder/spec.py)."""

    def names(self) -> tuple[str, ...]:
        """Return all names, in the order of weight_shapes(spec)."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a weight's shape; matrices are [out, in]."""

    def get(self, name: str) -> Array:
        """Return a weight, float32, float16 or bfloat16 (ml_dtypes), read-only, a view of the file where it can be."""


class TensorStore(Protocol):
    """A checkpoint's tensors under the checkpoint's own names."""

    where: str

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""

    def get(self, name: str) -> Array:
        """Return a tensor."""

    def dtype(self, name: str) -> str:
        """Return float32, float16, bfloat16 or a quantized format's name."""


class MappedWeights:
    """WeightSource over a TensorStore: renamed, sliced, and checked when made.

    elsewhere : canonical names that somebody else reads (quantized weights)
    known : tensors that belong to those
    raises : CheckpointError for a tensor that is missing, has another shape, or is not known
    """

    def __init__(
        self,
        store: TensorStore,
        spec: DecoderSpec,
        family: Family,
        elsewhere: Collection[str] = (),
        known: Collection[str] = (),
    ) -> None:
        self._store = store
        self._shapes = weight_shapes(spec)
        self._parts = family.parts(spec)
        parts = {name: part for name, part in self._parts.items() if name not in elsewhere}
        _check(store, self._shapes, parts, spec, frozenset(known))

    def names(self) -> tuple[str, ...]:
        """Return all names, in the order of weight_shapes(spec)."""
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a weight's shape; KeyError for a name that is none."""
        return self._shapes[name]

    def get(self, name: str) -> Array:
        """Return a weight, read-only; row slices of a fused tensor are views as well."""
        part = self._parts[name]
        tensor = self._store.get(part.name)
        return tensor if part.rows is None else tensor[part.rows[0] : part.rows[1]]

    def dtype(self, name: str) -> str:
        """Return how the checkpoint stores a weight: float32, float16, bfloat16, or a quantized format's name."""
        return self._store.dtype(self._parts[name].name)


def _check(
    store: TensorStore,
    shapes: Mapping[str, tuple[int, ...]],
    parts: Mapping[str, Part],
    spec: DecoderSpec,
    known: frozenset[str],
) -> None:
    have = set(store.names())
    missing = sorted({part.name for part in parts.values()} - have)
    if missing:
        raise CheckpointError(
            f"{store.where}: {_listed(missing)} missing, needed for {spec.num_layers} layers of {spec.architecture}; "
            "the checkpoint is incomplete or its config.json belongs to another"
        )
    for name, part in parts.items():
        wanted = shapes[name] if part.rows is None else (part.total_rows, *shapes[name][1:])
        if store.shape(part.name) != wanted:
            raise CheckpointError(
                f"{store.where}: tensor {part.name!r} has shape {list(store.shape(part.name))}, config.json asks "
                f"for {list(wanted)}; the weights and config.json do not belong together"
            )
    extra = sorted(have - {part.name for part in parts.values()} - known)
    unknown = [name for name in extra if not _is_harmless(name, store, spec)]
    if unknown:
        raise CheckpointError(
            f"{store.where}: {_listed(unknown)} not known for {spec.architecture} with this config.json; a weight "
            "that is left out changes the model, so this checkpoint cannot be compiled"
        )


def _is_harmless(name: str, store: TensorStore, spec: DecoderSpec) -> bool:
    """Return whether an extra tensor can be left out: old rotary buffers, or the tied table a second time."""
    if name.endswith(("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")):
        return True
    if name == "lm_head.weight" and spec.tie_embeddings:
        table = store.get("model.embed_tokens.weight")
        head = store.get(name)
        if head.shape == table.shape and head.dtype == table.dtype and same_values(head, table):
            return True
        raise CheckpointError(
            f"{store.where}: lm_head.weight differs from model.embed_tokens.weight although config.json says "
            "tie_word_embeddings true; set it to false to use both, or delete lm_head.weight"
        )
    return False


def same_values(a: Array, b: Array) -> bool:
    """Compare two arrays of one shape and type bit for bit in slices, so that nothing large is made."""
    step = max(1, (1 << 22) // max(1, a[0].nbytes))
    return all(
        np.array_equal(a[n : n + step].view(np.uint8), b[n : n + step].view(np.uint8))
        for n in range(0, len(a), step)
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    verb = "is" if len(names) == 1 else "are"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{'tensor' if len(names) == 1 else 'tensors'} {shown}{more} {verb}"
