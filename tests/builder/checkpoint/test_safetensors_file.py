"""The safetensors reader: one error a broken rule, views of the file, and no other exception whatever the bytes."""

from __future__ import annotations

import contextlib
import json
import resource
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plansmith.builder.checkpoint.hf_write import write_safetensors
from plansmith.builder.checkpoint.safetensors_file import SafetensorsFile
from plansmith.runtime.errors import CheckpointError


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


TWO = {"a": entry([2, 2], 0, 16), "b": entry([3], 16, 28)}


@pytest.mark.parametrize(
    ("header", "data_bytes", "words"),
    [
        (b"{", 0, ["not JSON"]),
        (b"\xff\xfe", 0, ["not JSON"]),
        (b"[" * 100_000, 0, ["not JSON"]),
        ([1], 0, ["list", "JSON object"]),
        ({"a": [1]}, 0, ["'a'", "dtype, shape and data_offsets"]),
        ({"a": {**entry([1], 0, 4), "extra": 1}}, 4, ["'a'", "no more"]),
        ({"a": entry([1], 0, 4, "F33")}, 4, ["'a'", "F33", "BF16"]),
        ({"a": entry([-1], 0, 4)}, 4, ["'a'", "-1", "sizes"]),
        ({"a": entry([True], 0, 4)}, 4, ["'a'", "True"]),
        ({"a": entry([1], 4, 0)}, 4, ["'a'", "data_offsets"]),
        ({"a": entry([2], 0, 4)}, 4, ["'a'", "4 bytes", "8"]),
        ({"a": entry([1 << 61, 1 << 61], 0, 4)}, 4, ["'a'", "4 bytes"]),
        (TWO, 27, ["truncated", "'b'", "28", "27"]),
        (TWO, 30, ["2 bytes after"]),
        ({"a": entry([2, 2], 0, 16), "b": entry([3], 12, 24)}, 24, ["'a'", "'b'", "overlap"]),
        ({"a": entry([2, 2], 4, 20)}, 20, ["gap of 4", "'a'"]),
        (
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            4,
            ["'a' twice"],
        ),
    ],
)
def test_errors(header: Any, data_bytes: int, words: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", header, bytes(data_bytes))
    with pytest.raises(CheckpointError) as e:
        SafetensorsFile(path)
    for word in [str(path), *words]:
        assert word in str(e.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["0 bytes", "at least 8"]),
        (b"1234567", ["7 bytes"]),
        ((1 << 40).to_bytes(8, "little"), [str(1 << 40), "100000000"]),
        ((100).to_bytes(8, "little") + b"{}", ["truncated", "100", "10"]),
    ],
)
def test_errors_before_the_header(content: bytes, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as e:
        SafetensorsFile(path)
    for word in words:
        assert word in str(e.value)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    cases = {tmp_path / "none.safetensors": "is missing", tmp_path: "is a directory, not a file"}
    for path, words in cases.items():
        with pytest.raises(CheckpointError, match=words):
            SafetensorsFile(path)


def test_reads_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    tensors = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.standard_normal((7,)).astype(np.float16),
        "c": rng.standard_normal((2, 2)).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(3.5, np.float32),
    }
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file(tensors, path)
    file = SafetensorsFile(path)
    assert sorted(file.names()) == sorted(tensors)
    for name, value in tensors.items():
        got = file.get(name)
        assert (got.dtype, got.shape, file.shape(name)) == (value.dtype, value.shape, value.shape)
        np.testing.assert_array_equal(got, value)


def test_the_safetensors_package_reads_what_we_write(tmp_path: Path) -> None:
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    b = np.arange(4).astype(ml_dtypes.bfloat16)
    path = tmp_path / "m.safetensors"
    write_safetensors(path, [("a", (2, 3), "float32", lambda: a), ("b", (4,), "bfloat16", lambda: b)])
    got = safetensors.numpy.load_file(path)
    np.testing.assert_array_equal(got["a"], a)
    np.testing.assert_array_equal(got["b"].view(np.uint16), b.view(np.uint16))


