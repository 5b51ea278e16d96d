"""PagedAttention as quickly deployable plugins of TensorRT 11: their kernels go into the plan, which needs no library.

`register_plugins(tensorrt, tensorrt.plugin, sm)` before a network is parsed; plugin_ops.py lists the plugins. Every
kernel is compiled here for the one GPU, its parameters put into the order that TensorRT passes (../ptx_entry.py):
inputs, numbers, outputs. A kernel's ":16" promises hold: network inputs and outputs have the alignment that cudaMalloc
gives, and what lies between layers has it too.

The functions that TensorRT is given take tensors, then attributes; since TensorRT reads names and types off their
signatures, those are made from the lists.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..aot import CompiledKernel, compile_kernels
from ..kernel import Kernel
from ..ptx_entry import at_most_version, reorder
from . import spec
from .plugin_ops import LAUNCH_SHARED_BYTES, NAMESPACE, OPS, Layer, PluginOp

STAGES = (1, 2, 3)
"""Depths of a kernel's pipeline that TensorRT may choose among by timing them: none changes a bit of the result."""


def register_plugins(
    trt: Any, trtp: Any, sm: int, *, shared_bytes: int = LAUNCH_SHARED_BYTES, stages: Sequence[int] = STAGES
) -> None:
    """Register every plugin with TensorRT, once a process.

    trt, trtp : the modules tensorrt and tensorrt.plugin
    sm : compute capability of the GPU that plans are built for, e.g. 90
    shared_bytes : the most shared memory that a kernel may take; see LAUNCH_SHARED_BYTES
    stages : pipeline depths to choose among
    raises (when a network is built) : UnsupportedError without triton, BuildError for a kernel that does not compile
    """
    kernels = _Kernels(sm, shared_bytes, stages)
    for op in OPS:
        plugin = _Plugin(trt, trtp, op, kernels)
        name = f"{NAMESPACE}::{op.name}"
        trtp.register(name)(plugin.describe())
        trtp.autotune(name)(plugin.autotune())
        trtp.aot_impl(name)(plugin.implement())


class _Kernels:
    """Compiles each variant once."""

    def __init__(self, sm: int, shared_bytes: int, stages: Sequence[int]) -> None:
        self.sm = sm
        self._stages = stages
        self._shared_bytes = shared_bytes
        self._made: dict[str, CompiledKernel] = {}

    def variants(self, kernel: Kernel) -> dict[int, CompiledKernel]:
        """Return the kernel by its number of stages, those that fit; fewer positions a tile where none does."""
        if "M" not in kernel.constants:  # no tiles, no pipeline
            return {kernel.num_stages: self._compile([kernel])[0]}
        while True:
            made = self._compile([dataclasses.replace(kernel, num_stages=stages) for stages in self._stages])
            fitting = {one.kernel.num_stages: one for one in made if one.shared_bytes <= self._shared_bytes}
            positions = kernel.constants["N"]
            assert isinstance(positions, int)
            if fitting or positions <= 16:
                break
            kernel = dataclasses.replace(kernel, constants={**kernel.constants, "N": positions // 2})
        if not fitting:
            raise ValueError(f"{kernel.name} takes more than {self._shared_bytes} bytes of shared memory")
        return fitting

    def _compile(self, kernels: Sequence[Kernel]) -> list[CompiledKernel]:
        missing = {repr(one): one for one in kernels if repr(one) not in self._made}
        made = compile_kernels(list(missing.values()), [self.sm])
        self._made.update(zip(missing, made, strict=True))
        return [self._made[repr(one)] for one in kernels]


class _Plugin:
    """One plugin's three functions."""

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

        returns = tuple[tuple(trtp.TensorDesc for _ in op.outputs)]  # type: ignore[misc]
        return self._signed(described, returns)

    def autotune(self) -> Callable[..., Any]:
        """Return what says the types of the network as it is, and the variants of the kernel to be timed."""

        def combinations(*arguments: Any) -> Any:
            descs, attributes, outputs = self._split(arguments)
            found = self._trtp.AutoTuneCombination()
            for n, desc in enumerate((*descs.values(), *outputs)):
                found.pos([n], _TYPE_WORDS.get(desc.dtype.name, desc.dtype.name))
            found.tactics(list(self._variants(descs, attributes)))
            return [found]

        return self._signed(combinations, list[self._trtp.AutoTuneCombination], "outputs")

    def implement(self) -> Callable[..., Any]:
        """Return what gives the kernel, its launch and its numbers."""
        trtp = self._trtp

        def implementation(*arguments: Any) -> Any:
            *arguments_, tactic = arguments
            descs, attributes, _ = self._split(arguments_)
            variants = self._variants(descs, attributes)
            shapes = {name: desc.shape_expr for name, desc in descs.items()}
            launch = self._op.launch(_layer(descs, attributes, self._kernels.sm), shapes)
            # 0: TensorRT asks for the default where it did not time any.
            made = variants[tactic] if tactic in variants else variants[max(variants)]
            grid = trtp.KernelLaunchParams()
            grid.grid_x, grid.grid_y, grid.grid_z = launch.grid
            grid.block_x = 32 * made.num_warps
            grid.shared_mem = made.shared_bytes
            numbers = trtp.SymIntExprs(len(launch.numbers))
            for n, value in enumerate(launch.numbers.values()):
                numbers[n] = trtp.SymInt32(value)
            order = self._op.order(made.kernel, launch.numbers)
            ptx = reorder(made.ptx, list(made.kernel.signature), order)
            return made.symbol, at_most_version(ptx, _PTX_VERSION), grid, numbers

        returns = tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]
        return self._signed(implementation, returns, "outputs", "tactic")

    def _variants(self, descs: Mapping[str, Any], attributes: Mapping[str, Any]) -> dict[int, CompiledKernel]:
        """Return the kernels that a node may launch, by tactic; no symbol can be computed with where it is asked."""
        return self._kernels.variants(self._op.kernel(_layer(descs, attributes, self._kernels.sm)))

    def _split(self, arguments: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any], Sequence[Any]]:
        """Return inputs and attributes by name, and the outputs, of a call with all of them in order."""
        op = self._op
        count = len(op.inputs)
        descs = dict(zip(op.inputs, arguments[:count], strict=True))
        values = arguments[count : count + len(op.attributes)]
        attributes = {
            name: kind(value) for (name, kind), value in zip(op.attributes.items(), values, strict=True)
        }
        (outputs,) = arguments[count + len(op.attributes) :]
        return descs, attributes, outputs

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


_PTX_VERSION = (
    8,
    8,
)  # CUDA 12.9's, the first with sm103 and sm121: every driver that TensorRT 11 runs on reads it
_MORE: dict[str, Callable[[Any, PluginOp], Any]] = {
    "outputs": lambda trtp, op: tuple[tuple(trtp.TensorDesc for _ in op.outputs)],  # type: ignore[misc]
    "tactic": lambda trtp, op: int,
}
_TYPE_WORDS = {"FLOAT": "FP32", "HALF": "FP16"}
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
