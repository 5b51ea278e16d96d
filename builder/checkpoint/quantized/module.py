"""One linear layer as a checkpoint stores it: its tensors, asked for one by one, each checked when it is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ....runtime.errors import CheckpointError
from ...scheme import QuantizedInput, QuantizedWeight, Scheme

Array = npt.NDArray[Any]
Read = Callable[[], Array]

FLOATS = ("float32", "float16", "bfloat16")
FP8, I8, U8, I32, I64 = "F8_E4M3", "I8", "U8", "I32", "I64"


class RawStore(Protocol):
    """A checkpoint's tensors under its own names, quantized ones included."""

    where: str

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""

    def dtype(self, name: str) -> str:
        """Return float32, float16, bfloat16, or the file's own name of another type (I8, F8_E4M3, ...)."""

    def raw(self, name: str) -> Array:
        """Return a tensor as it is stored."""

    def has(self, name: str) -> bool:
        """Return whether there is such a tensor."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """How one linear layer is quantized and how it is read; the tensors were checked when this was made.

    recipe : what people call it, e.g. "fp8"
    """

    recipe: str
    scheme: Scheme
    read: Callable[[], QuantizedWeight]
    read_input: Callable[[], QuantizedInput] = QuantizedInput


class Module:
    """The tensors of one linear layer.

    name : the checkpoint's own, e.g. "model.layers.0.self_attn.q_proj"
    rows, columns : N outputs and K inputs that config.json asks for
    has_bias : whether config.json gives it a bias
    """

    def __init__(self, store: RawStore, name: str, shape: tuple[int, int], has_bias: bool = False) -> None:
        self.name = name
        self.rows, self.columns = shape
        self.has_bias = has_bias
        self.used: set[str] = set()
        self._store = store

    def error(self, text: str) -> CheckpointError:
        """Return the error with the files and the layer in front."""
        return CheckpointError(f"{self._store.where}: layer {self.name!r} {text}")

    def stored_name(self, leaf: str) -> str:
        """Return what the files call a tensor of that last name."""
        return leaf

    def has(self, leaf: str) -> bool:
        """Return whether the layer has a tensor of that last name."""
        return self._store.has(f"{self.name}.{leaf}")

    def dtype(self, leaf: str) -> str:
        """Return how a tensor is stored."""
        return self._store.dtype(f"{self.name}.{leaf}")

    def shape(self, leaf: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._store.shape(f"{self.name}.{leaf}")

    @property
    def is_float(self) -> bool:
        """Whether the layer's weight is there as plain floats."""
        return self.has("weight") and self.dtype("weight") in FLOATS

    def groups(self, group: int) -> int:
        """Return how many groups of inputs there are; CheckpointError if they do not divide them."""
        if group <= 0 or self.columns % group:
            raise self.error(
                f"has {self.columns} inputs, which groups of {group} do not divide; partial groups are not supported, "
                "so quantize it with a group size that does"
            )
        return self.columns // group

    def take(self, leaf: str, dtypes: str | Sequence[str], *shapes: tuple[int, ...]) -> Read:
        """Return a function that reads a tensor, which must be there in one of the types and of one of the shapes."""
        name = f"{self.name}.{leaf}"
        dtypes = (dtypes,) if isinstance(dtypes, str) else dtypes
        if not self.has(leaf):
            raise self.error(
                f"has no {leaf!r}, which its quantization needs; the checkpoint is incomplete, or its config names "
                "another quantization: download it again"
            )
        dtype, shape = self.dtype(leaf), self.shape(leaf)
        if dtype not in dtypes:
            hint = (
                " (scales that are powers of two, MX formats, are not supported)" if "E8M0" in dtype else ""
            )
            raise self.error(
                f"has {leaf!r} of type {dtype}, wanted {' or '.join(dtypes)}{hint}; the weights and the quantization "
                "config do not belong together"
            )
        if shape not in shapes:
            wanted = " or ".join(str(list(one)) for one in shapes)
            raise self.error(
                f"has {leaf!r} of shape {list(shape)}, wanted {wanted}; the weights and the configs do not belong "
                "together"
            )
        self.used.add(name)
        return lambda: self._store.raw(name)

    def scales(self, leaf: str, *shapes: tuple[int, ...]) -> Read:
        """Return a function that reads float scales as float32, finite and not negative."""
        read = self.take(leaf, FLOATS, *shapes)
        return lambda: self._checked(leaf, read().astype(np.float32))

    def number(self, leaf: str) -> Callable[[], float]:
        """Return a function that reads one positive float."""
        read = self.scales(leaf, (), (1,))

        def positive() -> float:
            value = float(read().reshape(()))
            if value == 0.0:
                name = self.stored_name(leaf)
                raise self.error(f"has {name!r} = 0, wanted a positive number; the checkpoint is damaged")
            return value

        return positive

    def fp8(self, leaf: str, *shapes: tuple[int, ...]) -> Read:
        """Return a function that reads E4M3 numbers, none of which is NaN."""
        read = self.take(leaf, FP8, *shapes)

        def checked() -> Array:
            codes = read()
            if bool(((codes.view(np.uint8) & 0x7F) == 0x7F).any()):
                raise self.error(f"has NaN in {leaf!r}; the checkpoint is damaged: get it again")
            return codes

        return checked

    def fp8_scales(self, leaf: str, shape: tuple[int, ...]) -> Read:
        """Return a function that reads E4M3 scales, none of which is NaN or negative."""
        read = self.fp8(leaf, shape)

        def checked() -> Array:
            scales = read()
            if bool((scales.view(np.uint8) > 0x80).any()):
                name = self.stored_name(leaf)
                raise self.error(f"has negative scales in {name!r}; the checkpoint is damaged: get it again")
            return scales

        return checked

    def drop(self, leaf: str, value: int, why: str) -> None:
        """Leave out a tensor that may be there if all of it is `value`, and then changes nothing."""
        if not self.has(leaf):
            return
        name = f"{self.name}.{leaf}"
        stored = self._store.raw(name)
        if stored.dtype == ml_dtypes.float8_e4m3fn:
            stored = stored.astype(np.float32)
        if not bool((stored == value).all()):
            raise self.error(f"has {leaf!r} that is not {value} everywhere: {why}")
        self.used.add(name)

    def drop_zero_bias(self) -> None:
        """Leave out a bias of zeros, which some writers add to every layer."""
        if not self.has_bias:
            self.drop(
                "bias",
                0,
                "the model has no bias there, so the weights and config.json do not belong together",
            )

    def _checked(self, leaf: str, scales: Array) -> Array:
        if not bool(np.isfinite(scales).all()) or bool((scales < 0).any()):
            raise self.error(
                f"has scales in {leaf!r} that are negative, NaN or infinite; the checkpoint is damaged: get it again"
            )
        return scales
