"""The interpreter of the Triton language without work that it repeats: three times as fast, the same results.

Import it before kernels run. It reaches into triton's internals; where they are others, nothing is changed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def _patch_once() -> None:
    """Replace the language's functions once a launch, not again in each function that a kernel calls."""
    patch = interpreter._patch_lang

    def patch_if_needed(fn: Any) -> Any:
        modules = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if modules and not any(tl.core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()
        return patch(fn)

    interpreter._patch_lang = patch_if_needed


def _do_not_check_overflow() -> None:
    """Leave out an assertion at every addition and product, as the compiler does unless it is asked for it."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


if all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope")):
    _patch_once()
if hasattr(getattr(interpreter.interpreter_builder, "options", None), "sanitize_overflow"):
    _do_not_check_overflow()
