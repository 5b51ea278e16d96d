"""What stands behind a plan file in the double: the graph that was compiled, run by numpy.

A `Plan` is what TensorRT would know of the file: tensors, profiles, bytes; and `run`, one step over arrays that are
the device's memory, pools changed in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from plansmith.builder.graph import contract as graph_contract
from plansmith.builder.limits import Limits
from plansmith.builder.spec import DecoderSpec
from plansmith.builder.targets.rtx import contract, profiles
from rtx_numpy import TRT_Attention, TRT_FP4DynamicQuantize, TRT_KVCacheUpdate

Shape = tuple[int, ...]
Arrays = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class PlanTensor:
    """An input or output; -1 in `shape` is dynamic. aliases : of an output, the input whose memory it is."""

    name: str
    is_input: bool
    dtype: np.dtype[Any]
    shape: Shape
    aliases: str | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a plan file holds.

    profiles : a profile, input name -> (least, best, largest) shape
    weights_bytes, scratch_bytes : on the device; scratch a profile
    streamable_bytes : of the weights, 0 = built without weight streaming
    outputs : input shapes -> shapes of the outputs that are no pools
    run : (inputs with the pools) -> outputs that are no pools; the pools are changed in place
    sms : compute capabilities it runs on
    """

    tensors: tuple[PlanTensor, ...]
    profiles: tuple[Mapping[str, tuple[Shape, Shape, Shape]], ...]
    weights_bytes: int
    scratch_bytes: tuple[int, ...]
    outputs: Callable[[Mapping[str, Shape]], dict[str, Shape]]
    run: Callable[[Arrays], dict[str, Any]]
    sms: tuple[str, ...]
    streamable_bytes: int = 0

    def tensor(self, name: str) -> PlanTensor | None:
        """Return a tensor by name."""
        return next((one for one in self.tensors if one.name == name), None)


class _InPlace(np.ndarray[Any, Any]):
    """An array whose copy is itself: a pool that its update changes where it lies."""

    def copy(self, order: Any = "C") -> Any:
        return self


class InPlaceUpdate(TRT_KVCacheUpdate):
    """The cache op on the cache's own memory, as the device does it."""

    op_domain = contract.DOMAIN

    def _run(self, cache: Any, *args: Any, **attributes: Any) -> tuple[Any]:
        super()._run(cache.view(_InPlace), *args, **attributes)
        return (cache,)


InPlaceUpdate.__name__ = "TRT_KVCacheUpdate"  # the class name is the op's


def rtx_plan(
    model: onnx.ModelProto,
    spec: DecoderSpec,
    limits: Limits,
    *,
    sms: Sequence[str],
    mixed: bool = False,
) -> Plan:
    """Return the plan of a lowered graph, with the profiles and tensors that it is compiled with."""
    session = ReferenceEvaluator(model, new_ops=[InPlaceUpdate, TRT_Attention, TRT_FP4DynamicQuantize])
    compute = _pool_type(model)
    inputs = contract.plan_inputs(spec, limits, compute)
    outputs = contract.plan_outputs(spec, limits, compute)
    names = list(session.output_names)

    def run(arrays: Arrays) -> dict[str, Any]:
        results = dict(zip(names, session.run(None, dict(arrays)), strict=True))
        return {graph_contract.LOGITS: results[graph_contract.LOGITS]}

    def shapes(given: Mapping[str, Shape]) -> dict[str, Shape]:
        return {graph_contract.LOGITS: (given[graph_contract.LOGITS_ROWS][0], spec.vocab_size)}

    tensors = [_tensor(one, is_input=True) for one in inputs] + [
        _tensor(one, is_input=False) for one in outputs
    ]
    made = profiles.make_profiles(spec, limits, mixed=mixed)
    return Plan(
        tensors=tuple(tensors),
        profiles=tuple({one.name: profile.shapes(one) for one in inputs} for profile in made),
        weights_bytes=sum(len(one.raw_data) for one in model.graph.initializer),
        # What a real plan needs grows with the rows of a step; 4 KiB each is in the range of a tiny model's.
        scratch_bytes=tuple(4096 * profile.dims["B"][2] * profile.dims["S"][2] for profile in made),
        outputs=shapes,
        run=run,
        sms=tuple(sms),
    )


def _tensor(one: contract.TensorSpec, is_input: bool) -> PlanTensor:
    alias = None
    if not is_input and one.name != graph_contract.LOGITS:
        alias = one.name.replace("_pool_out.", "_pool.")
    return PlanTensor(one.name, is_input, np.dtype(_numpy_type(one.dtype)), one.shape, alias)


def _numpy_type(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return name


def _pool_type(model: onnx.ModelProto) -> str:
    pool = next(one for one in model.graph.input if graph_contract.is_pool(one.name))
    kinds = {
        onnx.TensorProto.FLOAT: "float32",
        onnx.TensorProto.FLOAT16: "float16",
        onnx.TensorProto.BFLOAT16: "bfloat16",
    }
    return kinds[pool.type.tensor_type.elem_type]
