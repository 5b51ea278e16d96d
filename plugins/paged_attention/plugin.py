"""PagedAttention as quickly deployable plugins of TensorRT 11: their kernels go into the plan, which needs no library.

`register_plugins(tensorrt, tensorrt.plugin, sm)` before a network is parsed; plugin_ops.py lists the plugins. Every
kernel is compiled here for the one GPU, its parameters put into the order that TensorRT passes (../ptx_entry.py):
inputs, numbers, outputs. A kernel's ":16" promises hold: network inputs and outputs have the alignment that cudaMalloc
gives, and what lies between layers has it too.

TensorRT is given nothing to choose by timing: it times a layer on numbers of its own, which are no step, and kernels
that are held within their tensors (spec.guarded) end at once on them. So there is no autotune function, which means the
types of the network as it is and plain layouts, and one kernel a node.

The functions that TensorRT is given take tensors, then attributes; since TensorRT reads names and types off their
signatures, those are made from the lists.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...runtime.errors import BuildError
from ..aot import CompiledKernel, compile_kernels
from ..kernel import Kernel
from ..ptx_entry import at_most_version, named_by_content, reorder
from . import spec
from .plugin_ops import LAUNCH_SHARED_BYTES, NAMESPACE, OPS, Layer, PluginOp


def register_plugins(trt: Any, trtp: Any, sm: int, *, shared_bytes: int = LAUNCH_SHARED_BYTES) -> None:
    """Register every plugin with TensorRT, once a process.

    trt, trtp : the modules tensorrt and tensorrt.plugin
    sm : compute capability of the GPU that plans are built for, e.g. 90
    shared_bytes : the most shared memory that a kernel may take; see LAUNCH_SHARED_BYTES
    raises (when a network is built) : UnsupportedError without triton, BuildError for a kernel that does not compile
    """
    kernels = _Kernels(sm, shared_bytes)
    for op in OPS:
        plugin = _Plugin(trt, trtp, op, kernels)
        name = f"{NAMESPACE}::{op.name}"
        trtp.register(name)(plugin.describe())
        trtp.aot_impl(name)(plugin.implement())


class _Kernels:
    """Compiles each kernel once, with the tile and pipeline that fit."""

    def __init__(self, sm: int, shared_bytes: int) -> None:
        self.sm = sm
        self._shared_bytes = shared_bytes
        self._made: dict[str, CompiledKernel] = {}

    def fitting(self, kernel: Kernel, min_rows: int) -> CompiledKernel:
        """Return the first of smaller_tiles that takes no more than the shared memory there is; BuildError if none."""
        key = repr(kernel)
        if key not in self._made:
            for tiles in smaller_tiles(kernel, min_rows):
                made = compile_kernels(tiles, [self.sm])
                fits = [one for one in made if one.shared_bytes <= self._shared_bytes]
                if fits:
                    self._made[key] = fits[0]
                    break
            else:
                raise BuildError(
                    f"{kernel.name} takes more than {self._shared_bytes} bytes of shared memory with every tile; build "
                    "this model for cpu"
                )
        return self._made[key]


def smaller_tiles(kernel: Kernel, min_rows: int) -> Iterator[list[Kernel]]:
    """Yield a kernel and what takes less shared memory, the best first, in groups that are compiled together.

    First shallower pipelines, which change no bit, as long as the loads of one tile run ahead; then half the
    positions or half the rows, whichever are more; at 16 of both no pipeline. A kernel without tiles has no other.

    min_rows : of a tile, the heads of a group
    """
    rows, positions = kernel.constants.get("M"), kernel.constants.get("N")
    if not isinstance(rows, int) or not isinstance(positions, int):
        yield [kernel]
        return
    min_rows = max(_MIN_TILE, min_rows)
    num_warps = kernel.num_warps
    while True:
        is_last = positions <= _MIN_TILE and rows <= min_rows
        depths = range(kernel.num_stages, 0 if is_last else min(kernel.num_stages, 2) - 1, -1)
        tile = dataclasses.replace(
            kernel, constants={**kernel.constants, "M": rows, "N": positions}, num_warps=num_warps
        )
        yield [dataclasses.replace(tile, num_stages=stages) for stages in depths]
        if is_last:
            return
        if positions > _MIN_TILE and (positions >= rows or rows <= min_rows):
            positions //= 2
        else:
            rows, num_warps = rows // 2, max(4, num_warps // 2)


class _Plugin:
    """One plugin's two functions."""

    def __init__(self, trt: Any, trtp: Any, op: PluginOp, kernels: _Kernels) -> None:
        self._trt, self._trtp, self._op, self._kernels = trt, trtp, op, kernels

    def describe(self) -> Callable[..., Any]:
        """Return what says the outputs' types and shapes; it runs with symbols that stand for nothing, too."""
        op, trt, trtp = self._op, self._trt, self._trtp

        def described(*descs: Any, **attributes: Any) -> Any:
            inputs = dict(zip(op.inputs, descs, strict=True))
            shapes = op.shapes(attributes, {name: desc.shape_expr for name, desc in inputs.items()})
            outputs = []
            for name in op.outputs:
                if name in inputs:
                    outputs.append(inputs[name].aliased())
                    continue
                like = op.like.get(name)
                dtype = trt.DataType.FLOAT if like is None else inputs[like].dtype
                outputs.append(trtp.from_shape_expr(shapes[name], dtype))
            return tuple(outputs)

        returns: Any = tuple(trtp.TensorDesc for _ in op.outputs)
        return self._signed(described, tuple[returns])

    def implement(self) -> Callable[..., Any]:
        """Return what gives the kernel, its launch and its numbers."""
        trtp = self._trtp

        def implementation(*arguments: Any) -> Any:
            descs, attributes = self._split(arguments)
            shapes = {name: desc.shape_expr for name, desc in descs.items()}
            layer = _layer(descs, attributes, self._kernels.sm)
            made = self._kernels.fitting(self._op.kernel(layer), min_rows=self._op.min_rows(layer))
            launch = self._op.launch(layer, made.kernel, shapes)
            grid = trtp.KernelLaunchParams()
            grid.grid_x, grid.grid_y, grid.grid_z = launch.grid
            grid.block_x = 32 * made.num_warps
            grid.shared_mem = made.shared_bytes
            numbers = trtp.SymIntExprs(len(launch.numbers))
            for n, value in enumerate(launch.numbers.values()):
                numbers[n] = trtp.SymInt32(value)
            ptx = reorder(made.ptx, list(made.kernel.signature), self._op.order(made.kernel, launch.numbers))
            ptx, symbol = named_by_content(at_most_version(ptx, _PTX_VERSION), made.symbol)
            return symbol, ptx, grid, numbers

        returns: Any = (str, str, trtp.KernelLaunchParams, trtp.SymIntExprs)
        return self._signed(implementation, tuple[returns], "outputs", "tactic")

    def _split(self, arguments: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return inputs and attributes by name, of a call with inputs, attributes and more, in order."""
        op, count = self._op, len(self._op.inputs)
        descs = dict(zip(op.inputs, arguments, strict=False))
        named = zip(op.attributes.items(), arguments[count:], strict=False)
        return descs, {name: kind(value) for (name, kind), value in named}

    def _signed(self, function: Callable[..., Any], returns: Any, *more: str) -> Callable[..., Any]:
        """Give a function the parameters that TensorRT reads: tensors, attributes, and what else it passes."""
        op, trtp = self._op, self._trtp
        types: dict[str, Any] = dict.fromkeys(op.inputs, trtp.TensorDesc)
        types |= op.attributes
        types |= {name: _MORE[name](trtp, op) for name in more}
        parameters = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
            for name, kind in types.items()
        ]
        signature = inspect.Signature(parameters, return_annotation=returns)
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function


_MIN_TILE = 16  # what a product takes
_PTX_VERSION = (8, 8)  # CUDA 12.9's, the first with sm103: a driver need not be as new as our compiler
_MORE: dict[str, Callable[[Any, PluginOp], Any]] = {
    "outputs": lambda trtp, op: tuple[tuple(trtp.TensorDesc for _ in op.outputs)],  # type: ignore[misc]
    "tactic": lambda trtp, op: int,
}
_DTYPES: dict[str, spec.Dtype] = {"HALF": "fp16", "BF16": "bf16"}
_POOL_TYPES: dict[str, spec.Kv] = {"FP8": "fp8", "INT8": "int8"}


def _layer(descs: Mapping[str, Any], attributes: Mapping[str, Any], sm: int) -> Layer:
    """Return what the types and shapes of a node's inputs say; ValueError where no kernel takes them."""
    rows = next(name for name in ("q", "k", "out") if name in descs)
    kind = descs[rows].dtype.name
    if kind not in _DTYPES:
        raise ValueError(f"{rows} is {kind}, the attention plugins take HALF and BF16")
    pool = descs.get("k_pool")
    if pool is None:
        # Combine cannot tell by a pool whether there is a scale: the variant with one multiplies by 1 exactly.
        return Layer(_DTYPES[kind], "fp8", 0, attributes, sm)
    if pool.dtype.name not in (kind, *_POOL_TYPES):
        raise ValueError(f"k_pool is {pool.dtype.name}, it may be {kind}, FP8 or INT8")
    return Layer(_DTYPES[kind], _POOL_TYPES.get(pool.dtype.name, "same"), pool.shape[2], attributes, sm)