def test_other_dtypes_are_listed_and_refused_when_read(tmp_path: Path) -> None:
    file = SafetensorsFile(write(tmp_path / "m.safetensors", {"a": entry([4], 0, 4, "I8")}, bytes(4)))
    assert file.dtype("a") == "I8"
    with pytest.raises(CheckpointError, match=r"I8.*unquantized"):
        file.get("a")


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        ("I8", np.int8),
        ("U8", np.uint8),
        ("I32", np.int32),
        ("I64", np.int64),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("BF16", ml_dtypes.bfloat16),
    ],
)
def test_raw_tensors_are_views_of_their_own_type(dtype: str, wanted: Any, tmp_path: Path) -> None:
    value = np.arange(6).astype(wanted).reshape(2, 3)
    shown = {"a": entry([2, 3], 0, value.nbytes, dtype)}
    file = SafetensorsFile(write(tmp_path / "m.safetensors", shown, value.tobytes()))
    got = file.raw("a")
    assert got.dtype == wanted and not got.flags.writeable and file.raw("a").base is not None
    np.testing.assert_array_equal(got.view(np.uint8), value.view(np.uint8))
    if dtype != "BF16":
        with pytest.raises(CheckpointError, match=f"{dtype}.*unquantized"):
            file.get("a")


@pytest.mark.parametrize("dtype", ["F8_E8M0", "F8_E5M2", "U32", "BOOL"])
def test_raw_tensors_of_other_types_are_refused(dtype: str, tmp_path: Path) -> None:
    size = 16 if dtype == "U32" else 4
    file = SafetensorsFile(write(tmp_path / "m.safetensors", {"a": entry([4], 0, size, dtype)}, bytes(size)))
    with pytest.raises(CheckpointError, match=f"{dtype}.*quantized weights are read as"):
        file.raw("a")


def test_data_behind_an_odd_header_is_aligned(tmp_path: Path) -> None:
    value = np.arange(3, dtype=np.float32)
    header = json.dumps({"a": entry([3], 0, 12)}).encode()
    path = write(tmp_path / "m.safetensors", header + b" " * ((-len(header)) % 8 + 1), value.tobytes())
    got = SafetensorsFile(path).get("a")
    assert got.flags.aligned and not got.flags.writeable
    np.testing.assert_array_equal(got, value)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_opening_and_slicing_do_not_read_the_file(tmp_path: Path) -> None:
    """A sparse file of 64 GiB: opening and taking a view must neither read nor allocate it."""
    rows = 1 << 24
    header = json.dumps({"a": entry([rows, 1024], 0, rows * 4096)}).encode()
    path = write(tmp_path / "m.safetensors", header + b" " * (-len(header) % 8), b"")
    with path.open("r+b") as f:
        f.truncate(path.stat().st_size + rows * 4096)
    before = resident_bytes()
    view = SafetensorsFile(path).get("a")
    assert view.shape == (rows, 1024) and float(view[rows - 1, 1023]) == 0.0
    assert not view.flags.owndata
    assert resident_bytes() - before < 16 << 20


GOOD = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        **TWO,
        "c": entry([2], 28, 32, "BF16"),
        "d": entry([1, 4], 32, 40, "F16"),
    }
).encode()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files_raise_checkpoint_errors_only(data: st.DataObject, tmp_path: Path) -> None:
    content = bytearray(len(GOOD).to_bytes(8, "little") + GOOD + bytes(40))
    for _ in range(data.draw(st.integers(1, 4), label="mutations")):
        at = data.draw(st.integers(0, len(content) - 1), label="at")
        kind = data.draw(st.sampled_from(["byte", "insert", "cut", "digit"]), label="kind")
        if kind == "byte":
            content[at] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            content[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        elif kind == "digit":
            digits = [n for n, byte in enumerate(content) if chr(byte).isdigit()]
            if digits:
                content[data.draw(st.sampled_from(digits))] = data.draw(st.sampled_from(b"0123456789-.e"))
        else:
            del content[at : at + data.draw(st.integers(1, 60))]
        if not content:
            break
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    try:
        file = SafetensorsFile(path)
        for name in file.names():
            assert file.get(name).shape == file.shape(name)
    except CheckpointError as e:
        assert str(path) in str(e)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__"]),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "F16", "BF16", "F4", "I64", "", None, 3]),
                "shape": st.one_of(st.lists(st.integers(-1, 1 << 64), max_size=4), st.none(), st.just("x")),
                "data_offsets": st.one_of(st.lists(st.integers(-1, 1 << 64), max_size=3), st.none()),
            }
        ),
    ),
    size=st.integers(0, 64),
)
def test_made_up_headers_raise_checkpoint_errors_only(header: Any, size: int, tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", header, bytes(size))
    with contextlib.suppress(CheckpointError):
        SafetensorsFile(path)
