"""TensorRT's Python module in the double: the classes the executor uses, over fake_cuda's memory and streams.

Enums and ILogger are the real tensorrt_rtx module's; Runtime, ICudaEngine, IExecutionContext, IRuntimeConfig and
IRuntimeCache have the real classes' methods under the same parameters (a test compares them). What the real library
refuses is refused in its way: a line in the log, and None or False. What it cannot see (memory that is too small or
gone, aliases that are apart) raises DoubleError.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import tensorrt_rtx as real
from fake_contexts import ExecutionContext
from fake_cuda import FakeCuda
from fake_memory import Allocation
from fake_plans import Plan

_RTX_ONLY = ("CudaGraphStrategy", "DynamicShapesKernelSpecializationStrategy", "IRuntimeCache")
_TYPES = {
    "int32": real.DataType.INT32,
    "int64": real.DataType.INT64,
    "float32": real.DataType.FLOAT,
    "float16": real.DataType.HALF,
    "bfloat16": real.DataType.BF16,
    "int8": real.DataType.INT8,
    "uint8": real.DataType.UINT8,
    "float8_e4m3fn": real.DataType.FP8,
}
_CACHE_MAGIC = b"double-cache "


class FakeTensorRt:
    """The module object.

    cuda : the driver that it runs on
    is_rtx : tensorrt_rtx, else tensorrt, which has no runtime cache and no CUDA graphs of its own
    """

    def __init__(self, cuda: FakeCuda, *, is_rtx: bool = True, version: str = real.__version__) -> None:
        self.cuda, self.is_rtx, self.__version__ = cuda, is_rtx, version
        self.plans: dict[str, Plan] = {}
        self.contexts: list[Any] = []  # weak references
        self.num_compiled = 0  # kernels that no cache had
        self.num_runs = 0
        owner = self

        class Runtime(FakeRuntime):
            module = owner

        self.Runtime = Runtime

    def know(self, plan: Plan, data: bytes) -> None:
        """Say what stands in a plan file."""
        self.plans[hashlib.sha256(data).hexdigest()] = plan

    def __getattr__(self, name: str) -> Any:
        if name in _RTX_ONLY and not self.__dict__.get("is_rtx", True):
            raise AttributeError(f"module 'tensorrt' has no attribute {name!r}")
        return getattr(real, name)

    def call(self, name: str) -> bool:
        """Count a call of the library; return whether it has to fail (see Calls.fail, names as trt.run)."""
        return self.cuda.calls.enter(f"trt.{name}") is not None


class FakeRuntime:
    """trt.Runtime."""

    module: FakeTensorRt

    def __init__(self, logger: Any) -> None:
        if not isinstance(logger, real.ILogger):
            raise TypeError("Runtime(): incompatible constructor arguments")
        self.logger = logger
        self.max_threads = 1
        self.error_recorder = None

    def deserialize_cuda_engine(self, serialized_engine: Any) -> Engine | None:
        """Return the engine of a plan's bytes or stream reader; None with a line in the log."""
        module, cuda = self.module, self.module.cuda
        with cuda.lock:
            data = _read(serialized_engine)
            if cuda.state_error("context", unsafe=True):
                return self.fail("CUDA initialization failure: no context is current")
            plan = module.plans.get(hashlib.sha256(data).hexdigest())
            if plan is None:
                return self.fail("Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed")
            sm = f"sm{cuda.sm[0]}{cuda.sm[1]}"
            if plan.sms and sm not in plan.sms:
                return self.fail(f"Engine was not built for the current device ({sm})")
            if module.call("deserialize"):
                return self.fail("Deserialization failed")
            # Streamable weights come to the device with a budget or a context: they may be more than it holds.
            size = max(1, plan.weights_bytes - plan.streamable_bytes)
            weights = cuda.memory.allocate(size, "engine", "weights of an engine")
            if weights is None:
                return self.fail(f"OutOfMemory: Requested size was {size} bytes")
            return Engine(self, plan, weights)

    def fail(self, message: str) -> None:
        """Log an error."""
        self.logger.log(real.ILogger.ERROR, message)

    @property
    def engine_header_size(self) -> int:
        """Bytes that tell what a plan is."""
        return 64


