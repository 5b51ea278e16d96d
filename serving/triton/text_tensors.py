"""Text in tensors: BYTES read as UTF-8, row by row, and texts written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.errors import InvalidArgumentError, ShapeError

Tensors = Mapping[str, NDArray[Any]]


def read_texts(tensors: Tensors, name: str, num_rows: int, *, keep_empty: bool = False) -> list[list[str]]:
    """Return the texts of each row of a BYTES tensor; no texts where the tensor is missing.

    keep_empty : where other tensors go along with it; else empty texts, which fill up short rows, are left out
    tensors[name] : (num_rows, n) or, of one row, (n,) objects, bytes or str
    raises : InvalidArgumentError for bytes that are no UTF-8, ShapeError for another number of rows
    """
    array = tensors.get(name)
    if array is None or array.size == 0:
        return [[] for _ in range(num_rows)]
    if num_rows == 1:
        array = array.reshape(1, -1)
    _check_rows(name, array, num_rows)
    rows = [[_text(name, value) for value in row.flat] for row in array]
    return rows if keep_empty else [[text for text in row if text] for row in rows]


def read_numbers(tensors: Tensors, name: str, num_rows: int) -> list[list[Any]] | None:
    """Return the numbers of each row, None where the tensor is missing or empty; ShapeError as read_texts."""
    array = tensors.get(name)
    if array is None or array.size == 0:
        return None
    if num_rows == 1:
        array = array.reshape(1, -1)
    _check_rows(name, array, num_rows)
    numbers: list[list[Any]] = array.reshape(num_rows, -1).tolist()
    return numbers


def text_array(texts: Sequence[str]) -> NDArray[Any]:
    """Return (n,) objects of UTF-8 bytes."""
    array = np.empty(len(texts), object)
    array[:] = [text.encode("utf-8", "replace") for text in texts]
    return array


def pad_rows(rows: Sequence[Sequence[int]], fill: int) -> NDArray[np.int32]:
    """Return rows of different lengths as one (B, longest) int32 array."""
    array = np.full((len(rows), max(map(len, rows), default=0)), fill, np.int32)
    for made, row in zip(array, rows, strict=True):
        made[: len(row)] = row
    return array


def column(values: Sequence[int], dtype: type[np.generic] = np.int32) -> NDArray[Any]:
    """Return one value a row, (B, 1)."""
    return np.array(values, dtype).reshape(-1, 1)


def _check_rows(name: str, array: NDArray[Any], num_rows: int) -> None:
    if array.shape[0] != num_rows:
        raise ShapeError(
            f"{name} has shape {list(array.shape)}, wanted {num_rows} rows, as many as the prompt has"
        )


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"{name} is not UTF-8 text: {error.reason} at byte {error.start} of {len(value)}; encode it as UTF-8"
        ) from None
