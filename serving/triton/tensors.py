"""A request's tensors, checked against the table of inputs and taken apart row by row.

On the wire a tensor has the batch dimension in front: [B, ...]. A tensor of one value a row comes as [B, 1], or as [B]
where the model's configuration reshapes it to []. With max_batch_size 0 there is no batch dimension, and one value is
[1] or []. All of these are read; `input_ids` tells which it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.errors import InvalidArgumentError, ShapeError
from .input_specs import INPUTS, TensorSpec

__all__ = ["INPUTS", "Inputs", "TensorSpec", "triton_type"]

_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def triton_type(array: NDArray[Any]) -> str:
    """Return Triton's name of an array's type; numpy's where Triton has none."""
    name = _NAMES.get(array.dtype.type)
    if name is None:
        name = "STRING" if array.dtype.kind in "OSU" else str(array.dtype)
    return name


class Inputs:
    """A request's tensors, all of one form: [B, *dims]. The arrays are the caller's; nothing here writes to them.

    num_rows : B
    notes : what was found and has no effect, for a log, since `take_notes`
    """

    def __init__(self, tensors: Mapping[str, NDArray[Any]], parameters: Mapping[str, Any]) -> None:
        """Take a request apart.

        tensors : by name, see the module; BYTES are arrays of objects
        parameters : the request's parameters; one that has the name of an input of one value stands for that input
            where the tensor is not there
        raises : InvalidArgumentError for an unknown name or a wrong type, ShapeError for a wrong rank or batch size
        """
        self.num_rows = 1
        self.notes: list[str] = []
        self._arrays: dict[str, NDArray[Any]] = {}
        self._is_batched = True
        if "input_ids" in tensors:
            ids = tensors["input_ids"]
            self._is_batched = ids.ndim != 1
            self.num_rows = ids.shape[0] if ids.ndim == 2 else 1
        for name, array in tensors.items():
            spec = INPUTS.get(name)
            if spec is None:
                raise InvalidArgumentError(
                    f"{name} is no input of this model; leave it out, or send it as a request parameter"
                )
            array = self._of_one_form(spec, array)
            if array.size:
                self._arrays[name] = array
        if not self.num_rows:
            raise ShapeError("input_ids has shape [0, ...], wanted at least one row")
        for name, value in parameters.items():
            self._add_parameter(name, value)

    def __contains__(self, name: str) -> bool:
        """Tell whether the tensor is there and has elements."""
        return name in self._arrays

    def row(self, name: str, row_idx: int) -> NDArray[Any] | None:
        """Return a row of an input, shape = its dims; None when it is not there or has no elements."""
        return self._arrays[name][row_idx] if name in self._arrays else None

    def integer(self, name: str, row_idx: int) -> int | None:
        """Return the integer of a row, within the limits of its spec; None when it is not there."""
        value = self._single(name, row_idx)
        return None if value is None else int(value)

    def number(self, name: str, row_idx: int) -> float | None:
        """Return the float of a row, finite and within the limits of its spec; None when it is not there."""
        value = self._single(name, row_idx)
        return None if value is None else float(value)

    def flag(self, name: str, row_idx: int) -> bool | None:
        """Return the boolean of a row; None when it is not there."""
        value = self._single(name, row_idx)
        return None if value is None else bool(value)

    def text(self, name: str, row_idx: int) -> str | None:
        """Return the text of a row; None when it is not there.

        A length in front, 4 bytes little-endian as Triton packs strings, is taken off: some clients pack twice.
        raises InvalidArgumentError for bytes that are no UTF-8
        """
        if name not in self._arrays:
            return None
        value = self._arrays[name][row_idx].reshape(-1)[0]
        if isinstance(value, str):
            return value
        data = bytes(value)
        if len(data) >= 4 and int.from_bytes(data[:4], "little") == len(data) - 4:
            data = data[4:]
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(
                f"{name} has bytes that are no UTF-8 ({error.reason} at byte {error.start}), wanted text"
            ) from None

    def integers(self, name: str, row_idx: int) -> list[int] | None:
        """Return the integers of a row, flat; None when it is not there or empty."""
        row = self.row(name, row_idx)
        return None if row is None else [int(value) for value in row.reshape(-1).tolist()]

    def take_notes(self) -> tuple[str, ...]:
        """Return the notes and forget them, so that each is told once."""
        taken, self.notes = tuple(self.notes), []
        return taken

    def _single(self, name: str, row_idx: int) -> Any:
        if name not in self._arrays:
            return None
        spec = INPUTS[name]
        value = self._arrays[name][row_idx].item()
        is_in = isinstance(value, bool) or math.isfinite(value)
        is_in = (
            is_in and (spec.low is None or value >= spec.low) and (spec.high is None or value <= spec.high)
        )
        if not is_in:
            where = f" of row {row_idx}" if self.num_rows > 1 else ""
            raise InvalidArgumentError(f"{name}{where} is {value}, wanted {_limits(spec)}")
        return value

    def _of_one_form(self, spec: TensorSpec, array: NDArray[Any]) -> NDArray[Any]:
        """Return a tensor as [B, *dims]."""
        got = triton_type(array)
        if got not in spec.types:
            raise InvalidArgumentError(f"{spec.name} is {got}, wanted {' or '.join(spec.types)}")
        shape = array.shape
        if not self._is_batched:
            shape = (1, *shape)
        wanted = (self.num_rows, *spec.dims)
        if spec.is_single and len(shape) == 1:
            shape = (*shape, 1)
        fits = len(shape) == len(wanted) and all(
            want in (-1, have) for want, have in zip(wanted, shape, strict=True)
        )
        # An optional tensor may come empty, as another model's output that has nothing to say.
        if not fits and not (array.size == 0 and len(shape) == len(wanted) and shape[0] == self.num_rows):
            raise ShapeError(
                f"{spec.name} has shape {list(array.shape)}, wanted {self._wanted(spec)}{self._why()}"
            )
        return array.reshape(shape)

    def _wanted(self, spec: TensorSpec) -> str:
        dims = [str(dim) if dim >= 0 else "n" for dim in spec.dims]
        front = [str(self.num_rows)] if self._is_batched else []
        forms = [f"[{', '.join(front + dims)}]"]
        if spec.is_single:
            forms.append(f"[{', '.join(front)}]")
        return " or ".join(forms)

    def _why(self) -> str:
        if not self._is_batched:
            return ", as input_ids has no batch dimension"
        return f", with the {self.num_rows} rows of input_ids" if self.num_rows > 1 else ""

    def _add_parameter(self, name: str, value: Any) -> None:
        spec = INPUTS.get(name)
        if spec is None or not spec.is_single:
            if name != "request_type":
                self.notes.append(f"request parameter {name!r} is not known and has no effect")
            return
        if name in self._arrays:
            self.notes.append(f"request parameter {name!r} has no effect beside the tensor of that name")
            return
        array = np.empty((self.num_rows, 1), object if spec.types == ("STRING",) else _DTYPES[spec.types[0]])
        try:
            with np.errstate(over="ignore"):  # then it is infinite, which is refused where it is read
                array[:] = _parameter_value(spec, value)
        except (TypeError, ValueError, OverflowError):
            raise InvalidArgumentError(
                f"the request parameter {name} is {value!r}, wanted {_LITERALS.get(spec.types[0], 'a number')}"
            ) from None
        self._arrays[name] = array


_LITERALS = {
    "BOOL": "true or false",
    "STRING": "text",
    "INT32": "a 32-bit integer",
    "UINT64": "an integer >= 0",
}


def _parameter_value(spec: TensorSpec, value: Any) -> Any:
    """Return a parameter's value for an array of the input's type; TypeError, ValueError or OverflowError else."""
    kind = spec.types[0]
    if kind in ("BOOL", "STRING"):
        if not isinstance(value, bool if kind == "BOOL" else str):
            raise TypeError
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError
    if kind.startswith("FP"):
        return value
    info = np.iinfo(_DTYPES[kind])
    if value != int(value) or not info.min <= value <= info.max:
        raise ValueError
    return int(value)


def _limits(spec: TensorSpec) -> str:
    if spec.low is not None and spec.high is not None:
        return f"{spec.low:g} to {spec.high:g}"
    if spec.low is not None:
        return f"at least {spec.low:g}"
    return f"at most {spec.high:g}" if spec.high is not None else "a finite number"