class Engine:
    """trt.ICudaEngine."""

    def __init__(self, runtime: FakeRuntime, plan: Plan, weights: Allocation) -> None:
        self._runtime, self._plan = runtime, plan
        self._weights: Allocation | None = weights
        self._module = runtime.module
        self._budget = plan.streamable_bytes
        self._num_contexts = 0
        self._is_streaming_set = plan.streamable_bytes == 0
        self.name = "double"
        self.weights_loaded = True
        self._module.cuda.trt_objects.add(self)

    def __del__(self) -> None:
        if self._weights is not None:
            self._module.cuda.memory.free(self._weights.address, "engine")

    num_io_tensors = property(lambda self: len(self._plan.tensors))
    num_optimization_profiles = property(lambda self: len(self._plan.profiles))
    num_aux_streams = property(lambda self: 0)
    num_layers = property(lambda self: 1)
    refittable = property(lambda self: False)
    streamable_weights_size = property(lambda self: self._plan.streamable_bytes)
    device_memory_size_v2 = property(lambda self: max(map(self._scratch, range(len(self._plan.profiles)))))

    def get_tensor_name(self, index: int) -> str:
        return self._plan.tensors[index].name

    def get_tensor_mode(self, name: str) -> Any:
        tensor = self._plan.tensor(name)
        if tensor is None:
            return real.TensorIOMode.NONE
        return real.TensorIOMode.INPUT if tensor.is_input else real.TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return _TYPES[str(self._known(name).dtype)]

    def get_tensor_shape(self, name: str) -> Any:
        return real.Dims(self._known(name).shape)

    def get_tensor_location(self, name: str) -> Any:
        return real.TensorLocation.DEVICE

    def get_tensor_format(self, name: str, profile_index: int = 0) -> Any:
        return real.TensorFormat.LINEAR

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self._known(name).aliases

    def is_shape_inference_io(self, name: str) -> bool:
        return False

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Any]:
        return [real.Dims(one) for one in self._plan.profiles[profile_index][name]]

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return self._scratch(profile_index)

    @property
    def weight_streaming_scratch_memory_size(self) -> int:
        """What a context needs besides while weights are streamed."""
        return 4096 if self._budget < self._plan.streamable_bytes else 0

    def get_weight_streaming_automatic_budget(self) -> int:
        return min(self._plan.streamable_bytes, self._module.cuda.memory.free_bytes // 2)

    @property
    def weight_streaming_budget_v2(self) -> int:
        """Bytes of the streamable weights that stay on the device."""
        return self._budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, budget: int) -> None:
        if self._num_contexts or budget < 0 or not self._plan.streamable_bytes:
            self._runtime.fail("The weight streaming budget cannot be changed now")
        else:
            self._stream(min(budget, self._plan.streamable_bytes))

    def _stream(self, budget: int) -> bool:
        """Bring so many bytes of the streamable weights to the device, False where they do not fit."""
        memory, plan = self._module.cuda.memory, self._plan
        if self._weights is not None:
            memory.free(self._weights.address, "engine")
        self._weights = None
        for one in (budget, 0):
            size = max(1, plan.weights_bytes - plan.streamable_bytes + one)
            made = memory.allocate(size, "engine", "weights of an engine")
            if made is not None:
                self._weights = made
                break
            self._runtime.fail(f"OutOfMemory: weights of {size} bytes do not fit")
        if self._weights is not None and one == budget:
            self._budget, self._is_streaming_set = budget, True
        return self._weights is not None and one == budget

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig(self._module)

    def create_execution_context(self, runtime_config: Any = None) -> ExecutionContext | None:
        """Return a context; the argument is a RuntimeConfig or an ExecutionContextAllocationStrategy."""
        cuda = self._module.cuda
        with cuda.lock:
            if cuda.state_error("context", unsafe=True):
                return self._runtime.fail("no context is current")
            if self._module.call("create_context"):
                return self._runtime.fail("Creating the context failed")
            if not self._is_streaming_set and not self._stream(self._plan.streamable_bytes):
                return None
            config = runtime_config
            if not isinstance(config, RuntimeConfig):
                config = RuntimeConfig(self._module)
                config.set_execution_context_allocation_strategy(
                    runtime_config or real.ExecutionContextAllocationStrategy.STATIC
                )
            own = None
            if config.get_execution_context_allocation_strategy() != (
                real.ExecutionContextAllocationStrategy.USER_MANAGED
            ):
                own = cuda.memory.allocate(self.device_memory_size_v2, "engine", "scratch of a context")
                if own is None:
                    return self._runtime.fail("OutOfMemory: no scratch memory for the context")
            self._num_contexts += 1
            return ExecutionContext(self, self._plan, config, own)

    def _scratch(self, profile: int) -> int:
        return self._plan.scratch_bytes[profile] + self.weight_streaming_scratch_memory_size

    def _known(self, name: str) -> Any:
        tensor = self._plan.tensor(name)
        if tensor is None:
            raise self._module.cuda.memory.violate(f"the plan has no tensor {name!r}")
        return tensor


