"""Turn the C API's declarations into a Python module that cffi need not parse: cdef_module.py DECLARATIONS MODULE.

CMake runs it. Loading the module takes 1 ms; parsing the declarations and each type's name took 60 to 100 ms of every
start.
"""

import sys
from pathlib import Path

from cffi import FFI  # type: ignore[import-untyped]


def main(declarations: str, module: str) -> None:
    """Write the module of a file with declarations."""
    ffi = FFI()
    ffi.cdef(Path(declarations).read_text(encoding="utf-8"))
    ffi.set_source(Path(module).stem, None)
    ffi.emit_python_code(module)


if __name__ == "__main__":
    main(*sys.argv[1:])
