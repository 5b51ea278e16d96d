"""Runs handed to the device: which context, set to what, in a graph or not."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..batch import Int32Array
from . import runs
from .buckets import Buckets
from .cuda import Context
from .device_sampler import DeviceSampler
from .graphs import DecodeGraphs
from .plan import Plan
from .pools import Pools
from .runs import Bucket, Run
from .staging import Staging
from .trt import Shape, TrtContext


@dataclasses.dataclass(frozen=True)
class Parts:
    """What opening.py made for an executor, which releases it.

    stack : closes all of it but the context, in order, with the context current
    contexts : one a profile
    new_context : makes another of a profile
    logits : device memory of logits_capacity rows and one more, for what nobody wants
    buckets : None = decode runs keep their own shapes
    graphs : None = this executor captures nothing
    """

    context: Context
    stream: Any
    plan: Plan
    contexts: Sequence[TrtContext]
    new_context: Callable[[int], TrtContext]
    logits: int
    logits_capacity: int
    buckets: Buckets | None
    graphs: DecodeGraphs[TrtContext] | None
    sampler: DeviceSampler | None
    stack: contextlib.ExitStack


class Launcher:
    """Hands runs to an executor's stream. All methods need the CUDA context current.

    row_bytes : of a row of logits
    """

    def __init__(self, parts: Parts, staging: Staging, pools: Pools, row_bytes: int) -> None:
        self._parts = parts
        self._staging = staging
        self._pools = pools
        self._row_bytes = row_bytes
        # What only a bucket's first run has to find out: its profile, and that a context is set to it.
        self._profiles: dict[Bucket, int] = {}
        self._set_to: weakref.WeakKeyDictionary[TrtContext, Bucket] = weakref.WeakKeyDictionary()
        for context in parts.contexts:
            self._bind_pools(context)

    def launch(self, run: Run, first_row: int) -> None:
        """Hand one run to the stream; its logits go to the buffer from first_row on.

        raises ShapeError outside the plan's profiles, CudaError
        """
        parts = self._parts
        inputs = {name: run.inputs[name] for name in parts.plan.inputs}
        addresses = self._staging.send(inputs, parts.stream)
        if run.bucket is not None and first_row == 0:  # decode runs always are at the beginning
            self._launch_bucket(run.bucket, inputs, addresses)
            return
        context = parts.contexts[parts.plan.profile_of(_shapes(inputs))]
        self._set(context, inputs, addresses, first_row)
        context.run(int(parts.stream))

    def _launch_bucket(
        self, bucket: Bucket, inputs: Mapping[str, Int32Array], addresses: Mapping[str, int]
    ) -> None:
        """Hand a padded run to the stream: all runs of a bucket have the same shapes and addresses."""
        parts, graphs = self._parts, self._parts.graphs
        if graphs is not None and graphs.replay(bucket, parts.stream):
            return
        profile = self._profiles.get(bucket)
        if profile is None:
            profile = self._profiles[bucket] = parts.plan.profile_of(_shapes(inputs))
        context = parts.contexts[profile]
        if graphs is not None:
            context = graphs.context(bucket, functools.partial(self._new_context, profile)) or context
        if self._set_to.get(context) != bucket:
            self._set(context, inputs, addresses, 0)
            self._set_to[context] = bucket
        context.run(int(parts.stream))
        if graphs is not None:
            graphs.after_run(bucket, parts.stream)

    def _set(
        self,
        context: TrtContext,
        inputs: Mapping[str, Int32Array],
        addresses: Mapping[str, int],
        first_row: int,
    ) -> None:
        self._set_to.pop(context, None)
        for name, address in addresses.items():
            context.set_input(name, inputs[name].shape, address)
        context.set_address(runs.LOGITS, self._parts.logits + first_row * self._row_bytes)

    def _new_context(self, profile: int) -> TrtContext:
        """Return a further context of a profile, for one graph; DecodeGraphs closes it."""
        made = self._parts.new_context(profile)
        try:
            self._bind_pools(made)
        except BaseException:
            made.close()
            raise
        return made

    def _bind_pools(self, context: TrtContext) -> None:
        for one in self._parts.plan.pools:
            address = self._pools.address(one.layer, one.is_v)
            context.set_input(one.input, self._pools.tensor_shape, address)
            context.set_address(one.output, address)


def _shapes(inputs: Mapping[str, Int32Array]) -> dict[str, Shape]:
    return {name: array.shape for name, array in inputs.items()}
