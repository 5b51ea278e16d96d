"""Bytes of a model's weights at a recipe on a target, from shapes alone.

The graph of the build is made over weights that are not there, and on the cpu target lowered and laid out as a plan
file is. So the numbers are the build's own: of cpu the size of the plan to the byte, of a GPU what the graph holds, and
the embedding's table again where its compiler makes a second one. A model of 80 layers takes half a second.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os

import numpy as np
import onnx_ir as ir

from ..runtime.errors import InternalError, InvalidArgumentError
from ..sizing.cpu_plan import KV_VALUE_BYTES, CpuPlan, head_counts, rounded_input
from ..sizing.memory import VALUE_BYTES, ModelShape
from ..sizing.roofline import Work
from ..sizing.rtx_plan import kernel_source_bytes
from ..sizing.skus import Sku
from .checkpoint import WeightSource
from .checkpoint.weights import Array
from .graph import build_graph, weight_bytes
from .limits import Limits
from .precision import GROUP_SIZES, PRECISIONS, RECIPES, FloatType, Precision, group_size, of_checkpoint
from .scheme import FP4_GROUP, ROW, WHOLE, KvFormat, Quantization, QuantizedInput, QuantizedWeight, Scheme
from .spec import DecoderSpec, weight_shapes
from .targets.registry import CPU, Target, compute_dtype, find_targets, kv_dtype, recipe_for
from .targets.rtx.targets import TARGETS as RTX_TARGETS

# What `plansmith quantize` makes of each layer by recipe; int4's group follows from the layer.
_SCHEMES: dict[str, Scheme] = {
    "fp8": Scheme("fp8", WHOLE, input="fp8", input_group=WHOLE),
    "fp8_per_channel": Scheme("fp8", ROW, input="fp8", input_group=ROW),
    "int8_sq": Scheme("int8", ROW, input="int8", input_group=WHOLE),
    "int8_wo": Scheme("int8", ROW),
    "int4_awq": Scheme("int4"),
    "int4_wo": Scheme("int4"),
    "w4a8_awq": Scheme("int4", input="fp8", fp8_grid=True),
    "nvfp4": Scheme("fp4", FP4_GROUP, input="fp4"),
    "nvfp4_wo": Scheme("fp4", FP4_GROUP),
}
assert _SCHEMES.keys() == set(RECIPES)
# What a product's factors are, by what its input is rounded to: weights alone are decoded to floats first.
_FACTORS = {"float": "float16", "int8": "int8", "fp8": "fp8", "fp4": "fp4"}


@dataclasses.dataclass(frozen=True)
class PlanSizes:
    """What a plan will hold.

    weight_bytes : that the device holds; of cpu the whole plan file
    by_type : the graph's weights' bytes by the stored type's name
    read_bytes : of weights that a decode step reads: all but a table that is gathered alone, of which it reads rows
    source_bytes : of a GPU's plan file, what is there beside the weights; None where that is not known
    compute_dtype, kv_dtype : of activations, and of values in the KV pools
    cpu_plan : of the cpu target, what decides its other memory; None on a GPU
    """

    weight_bytes: int
    by_type: dict[str, int]
    read_bytes: int
    compute_dtype: str
    kv_dtype: str
    cpu_plan: CpuPlan | None = None
    source_bytes: int | None = None

    @property
    def file_bytes(self) -> int | None:
        """Bytes of the plan file; None where they are not known."""
        if self.cpu_plan is not None:
            return self.weight_bytes
        return None if self.source_bytes is None else self.weight_bytes + self.source_bytes

    @property
    def kv_value_bytes(self) -> int:
        """Bytes of a value in the KV pools."""
        return VALUE_BYTES[self.kv_dtype]


class ShapesOnly:
    """A WeightSource and QuantizedSource of a spec whose weights nobody has; every shape, no value."""

    def __init__(self, spec: DecoderSpec) -> None:
        self._shapes = weight_shapes(spec)

    def names(self) -> tuple[str, ...]:
        """Return all names."""
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a weight's shape."""
        return self._shapes[name]

    def get(self, name: str) -> Array:
        """Fail: who asks for values needs a checkpoint."""
        raise InternalError(f"the values of {name} are asked for, and there are shapes alone")

    def quantized(self, name: str) -> QuantizedWeight:
        """Return the factor of FP4's scales, which a lowering reads; 1 stands for any."""
        return QuantizedWeight(np.empty(0, np.int8), np.ones(1, np.float32))

    def quantized_input(self, name: str) -> QuantizedInput:
        """Return a static input's scale; 1 stands for any."""
        return QuantizedInput()

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """Return scales of K and V; 1 stands for any."""
        return 1.0, 1.0


def shape_of(spec: DecoderSpec) -> ModelShape:
    """Return a spec in the numbers that sizing works with."""
    return ModelShape(
        spec.num_layers,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.hidden_size,
        spec.intermediate_size,
        spec.vocab_size,
    )


def sku_target(sku: Sku) -> Target:
    """Return the target whose plans run on a GPU: TensorRT-RTX's where that compiler has it, else TensorRT's."""
    return find_targets([sku.sm])[0]


def pages_are_gathered(target: Target) -> bool:
    """Return whether a target's plans copy the KV blocks of a step's sequences together first (rtx/lowering.py)."""
    return target.name in RTX_TARGETS


