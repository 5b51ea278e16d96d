"""The C core, loaded once: libplansmith.so and the declarations that the compiler made of plansmith.h."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from .errors import STATUS_CLASSES, InternalError, UnsupportedError

# The major version must be the same; the library may be newer in the minor one.
_ABI_MAJOR = 1
_ABI_MINOR = 3
_LIBRARY_NAMES = {"darwin": "libplansmith.dylib", "win32": "plansmith.dll"}
# The struct types come as they are and as pointers; these are the others that the package names.
_OTHER_TYPES = (
    "char[]",
    "float[]",
    "int32_t[]",
    "psm_block_copy[]",
    "psm_event[]",
    "psm_iteration_stats[]",
    "psm_kv_event[]",
    "psm_logits_processor",
    "psm_lora_module[]",
    "psm_op_profile[]",
    "psm_retention_range[]",
    "const float**",
    "int32_t*",
    "psm_engine**",
    "size_t*",
    "uint64_t*",
)
_HOW_TO_BUILD = (
    "install plansmith with pip, or build it with `cmake -S . -B build/py -G Ninja && ninja -C build/py` and "
    "set PLANSMITH_LIBRARY to build/py"
)


@dataclasses.dataclass(frozen=True)
class Native:
    """The loaded library. `ffi` and `lib` are cffi's; calls through `lib` release the GIL."""

    ffi: Any
    lib: Any
    directory: Path

    def check(self, status: int) -> None:
        """Raise the class that mirrors `status`, with the core's message; nothing for PSM_OK.

        Call it on the thread of the failed call, before any other call: the message is thread-local.
        """
        if status != 0:
            text = self.text(self.lib.psm_last_error()) or self.text(self.lib.psm_status_text(status))
            raise STATUS_CLASSES.get(status, InternalError)(text)

    def text(self, pointer: Any) -> str:
        """Return a C string as text; "" for NULL."""
        if pointer == self.ffi.NULL:
            return ""
        return bytes(self.ffi.string(pointer)).decode("utf-8", "replace")

    def struct_size(self, type_name: str) -> int:
        """Return the size of a struct up to its last field, as the header's PSM_..._SIZE macros do."""
        fields = self.ffi.typeof(type_name).fields
        last = fields[-1][1]
        return int(last.offset + self.ffi.sizeof(last.type))

    def new(self, type_name: str) -> Any:
        """Return a zeroed struct with its struct_size set."""
        struct = self.ffi.new(f"{type_name}*")
        struct.struct_size = self.struct_size(type_name)
        return struct


@functools.cache
def native() -> Native:
    """Load the core on the first call and return it. Any thread.

    raises UnsupportedError when the library is not there or is of another ABI version
    """
    directory = _library_directory()
    library = directory / _LIBRARY_NAMES.get(sys.platform, "libplansmith.so")
    missing = [path.name for path in (library, directory / "plansmith.cdef") if not path.is_file()]
    if missing:
        raise UnsupportedError(f"{directory} has no {' and no '.join(missing)}: {_HOW_TO_BUILD}")
    ffi = _declared(directory)
    try:
        lib = ffi.dlopen(str(library))
    except OSError as error:
        raise UnsupportedError(f"{library} cannot be loaded ({error}): {_HOW_TO_BUILD}") from error
    _check_abi(int(lib.psm_abi_version()), library)
    _resolve(ffi, lib)
    return Native(ffi, lib, directory)


def _declared(directory: Path) -> Any:
    """Return an FFI with the library's declarations: those parsed when it was built, else parsed now."""
    module = importlib.util.spec_from_file_location("plansmith_cdef", directory / "plansmith_cdef.py")
    if (directory / "plansmith_cdef.py").is_file() and module is not None and module.loader is not None:
        made = importlib.util.module_from_spec(module)
        module.loader.exec_module(made)
        return made.ffi
    from cffi import FFI  # type: ignore[import-untyped]  # with the parser 30 ms

    ffi = FFI()
    ffi.cdef((directory / "plansmith.cdef").read_text(encoding="utf-8"))
    return ffi


def _resolve(ffi: Any, lib: Any) -> None:
    # cffi takes a lock where it first meets a function or a type. A fork while another thread is there, such as an
    # engine's in its first step, would leave that lock taken for good in the child.
    for name in dir(lib):
        getattr(lib, name)
    structs = [name for name in ffi.list_types()[0] if ffi.typeof(name).kind == "struct"]
    for type_name in (*structs, *(f"{name}*" for name in structs), *_OTHER_TYPES):
        ffi.typeof(type_name)


def _library_directory() -> Path:
    override = os.environ.get("PLANSMITH_LIBRARY")
    return Path(override).absolute() if override else Path(__file__).parent


def _check_abi(version: int, library: Path) -> None:
    major, minor = divmod(version, 1000)
    if major != _ABI_MAJOR or minor < _ABI_MINOR:
        raise UnsupportedError(
            f"{library} has ABI version {major}.{minor}, this package needs {_ABI_MAJOR}.{_ABI_MINOR} or a "
            f"later {_ABI_MAJOR}.x: {_HOW_TO_BUILD}"
        )
