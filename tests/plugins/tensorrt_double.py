"""TensorRT's own Python plugin modules (package tensorrt-cu13-bindings) over a native module that is not TensorRT's.

Its native module needs libraries that only a machine with the full TensorRT has. What stands in for it here is
TensorRT-RTX's, which has the same plugin classes and a registry, and for the rest classes of this file: symbols that
are evaluated, and what quickly deployable plugins with kernels need. Only for a process that never parses a network.
"""

from __future__ import annotations

import enum
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import tensorrt_rtx


class QuickPluginCreationRequest(enum.Enum):
    UNKNOWN, PREFER_JIT, PREFER_AOT, STRICT_JIT, STRICT_AOT = range(5)


class IPluginV3QuickAOTBuild(tensorrt_rtx.IPluginV3QuickBuild):
    """The capability that tensorrt_rtx lacks; only a base class here."""


class IDimensionExpr:
    """A symbol: a number that is fixed, or a function of the numbers that stand for the free ones."""

    def __init__(self, value: int | Callable[[Mapping[str, int]], int]) -> None:
        self.value = value

    def is_constant(self) -> bool:
        return isinstance(self.value, int)

    def get_constant_value(self) -> int:
        assert isinstance(self.value, int), "a free dimension was read as a number"
        return self.value

    def at(self, free: Mapping[str, int]) -> int:
        return self.value if isinstance(self.value, int) else self.value(free)


def symbol(name: str) -> IDimensionExpr:
    """A free dimension."""
    return IDimensionExpr(lambda free: free[name])


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "SUM": lambda a, b: a + b,
    "SUB": lambda a, b: a - b,
    "PROD": lambda a, b: a * b,
    "MAX": max,
    "MIN": min,
    "FLOOR_DIV": lambda a, b: a // b,
    "CEIL_DIV": lambda a, b: -(-a // b),
}


class ExprBuilder:
    """What TensorRT gives a plugin to make symbols with."""

    def constant(self, value: int) -> IDimensionExpr:
        return IDimensionExpr(value)

    def operation(self, kind: Any, a: IDimensionExpr, b: IDimensionExpr) -> IDimensionExpr:
        compute = _OPERATIONS[kind.name]
        if a.is_constant() and b.is_constant():
            return IDimensionExpr(compute(a.get_constant_value(), b.get_constant_value()))
        return IDimensionExpr(lambda free: compute(a.at(free), b.at(free)))


class ISymExpr:
    """A number that a kernel is given."""

    type: Any = None
    dtype: Any = None
    expr: Any = None


class DimsExprs(list[Any]):
    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


class PluginTensorDesc:
    def __init__(self, type: Any = None, dims: Any = ()) -> None:
        self.type, self.dims, self.format, self.scale = type, dims, tensorrt_rtx.TensorFormat.LINEAR, -1.0


class DynamicPluginTensorDesc:
    def __init__(self, type: Any, dims: Any) -> None:
        self.desc = PluginTensorDesc(type, dims)
        self.min = self.max = self.opt = dims


class SymExprSetter(list[Any]):
    """Where a plugin puts the numbers of its kernel."""

    def __setattr__(self, name: str, value: int) -> None:
        assert name == "nbSymExprs"
        self[:] = [None] * value


def load() -> tuple[Any, Any]:
    """Return (tensorrt, tensorrt.plugin) and leave them where `import tensorrt` finds them."""
    trt = types.ModuleType("tensorrt")
    trt.__dict__.update({name: getattr(tensorrt_rtx, name) for name in dir(tensorrt_rtx) if name[0] != "_"})
    own = (QuickPluginCreationRequest, IPluginV3QuickAOTBuild, IDimensionExpr, ISymExpr, DimsExprs)
    trt.__dict__.update({one.__name__: one for one in (*own, PluginTensorDesc, DynamicPluginTensorDesc)})
    trt.__version__ = "11.4.0.106"  # type: ignore[attr-defined]
    found = importlib.util.find_spec("tensorrt_bindings")
    assert found is not None and found.submodule_search_locations
    trt.__path__ = []
    sys.modules["tensorrt"] = trt
    folder = pathlib.Path(found.submodule_search_locations[0]) / "plugin"
    spec = importlib.util.spec_from_file_location(
        "tensorrt.plugin", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    plugin = importlib.util.module_from_spec(spec)
    sys.modules["tensorrt.plugin"] = trt.plugin = plugin  # type: ignore[attr-defined]
    spec.loader.exec_module(plugin)
    return trt, plugin
