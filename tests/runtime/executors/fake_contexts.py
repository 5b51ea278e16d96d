"""TensorRT's execution context in the double: shapes and addresses checked, a run put into a stream."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import numpy as np
import tensorrt_rtx as real
from fake_memory import Allocation
from fake_plans import Plan, PlanTensor, Shape
from fake_streams import Reach, Stream, Work

_ALIGN = 256  # of every address, TensorRT's own rule


class ExecutionContext:
    """trt.IExecutionContext. own : scratch memory that it allocated itself; None = the user gives it."""

    def __init__(self, engine: Any, plan: Plan, config: Any, own: Allocation | None) -> None:
        self.engine, self._plan, self._config, self._own = engine, plan, config, own
        self._module = engine._module
        self._cuda = self._module.cuda
        self.active_optimization_profile = 0 if engine._num_contexts == 1 else -1
        self.name, self.debug_sync, self.nvtx_verbosity = "double", False, real.ProfilingVerbosity.NONE
        self.enqueue_emits_profile, self.error_recorder, self.profiler = True, None, None
        self._scratch = (own.address, own.size) if own else (0, 0)
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}
        self._warm: set[tuple[Any, ...]] = set()
        self._last_shapes: tuple[Any, ...] = ()
        self._in_flight: list[Any] = []
        self._cuda.trt_objects.add(self)

    def __del__(self) -> None:
        self.engine._num_contexts -= 1
        memory = self._cuda.memory
        pending = {id(work) for work in self._cuda.streams.pending}
        is_broken = self._cuda.streams.fault is not None  # nothing that is queued will ever run
        if not is_broken and any(one() is not None and id(one()) in pending for one in self._in_flight):
            memory.violations.append("a context was destroyed while a run of it was queued")
        if self._own is not None:
            memory.free(self._own.address, "engine")

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if not 0 <= profile_index < len(self._plan.profiles):
            return self._refuse(f"Invalid optimization profile {profile_index}")
        if self._module.call("set_profile"):
            return self._refuse("Setting the optimization profile failed")
        if profile_index != self.active_optimization_profile:
            self._shapes.clear()
        self.active_optimization_profile = profile_index
        return True

    def set_input_shape(self, name: str, shape: Any) -> bool:
        tensor = self._plan.tensor(name)
        if tensor is None or not tensor.is_input:
            return self._refuse(f"{name} is not an input")
        if self.active_optimization_profile < 0:
            return self._refuse("No optimization profile has been selected")
        given = tuple(int(one) for one in shape)
        low, _, high = self._plan.profiles[self.active_optimization_profile][name]
        fits = len(given) == len(low) and all(a <= d <= b for a, d, b in zip(low, given, high, strict=True))
        if not fits:
            return self._refuse(
                f"Set dimension {list(given)} for tensor {name} does not satisfy any optimization profiles. "
                f"Valid range for profile {self.active_optimization_profile}: {list(low)}..{list(high)}."
            )
        if self._module.call("set_input_shape"):
            return self._refuse(f"Setting the shape of {name} failed")
        self._shapes[name] = given
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if self._plan.tensor(name) is None:
            return self._refuse(f"{name} is no tensor")
        if self._module.call("set_tensor_address"):
            return self._refuse(f"Setting the address of {name} failed")
        self._addresses[name] = int(memory)
        return True

    def get_tensor_address(self, name: str) -> int:
        return self._addresses.get(name, 0)

    def get_tensor_shape(self, name: str) -> Any:
        tensor = self._plan.tensor(name)
        assert tensor is not None
        shapes = self._all_shapes() if not self.infer_shapes() else self._shapes
        return real.Dims(shapes.get(name, tensor.shape))

    def infer_shapes(self) -> list[str]:
        return [one.name for one in self._plan.tensors if one.is_input and one.name not in self._shapes]

    @property
    def all_binding_shapes_specified(self) -> bool:
        """Whether every input has its shape."""
        return not self.infer_shapes()

    def update_device_memory_size_for_shapes(self) -> int:
        return int(self.engine._scratch(self.active_optimization_profile))

    def set_device_memory(self, memory: int, size: int) -> None:
        self._scratch = (int(memory), int(size))

    def get_runtime_config(self) -> Any:
        return self._config

    def is_stream_capturable(self, stream: int) -> bool:
        return bool(self._config.cuda_graph_strategy == real.CudaGraphStrategy.DISABLED and int(stream))

    def execute_async_v3(self, stream_handle: int) -> bool:
        """Check everything and put the run into the stream; False with a line in the log where TensorRT refuses."""
        with self._cuda.lock:
            stream = self._cuda.stream(int(stream_handle))
            if stream is None:
                return self._refuse("the stream is no stream")
            if (refusal := self._not_ready()) is not None:
                return self._refuse(refusal)
            if self._cuda.state_error("context", unsafe=False):
                return self._refuse("Cuda Runtime (an error of an earlier run)")
            if self._module.call("run"):
                return self._refuse("Enqueue failed")
            shapes = self._all_shapes()
            self._check_addresses(shapes)
            key = (self.active_optimization_profile, tuple(sorted(self._shapes.items())))
            if stream.capture is not None and (refusal := self._not_capturable(stream, key)):
                stream.capture.invalid = refusal
                return self._refuse(refusal)
            self._compile(key)
            self._last_shapes = key
            work = self._work(shapes, key, is_captured=stream.capture is not None)
            self._in_flight = [one for one in self._in_flight if one() is not None] + [weakref.ref(work)]
            self._cuda.streams.enqueue(stream, work)
            self._module.num_runs += 1
            return True

    def _not_ready(self) -> str | None:
        if self.active_optimization_profile < 0:
            return "No optimization profile has been selected"
        if missing := self.infer_shapes():
            return f"Neither shape nor values were specified for input {missing[0]}"
        for one in self._plan.tensors:
            if not self._addresses.get(one.name):
                return f"Address is not set for {'input' if one.is_input else 'output'} tensor {one.name}"
        needed = self.engine._scratch(self.active_optimization_profile)
        if self._scratch[1] < needed:
            return f"The device memory of {self._scratch[1]} bytes is less than the {needed} that are needed"
        return None

    def _not_capturable(self, stream: Stream, key: tuple[Any, ...]) -> str | None:
        if not self.is_stream_capturable(stream.number or 1):
            return "the context captures CUDA graphs itself"
        if key != self._last_shapes:
            return "Shapes have changed since the last run: run once before capture"
        return None

    def _all_shapes(self) -> dict[str, Shape]:
        shapes = {**self._shapes, **self._plan.outputs(self._shapes)}
        for one in self._plan.tensors:
            if one.aliases:
                shapes[one.name] = shapes[one.aliases]
        return shapes

    def _check_addresses(self, shapes: dict[str, Shape]) -> None:
        """See that every tensor lies in live device memory that is large enough, and outputs only where they may."""
        memory, taken = self._cuda.memory, []
        for one in self._plan.tensors:
            address, what = self._addresses[one.name], f"tensor {one.name}"
            size = _num_bytes(one, shapes)
            if address % _ALIGN:
                raise memory.violate(f"{what} is at {address:#x}, which is not aligned to {_ALIGN} bytes")
            memory.find(address, size, what, "device")
            if one.aliases:
                if address != self._addresses[one.aliases]:
                    raise memory.violate(f"{what} must have the memory of its input {one.aliases}")
            else:
                taken.append((address, address + size, one))
        if self._scratch[1]:
            address, size = self._scratch
            if address % _ALIGN:
                raise memory.violate(f"the scratch memory at {address:#x} is not aligned to {_ALIGN} bytes")
            memory.find(address, size, "scratch memory", "device", "engine")
            taken.append((address, address + size, None))
        taken.sort(key=lambda one: one[0])
        for before, after in itertools.pairwise(taken):
            names = [one[2].name if one[2] else "scratch" for one in (before, after)]
            inputs = all(one[2] is not None and one[2].is_input for one in (before, after))
            if before[1] > after[0] and not (inputs and not any("pool" in name for name in names)):
                raise memory.violate(f"the memory of {names[0]} and {names[1]} overlaps")

    def _compile(self, key: tuple[Any, ...]) -> None:
        """Note what TensorRT-RTX would compile now: kernels of a profile, and of each shape with EAGER."""
        eager = real.DynamicShapesKernelSpecializationStrategy.EAGER
        special = self._config.dynamic_shapes_kernel_specialization_strategy == eager
        kernel = str(key) if special else f"profile {key[0]}"
        cache = self._config.get_runtime_cache()
        known = cache.kernels if cache is not None else self._warm
        if kernel not in known:
            known.add(kernel)
            self._module.num_compiled += 1

    def _work(self, shapes: dict[str, Shape], key: Any, *, is_captured: bool) -> Work:
        addresses, scratch, plan = dict(self._addresses), self._scratch, self._plan
        alive = weakref.ref(self)
        memory = self._cuda.memory

        def run(reach: Reach) -> None:
            if alive() is None:
                raise memory.violate("a captured run was replayed after its context had been destroyed")
            context = alive()
            if is_captured and context is not None and context._last_shapes != key:
                # NVIDIA's advice is a context for each graph: what a context keeps about its shapes, a graph reads.
                raise memory.violate("a captured run was replayed after its context had run other shapes")
            written = {one.aliases for one in plan.tensors if one.aliases}
            arrays = {}
            for one in plan.tensors:
                if one.is_input:
                    get = reach.write if one.name in written else reach.read
                    data = get(addresses[one.name], _num_bytes(one, shapes))
                    arrays[one.name] = data.view(one.dtype).reshape(shapes[one.name])
            if scratch[1]:
                reach.write(*scratch)[:] = 0xEE
            with np.errstate(all="ignore"):
                results = plan.run(arrays)
            for one in plan.tensors:
                if not one.is_input and not one.aliases:
                    result = np.ascontiguousarray(results[one.name], one.dtype)
                    if result.shape != shapes[one.name]:
                        raise memory.violate(
                            f"the plan gave {one.name} of {result.shape}, not {shapes[one.name]}"
                        )
                    out = reach.write(addresses[one.name], _num_bytes(one, shapes))
                    out[:] = result.reshape(-1).view(np.uint8)

        return Work("TensorRT run", run)

    def _refuse(self, message: str) -> bool:
        self.engine._runtime.fail(f"IExecutionContext: {message}")
        return False


def _num_bytes(one: PlanTensor, shapes: dict[str, Shape]) -> int:
    return int(np.prod(shapes[one.name], dtype=np.int64)) * one.dtype.itemsize