def assumed_recipe(name: str, spec: DecoderSpec, kv: KvFormat | None = None) -> Precision:
    """Return a recipe by its name, as it would come out for a checkpoint that is not quantized yet.

    name : of --precision, or of `plansmith quantize --recipe`, which leaves the logits product float
    kv : what the KV pools hold; None = the target's choice
    raises InvalidArgumentError for a name that is not known, and for layers that it cannot quantize
    """
    if name in PRECISIONS:
        return dataclasses.replace(PRECISIONS[name], kv_format=kv)
    if name not in _SCHEMES:
        known = ", ".join([*PRECISIONS, *_SCHEMES])
        raise InvalidArgumentError(f"--precision {name!r} is not known; choose one or more of {known}")
    schemes = tuple(
        (layer.removesuffix(".weight"), _scheme(name, layer, shape[1]))
        for layer, shape in weight_shapes(spec).items()
        if len(shape) == 2 and layer.startswith("layers.")
    )
    float_type: FloatType = "float16" if spec.dtype == "float16" else "bfloat16"
    return dataclasses.replace(
        of_checkpoint(Quantization(name, "plansmith quantize", schemes), float_type), kv_format=kv
    )


def _scheme(name: str, layer: str, columns: int) -> Scheme:
    scheme = _SCHEMES[name]
    if scheme.weight == "fp4" and columns % FP4_GROUP:
        raise InvalidArgumentError(
            f"--precision {name} needs blocks of {FP4_GROUP} columns, {layer} has {columns}; leave it out"
        )
    if scheme.weight != "int4":
        return scheme
    group = group_size(columns, GROUP_SIZES[0])
    if group == ROW:
        raise InvalidArgumentError(
            f"--precision {name} needs groups of {' or '.join(map(str, GROUP_SIZES))} columns, {layer} has {columns}; "
            "leave it out"
        )
    return dataclasses.replace(scheme, weight_group=group)


def plan_sizes(
    spec: DecoderSpec,
    recipe: Precision,
    limits: Limits,
    target: Target,
    weights: WeightSource | None = None,
) -> PlanSizes:
    """Return what a plan of a target will hold; no weight is read, nothing is written.

    weights : of a checkpoint that is there, which a quantized one must be; None = shapes alone
    raises what build_graph raises, e.g. InvalidArgumentError for groups that do not divide a layer's inputs
    """
    source = ShapesOnly(spec) if weights is None else weights
    found, compute = recipe_for(target, recipe), compute_dtype(target, spec, recipe)
    model = build_graph(spec, source, found, limits, compute=compute)
    by_type = weight_bytes(model)
    total = sum(by_type.values())
    table = model.graph.initializers.get("embed.weight")
    table_bytes = 0 if table is None or table.const_value is None else table.const_value.nbytes
    gathered = 0 if spec.tie_embeddings else table_bytes
    plan, kernels = None, None
    if target.compiler == CPU:
        plan, by_type = _cpu_plan(model, spec, limits)
        total = plan.file_bytes
    elif spec.tie_embeddings and found.scheme("lm_head", spec.hidden_size).weight != "float":
        # TensorRT-RTX 1.7 keeps the codes transposed for the logits product, and as they are for the rows.
        total, gathered = total + table_bytes, table_bytes
    if pages_are_gathered(target):
        kernels = kernel_source_bytes(spec.family, spec.num_layers, is_quantized=found.is_quantized)
    kv = kv_dtype(target, spec, recipe)
    return PlanSizes(total, by_type, total - gathered, compute, kv, plan, kernels)


def plan_work(spec: DecoderSpec, recipe: Precision, target: Target, sizes: PlanSizes) -> Work:
    """Return what a plan reads and multiplies, for its predicted speed."""
    found = recipe_for(target, recipe)
    products: collections.Counter[str] = collections.Counter()
    for name, shape in weight_shapes(spec).items():
        if len(shape) == 2 and name.startswith("layers."):
            scheme = found.scheme(name.removesuffix(".weight"), shape[1])
            products[_FACTORS[scheme.input]] += math.prod(shape)
    head = found.scheme("lm_head", spec.hidden_size)
    return Work(
        weight_bytes=sizes.read_bytes,
        products=dict(products),
        head={_FACTORS[head.input]: spec.vocab_size * spec.hidden_size},
        kv_value_bytes=sizes.kv_value_bytes,
        windows=tuple(layer.window for layer in spec.layers)
        if any(one.window for one in spec.layers)
        else (),
    )


def _cpu_plan(model: ir.Model, spec: DecoderSpec, limits: Limits) -> tuple[CpuPlan, dict[str, int]]:
    """Return the numbers of the plan that a graph becomes, and its weights' bytes by type."""
    from .targets.cpu.compile import header_fields
    from .targets.cpu.lowering import lower
    from .targets.cpu.plan_file import LinearInput, OpCode
    from .targets.cpu.plan_writer import PlanWriter, total_bytes

    program = lower(model, header_fields(spec, limits))
    linears = [op for op in program.ops if op.code is OpCode.LINEAR and op.i[1:2] > (LinearInput.FLOAT,)]
    rounded = [
        rounded_input(tensor.cols, tensor.layout, tensor.group_size, op.i[1])
        for op in linears
        for tensor in [program.tensors[op.tensors[0]]]
    ]
    plan = CpuPlan(
        shape=dataclasses.replace(shape_of(spec), intermediate_size=0),
        file_bytes=int(PlanWriter(os.devnull, program).header["file_bytes"]),
        slot_widths=tuple(slot.width for slot in program.slots),
        logits_slot=program.logits_slot,
        rounded=tuple(dict.fromkeys(rounded)),
        head_counts=head_counts((op.code, op.i[0]) for op in program.ops if op.i),
        kv_value_bytes=KV_VALUE_BYTES[program.kv_format],
        max_batch_size=limits.max_batch_size,
        max_num_tokens=limits.max_num_tokens,
        max_seq_len=limits.max_seq_len,
        tokens_per_block=limits.tokens_per_block,
    )
    return plan, total_bytes(program.tensors)