class RuntimeConfig:
    """trt.IRuntimeConfig."""

    def __init__(self, module: FakeTensorRt) -> None:
        self._module = module
        self._strategy = real.ExecutionContextAllocationStrategy.STATIC
        self._cache: RuntimeCache | None = None
        self.cuda_graph_strategy = real.CudaGraphStrategy.DISABLED
        self.dynamic_shapes_kernel_specialization_strategy = (
            real.DynamicShapesKernelSpecializationStrategy.LAZY
        )

    def create_runtime_cache(self) -> RuntimeCache:
        return RuntimeCache(self._module)

    def get_execution_context_allocation_strategy(self) -> Any:
        return self._strategy

    def set_execution_context_allocation_strategy(
        self, strategy: Any = real.ExecutionContextAllocationStrategy.STATIC
    ) -> None:
        self._strategy = strategy

    def get_runtime_cache(self) -> RuntimeCache | None:
        return self._cache

    def set_runtime_cache(self, cache: RuntimeCache | None = None) -> bool:
        if cache is None or self._module.call("set_runtime_cache"):
            return False
        self._cache = cache
        return True


class RuntimeCache:
    """trt.IRuntimeCache: names of compiled kernels, bound to the version and the device."""

    def __init__(self, module: FakeTensorRt) -> None:
        self._module = module
        self.kernels: set[str] = set()

    def _head(self) -> bytes:
        sm = self._module.cuda.sm
        return _CACHE_MAGIC + f"{self._module.__version__} sm{sm[0]}{sm[1]}".encode()

    def serialize(self) -> HostMemory | None:
        if self._module.call("serialize_cache"):
            return None
        body = self._head() + b"\n" + "\n".join(sorted(self.kernels)).encode()
        return HostMemory(body + b"\n" + hashlib.sha256(body).hexdigest().encode())

    def deserialize(self, blob: Any) -> bool:
        data = bytes(blob)
        body, _, digest = data.rpartition(b"\n")
        head, _, names = body.partition(b"\n")
        if digest != hashlib.sha256(body).hexdigest().encode() or head != self._head():
            return False
        self.kernels |= set(names.decode().split("\n")) - {""}
        return True

    def reset(self) -> bool:
        self.kernels.clear()
        return True


class HostMemory(bytearray):
    """trt.IHostMemory."""

    nbytes = property(len)
    dtype = property(lambda self: real.DataType.INT8)


def _read(given: Any) -> bytes:
    """Return a plan's bytes, of a buffer or of a stream reader."""
    if not isinstance(given, real.IStreamReaderV2):
        return bytes(given)
    parts = []
    while part := given.read(1 << 20, 0):
        parts.append(bytes(part))
    return b"".join(parts)


METHODS: Mapping[str, type] = {
    "Runtime": FakeRuntime,
    "ICudaEngine": Engine,
    "IExecutionContext": ExecutionContext,
    "IRuntimeConfig": RuntimeConfig,
    "IRuntimeCache": RuntimeCache,
    "IHostMemory": HostMemory,
}
"""Real class -> the double's."""
