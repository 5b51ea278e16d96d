"""Reads a GGUF container by mmap: metadata and tensors, every length checked against the file.

Read here rather than with the gguf package's reader, which takes two seconds for a small model's token list and does
not check sizes; that package does the dequantization.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...runtime.errors import CheckpointError
from ...runtime.file_kind import no_file

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PLAIN: dict[str, npt.DTypeLike] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_REDO = "download the file again"


class _Tensor(NamedTuple):
    shape: tuple[int, ...]  # slowest axis first, as in numpy
    type: str  # ggml's name: F32, Q4_1, ...
    begin: int  # in the file
    num_bytes: int


class GgufFile:
    """One GGUF file of version 2 or 3; CheckpointError says what is wrong with it.

    metadata : key -> int, float, bool, str or list of them
    """

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        try:
            if (wrong := no_file(path)) is not None:  # a pipe would never end
                raise CheckpointError(f"{path}: {wrong}; give a Hugging Face directory or GGUF file")
            self._data = np.asarray(np.memmap(path, np.uint8, "r"))
        except (OSError, ValueError) as e:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(
                f"{path}: cannot be read ({e}); give a Hugging Face directory or GGUF file"
            ) from e
        self._view = self._data.data
        self._at = 0
        tensor_count, metadata_count = self._read_start()
        self.metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = self._string()
            if key in self.metadata:
                raise self.error(f"has metadata key {key!r} twice; {_REDO}")
            self.metadata[key] = self._value(self._scalar("I"))
        self._tensors: dict[str, _Tensor] = {}
        self._read_tensors(tensor_count)

    def error(self, text: str) -> CheckpointError:
        """Return the error with the file named in front."""
        return CheckpointError(f"{self.where}: {text}")

    def _read_start(self) -> tuple[int, int]:
        if bytes(self._view[:4]) != b"GGUF":
            raise self.error("is no GGUF file; give a Hugging Face directory or a .gguf file")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise self.error(
                f"is GGUF version {version}, readable are 2 and 3 (little-endian); convert it again"
            )
        return self._scalar("Q"), self._scalar("Q")

    def _take(self, count: int) -> int:
        """Return the position of the next `count` bytes and step over them."""
        begin = self._at
        if count > len(self._view) - begin:
            raise self.error(f"is truncated: {count} bytes wanted at {begin} of {len(self._view)}; {_REDO}")
        self._at = begin + count
        return begin

    def _scalar(self, code: str) -> Any:
        begin = self._take(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self._view, begin)[0]

    def _string(self) -> str:
        count = self._scalar("Q")
        begin = self._take(count)
        try:
            return str(self._view[begin : begin + count], "utf-8")
        except UnicodeDecodeError as e:
            raise self.error(f"has a string at byte {begin} that is not UTF-8; {_REDO}") from e

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self.error(f"has metadata of type {kind}, known are 0 to 12; {_REDO}")
        item, count = self._scalar("I"), self._scalar("Q")
        if item == _STRING:
            return [self._string() for _ in range(count)]
        if item not in _SCALARS:
            raise self.error(f"has an array of type {item}, readable are numbers and strings; {_REDO}")
        size = struct.calcsize("<" + _SCALARS[item])
        begin = self._take(count * size)
        dtype = np.dtype("<" + _SCALARS[item])
        return self._data[begin : begin + count * size].view(dtype).tolist()

    def _read_tensors(self, count: int) -> None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        found = []
        for _ in range(count):
            name = self._string()
            num_dims = self._scalar("I")
            if not 1 <= num_dims <= 4:
                raise self.error(f"tensor {name!r} has {num_dims} dimensions, wanted 1 to 4; {_REDO}")
            dims = [self._scalar("Q") for _ in range(num_dims)]
            kind, offset = self._scalar("I"), self._scalar("Q")
            try:
                ggml_type = GGMLQuantizationType(kind)
                block, block_bytes = GGML_QUANT_SIZES[ggml_type]
            except (ValueError, KeyError):
                raise self.error(
                    f"tensor {name!r} has type {kind}, which the gguf package does not know"
                ) from None
            if not all(0 < n < 1 << 40 for n in dims) or dims[0] % block:
                raise self.error(f"tensor {name!r} has dimensions {dims} for blocks of {block}; {_REDO}")
            num_bytes = math.prod(dims) // block * block_bytes
            found.append((name, _Tensor(tuple(reversed(dims)), ggml_type.name, offset, num_bytes)))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise self.error(f"has general.alignment {alignment!r}, wanted a small power of two; {_REDO}")
        self._place(found, -(-self._at // alignment) * alignment)

    def _place(self, found: list[tuple[str, _Tensor]], start: int) -> None:
        """Move the offsets to the file's start, and check that tensors lie in the file, apart from each other."""
        position, before = start, ""
        for name, tensor in sorted(found, key=lambda item: item[1].begin):
            begin = start + tensor.begin
            if name in self._tensors:
                raise self.error(f"has tensor {name!r} twice; {_REDO}")
            if begin < position:
                raise self.error(f"tensors {before!r} and {name!r} overlap; {_REDO}")
            position, before = begin + tensor.num_bytes, name
            if position > len(self._view):
                raise self.error(
                    f"is truncated: tensor {name!r} ends at byte {position} of {len(self._view)}; {_REDO}"
                )
            self._tensors[name] = tensor._replace(begin=begin)

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors."""
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, slowest axis first."""
        return self._tensors[name].shape

    def type(self, name: str) -> str:
        """Return ggml's name of a tensor's type, e.g. F32 or Q4_1."""
        return self._tensors[name].type

    def num_bytes(self, name: str) -> int:
        """Return a tensor's bytes in the file."""
        return self._tensors[name].num_bytes

    def get(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor: a read-only view where it is F32, F16 or BF16, else dequantized to float32."""
        tensor = self._tensors[name]
        raw = self._data[tensor.begin : tensor.begin + tensor.num_bytes]
        if tensor.type in _PLAIN:
            return raw.view(_PLAIN[tensor.type]).reshape(tensor.shape)
        return self._dequantize(name, raw.reshape(*tensor.shape[:-1], -1), tensor)

    def _dequantize(self, name: str, raw: npt.NDArray[np.uint8], tensor: _Tensor) -> npt.NDArray[Any]:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            values = dequantize(raw, GGMLQuantizationType[tensor.type])
        except (NotImplementedError, ValueError, AssertionError) as e:
            raise self.error(
                f"tensor {name!r} is of type {tensor.type}, which the gguf package cannot dequantize ({e}); "
                "use a file of another quantization"
            ) from e
        return values.astype(np.float32, copy=False).reshape(tensor.shape)
