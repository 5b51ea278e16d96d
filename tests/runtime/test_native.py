"""The loaded library against what Python says of it."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest
from plansmith.runtime import _native, errors, stats
from plansmith.runtime._native import native
from plansmith.runtime.executor import Batch, ModelInfo
from plansmith.runtime.native_engine import EngineOptions
from plansmith.runtime.sampling import MAX_LOGPROBS

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import cdef_module

# What Python settles by itself, before the core is given anything.
NOT_THE_CORES = {EngineOptions: {"kv_cache_free_gpu_mem_fraction"}}


def status_codes() -> dict[str, int]:
    """Return name -> code of the header's status list, as the compiler numbered them."""
    declarations = (native().directory / "plansmith.cdef").read_text()
    return {name: int(code) for name, code in re.findall(r"(PSM_OK|PSM_ERROR_\w+) = (\d+)", declarations)}


def test_the_status_list_and_the_classes_are_the_same() -> None:
    def class_name(name: str) -> str:
        return "".join(part.capitalize() for part in name.removeprefix("PSM_ERROR_").split("_")) + "Error"

    codes = status_codes()
    assert codes.pop("PSM_OK") == 0
    assert len(codes) + 1 == native().lib.PSM_NUM_STATUS_CODES
    assert {code: class_name(name) for name, code in codes.items()} == {
        code: cls.__name__ for code, cls in errors.STATUS_CLASSES.items()
    }


@pytest.mark.parametrize("code", errors.STATUS_CLASSES)
def test_check_raises_the_class_of_the_status(code: int) -> None:
    with pytest.raises(errors.STATUS_CLASSES[code]) as caught:
        native().check(code)
    assert type(caught.value) is errors.STATUS_CLASSES[code]
    assert str(caught.value)


def test_a_status_that_this_version_does_not_know_is_an_internal_error() -> None:
    with pytest.raises(errors.InternalError):
        native().check(99)


@pytest.mark.parametrize(
    ("struct", "last"),
    [
        ("psm_request", "guide"),
        ("psm_engine_options", "draft_executor"),  # queue_order came with 1.3
        ("psm_cpu_options", "max_adapter_rank"),  # weights came with 1.3
    ],
)
def test_init_functions_set_the_fields_of_abi_1_0(struct: str, last: str) -> None:
    ffi = native().ffi
    made = ffi.new(f"{struct}*")
    getattr(native().lib, f"{struct}_init")(made)
    field = dict(ffi.typeof(struct).fields)[last]
    assert made.struct_size == field.offset + ffi.sizeof(field.type) <= native().struct_size(struct)


@pytest.mark.parametrize(
    ("cls", "struct"),
    [
        (stats.RequestStats, "psm_request_stats"),
        (stats.EngineStats, "psm_engine_stats"),
        (stats.IterationStats, "psm_iteration_stats"),
        (ModelInfo, "psm_model_info"),
        (EngineOptions, "psm_engine_options"),
    ],
)
def test_the_dataclasses_have_the_structs_fields(cls: type, struct: str) -> None:
    fields = {name for name, _ in native().ffi.typeof(struct).fields} - {"struct_size"}
    assert {field.name for field in dataclasses.fields(cls)} - NOT_THE_CORES.get(cls, set()) == fields


def test_a_batch_has_the_structs_arrays() -> None:
    arrays = {name for name, f in native().ffi.typeof("psm_batch").fields if f.type.kind == "pointer"}
    assert {field.name for field in dataclasses.fields(Batch)} == arrays | {"native"}


def test_constants() -> None:
    assert native().lib.PSM_MAX_TOP_LOGPROBS == MAX_LOGPROBS
    version = native().lib.psm_abi_version()
    assert divmod(version, 1000) == (native().lib.PSM_ABI_MAJOR, native().lib.PSM_ABI_MINOR)


def test_a_missing_library_says_how_to_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANSMITH_LIBRARY", str(tmp_path))
    with pytest.raises(errors.UnsupportedError, match=r"libplansmith.*plansmith\.cdef.*cmake -S"):
        native.__wrapped__()


def test_a_damaged_library_says_how_to_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANSMITH_LIBRARY", str(tmp_path))
    name = _native._LIBRARY_NAMES.get("linux", "libplansmith.so")
    (tmp_path / name).write_bytes(b"\x7fELF and no more")
    (tmp_path / "plansmith.cdef").write_text((native().directory / "plansmith.cdef").read_text())
    with pytest.raises(errors.UnsupportedError, match="cannot be loaded"):
        native.__wrapped__()


def test_declarations_are_the_same_parsed_when_built_or_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = native().directory
    library = _native._LIBRARY_NAMES.get(sys.platform, "libplansmith.so")
    for name in (library, "plansmith.cdef"):
        (tmp_path / name).symlink_to(directory / name)
    monkeypatch.setenv("PLANSMITH_LIBRARY", str(tmp_path))
    parsed_now = native.__wrapped__()
    cdef_module.main(str(directory / "plansmith.cdef"), str(tmp_path / "plansmith_cdef.py"))
    parsed_before = native.__wrapped__()
    assert type(parsed_now.ffi) is not type(parsed_before.ffi)
    assert layout(parsed_now) == layout(parsed_before) == layout(native())
    assert dir(parsed_now.lib) == dir(parsed_before.lib)


def layout(core: _native.Native) -> dict[str, object]:
    """Return the names, types and offsets of all structs' fields, and what each function is."""

    def kind(ctype: object) -> str:
        return str(ctype).replace("struct ", "")

    structs = [name for name in core.ffi.list_types()[0] if core.ffi.typeof(name).kind == "struct"]
    fields = {
        name: [(field, kind(one.type), one.offset) for field, one in core.ffi.typeof(name).fields]
        for name in structs
        if name != "psm_engine"  # opaque
    }
    members = {name: getattr(core.lib, name) for name in dir(core.lib)}
    functions = {
        name: one if isinstance(one, int) else kind(core.ffi.typeof(one)) for name, one in members.items()
    }
    return {**fields, **functions}


@pytest.mark.parametrize("version", [0, 1, 999, 2000, 2001])
def test_a_library_of_another_version_is_refused(version: int) -> None:
    with pytest.raises(errors.UnsupportedError, match="ABI version"):
        _native._check_abi(version, Path("libplansmith.so"))


def test_a_newer_minor_version_is_taken() -> None:
    _native._check_abi(_native._ABI_MAJOR * 1000 + _native._ABI_MINOR + 5, Path("libplansmith.so"))
