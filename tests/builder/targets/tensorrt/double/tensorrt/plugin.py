"""Registers plugins by their functions' signatures and calls none: tests/plugins/test_plugin.py does that."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


class TensorDesc:
    """A name to be annotated with, like the others."""


class AutoTuneCombination(TensorDesc):
    pass


class KernelLaunchParams(TensorDesc):
    pass


class SymIntExprs(TensorDesc):
    pass


REGISTERED: dict[str, tuple[list[str], list[str]]] = {}
"""Plugin -> names of its inputs and attributes."""


def register(name: str) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        parameters = inspect.signature(function).parameters
        inputs = [key for key, one in parameters.items() if one.annotation is TensorDesc]
        REGISTERED[name] = (inputs, [key for key in parameters if key not in inputs])
        return function

    return decorate


def autotune(name: str) -> Callable[[Any], Any]:
    return lambda function: function


aot_impl = autotune
