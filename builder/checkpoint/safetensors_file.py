"""Reads a .safetensors file by mmap: a checked header, and every tensor a view of the file.

The format: 8 bytes little-endian header length, a JSON object name -> {dtype, shape, data_offsets}, then the data
without gaps. Read here rather than through the safetensors package because that package's numpy side copies every
tensor and has no bfloat16 without torch. One error for each rule that a file can break.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...runtime.errors import CheckpointError
from ...runtime.file_kind import no_file

MAX_HEADER_BYTES = 100_000_000  # the format's own limit

_DTYPES: dict[str, npt.DTypeLike] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_OTHER_BITS = {  # of the format, but not weights that we read; harmless extra tensors may have them
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64, "F64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_RAW_DTYPES: dict[str, npt.DTypeLike] = {  # what quantized weights and what goes with them are stored as
    **_DTYPES,
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
_BITS = {"F32": 32, "F16": 16, "BF16": 16, **_OTHER_BITS}
_REDO = "download or save the file again"


class _Entry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    begin: int  # from the start of the data
    end: int


class SafetensorsFile:
    """One file, its header read and checked when made; CheckpointError says which rule it breaks."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._path = path
        try:
            if (wrong := no_file(path)) is not None:  # a pipe would never end
                raise CheckpointError(f"{path}: {wrong}; {_REDO}")
            size = path.stat().st_size
            with path.open("rb") as file:
                header, self._data_start = self._read_header(file, size)
        except OSError as e:
            raise CheckpointError(
                f"{path}: cannot be read ({e.strerror}); check the path and its rights"
            ) from e
        self._entries = dict(self._parse_header(header))
        self._check_layout(size - self._data_start)
        self._map: npt.NDArray[np.uint8] | None = None

    def _error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {text}")

    def _read_header(self, file: Any, size: int) -> tuple[bytes, int]:
        if size < 8:
            raise self._error(f"has {size} bytes, a safetensors file has at least 8; {_REDO}")
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise self._error(
                f"says its header has {length} bytes, the format allows {MAX_HEADER_BYTES}; "
                "it is damaged or no safetensors file"
            )
        if 8 + length > size:
            raise self._error(f"is truncated: a header of {length} bytes in a file of {size}; {_REDO}")
        return file.read(length), 8 + length

    def _parse_header(self, header: bytes) -> Iterator[tuple[str, _Entry]]:
        try:
            parsed = json.loads(header.decode("utf-8"), object_pairs_hook=self._unique)
        except (ValueError, RecursionError) as e:
            raise self._error(
                f"has a header that is not JSON ({e}); it is damaged or no safetensors file"
            ) from e
        if not isinstance(parsed, dict):
            raise self._error(f"has a header of type {type(parsed).__name__}, wanted a JSON object; {_REDO}")
        for name, entry in parsed.items():
            if name != "__metadata__":
                yield name, self._parse_entry(name, entry)

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) != len(pairs):
            twice = next(key for n, (key, _) in enumerate(pairs) if key in [k for k, _ in pairs[:n]])
            raise self._error(f"has {twice!r} twice in its header; {_REDO}")
        return names

    def _parse_entry(self, name: str, entry: Any) -> _Entry:
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._error(
                f"tensor {name!r} must have dtype, shape and data_offsets, no more and no less; {_REDO}"
            )
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _BITS:
            raise self._error(f"tensor {name!r} has dtype {dtype!r}, known are {', '.join(_BITS)}; {_REDO}")
        if not _is_sizes(shape):
            raise self._error(f"tensor {name!r} has shape {shape!r}, wanted a list of sizes; {_REDO}")
        if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._error(f"tensor {name!r} has data_offsets {offsets!r}, wanted [begin, end]; {_REDO}")
        bits = math.prod(shape) * _BITS[dtype]
        if bits != (offsets[1] - offsets[0]) * 8:
            raise self._error(
                f"tensor {name!r} has {offsets[1] - offsets[0]} bytes, {dtype} {shape} needs {bits // 8}; {_REDO}"
            )
        return _Entry(dtype, tuple(shape), offsets[0], offsets[1])

    def _check_layout(self, data_bytes: int) -> None:
        """The tensors must cover the data exactly: no overlap, no gap, nothing outside, nothing behind."""
        position, before = 0, ""
        for name, entry in sorted(self._entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.end > data_bytes:
                raise self._error(
                    f"is truncated: tensor {name!r} ends at byte {entry.end} of {data_bytes} bytes of data; {_REDO}"
                )
            if entry.begin < position:
                raise self._error(f"tensors {before!r} and {name!r} overlap; {_REDO}")
            if entry.begin > position:
                raise self._error(
                    f"has a gap of {entry.begin - position} bytes before tensor {name!r}; {_REDO}"
                )
            position, before = entry.end, name
        if position != data_bytes:
            raise self._error(f"has {data_bytes - position} bytes after its last tensor; {_REDO}")

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors."""
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """Return float32, float16, bfloat16, or the format's own name of another type."""
        dtype = self._entries[name].dtype
        return _DTYPE_NAMES.get(dtype, dtype)

    def num_bytes(self, name: str) -> int:
        """Return a tensor's bytes in the file."""
        return self._entries[name].end - self._entries[name].begin

    def get(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor as a read-only view of the mapped file; CheckpointError for a dtype that is no weight's."""
        entry = self._entries[name]
        if entry.dtype not in _DTYPES:
            raise self._error(
                f"tensor {name!r} is stored as {entry.dtype}, readable are F32, F16 and BF16; "
                "use the unquantized checkpoint"
            )
        return self._view(entry, _DTYPES[entry.dtype])

    def raw(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor as it is stored, floats, int8, uint8, int32, int64 or E4M3; for readers of quantized weights.

        raises CheckpointError for a dtype that none of them has
        """
        entry = self._entries[name]
        if entry.dtype not in _RAW_DTYPES:
            raise self._error(
                f"tensor {name!r} is stored as {entry.dtype}, quantized weights are read as "
                f"{', '.join(_RAW_DTYPES)}; use a checkpoint of another format"
            )
        return self._view(entry, _RAW_DTYPES[entry.dtype])

    def _view(self, entry: _Entry, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        if entry.begin == entry.end:
            return np.zeros(entry.shape, dtype)
        begin = self._data_start + entry.begin
        raw = self._mapped()[begin : begin + entry.end - entry.begin]
        if begin % np.dtype(dtype).itemsize:
            raw = raw.copy()  # a header of odd length: compilers want aligned data
            raw.flags.writeable = False
        return raw.view(dtype).reshape(entry.shape)

    def _mapped(self) -> npt.NDArray[np.uint8]:
        if self._map is None:
            self._map = np.asarray(np.memmap(self._path, np.uint8, "r"))
        return self._map


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 62 for n in value
    )
