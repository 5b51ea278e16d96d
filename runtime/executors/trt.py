"""TensorRT and TensorRT-RTX behind one set of calls; the only door to `tensorrt` and `tensorrt_rtx`.

`Library` takes the module itself, or an object with the same classes (a test's double). What only one of the two has
(runtime caches and its own CUDA graphs in TensorRT-RTX) is asked for by attribute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import re
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

from ...sizing import releases
from ..errors import CudaError, EngineFileError, OutOfMemoryError, UnsupportedError

Shape = tuple[int, ...]
GraphMode = Literal["off", "library", "own"]
"""Who captures the decode runs of a context: nobody, the library itself (TensorRT-RTX), or graphs.py."""

# Names of a manifest's compiler -> the module, its first version with what plans need, the extra that installs it.
LIBRARIES: dict[str, tuple[str, tuple[int, int], str]] = {
    "tensorrt_rtx": ("tensorrt_rtx", (1, 7), "pip install -U 'plansmith[rtx]'"),
    "tensorrt": ("tensorrt", (11, 0), "pip install -U 'plansmith[tensorrt]'"),
}
_TYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT32": "int32",
    "INT64": "int64",
    "INT8": "int8",
    "BOOL": "bool",
    "FP8": "float8_e4m3fn",
}
_LOG_LINES = 20


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An input or output of a plan; -1 in `shape` is a dimension that each run sets.

    aliases : of an output, the input whose memory it must have; None = its own
    """

    name: str
    is_input: bool
    dtype: str
    shape: Shape
    on_host: bool
    aliases: str | None


def load_library(compiler: str) -> Library:
    """Return the library that runs a compiler's plans.

    raises UnsupportedError when it is not installed, cannot be loaded or is too old, with the command to run
    """
    if compiler not in LIBRARIES:
        raise UnsupportedError(
            f"the plan was made by {compiler!r}, this version runs plans of {', '.join(LIBRARIES)}; "
            "build the target again"
        )
    name, least, install = LIBRARIES[compiler]
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise UnsupportedError(
            f"running this plan needs {name}, which cannot be loaded ({error}); run: {install}"
        ) from error
    library = Library(module, compiler)
    if library.version[:2] < least:
        raise UnsupportedError(
            f"{name} is {library.version_text}, at least {least[0]}.{least[1]} is needed; run: {install}"
        )
    return library


class Library:
    """One of the two modules. Any thread."""

    def __init__(self, module: Any, compiler: str) -> None:
        self._module = module
        self.compiler = compiler
        self.version_text = str(module.__version__)
        self.version = tuple(int(part) for part in re.findall(r"\d+", self.version_text))
        self.log_lines: deque[str] = deque(maxlen=_LOG_LINES)  # warnings and errors
        self._logger = _make_logger(module, self.log_lines)

    @property
    def is_rtx(self) -> bool:
        """Whether it is TensorRT-RTX, which compiles kernels when a plan is opened and run."""
        return self.compiler == "tensorrt_rtx"

    def check_version(self, built_with: str, rebuild: str) -> None:
        """Refuse a plan that this version cannot read: plans are tied to the release that made them.

        built_with : the manifest's compiler_version; rebuild : the command to name
        """
        if not releases.is_same_release(self.compiler, built_with, self.version_text):
            raise UnsupportedError(
                f"the plan was built with {self.compiler} {built_with}, {self.version_text} is installed, and plans "
                f"run on their own release alone ({releases.release(self.compiler, built_with)}); install "
                f"{releases.COMPILERS[self.compiler].package}=={built_with}, or rebuild with: {rebuild}"
            )

    @property
    def cuda_major(self) -> int | None:
        """The CUDA version that the installed package is made for; None where its name does not say."""
        for major in (14, 13, 12):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                importlib.metadata.version(f"{self.compiler}_cu{major}")
                return major
        return None

    def check_driver(self, version: tuple[int, int]) -> None:
        """Refuse a driver that is older than the CUDA version that the library is made for."""
        needed = self.cuda_major
        if needed is None or releases.takes_cuda(version, needed):
            return
        branch = releases.cuda_branch(self.compiler, needed)
        newer = "a newer driver" if branch is None else f"a driver of r{branch} or later"
        raise UnsupportedError(
            f"the NVIDIA driver supports CUDA {version[0]}.{version[1]}, {self.compiler} {self.version_text} is "
            f"made for CUDA {needed}; install {newer}, or the library for CUDA {version[0]}: "
            f"{releases.COMPILERS[self.compiler].package}-cu{version[0]}"
        )

    def deserialize(self, plan: Any) -> TrtPlan:
        """Return the plan of its bytes, with a current context; its weights go to the device.

        plan : a buffer, needed during the call only
        raises EngineFileError with the library's words for a plan that it refuses, OutOfMemoryError
        """
        self.log_lines.clear()
        runtime = self._module.Runtime(self._logger)
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            words = self.words()
            if re.search("out of memory|OutOfMemory", words, re.IGNORECASE):
                raise OutOfMemoryError(f"{self.compiler} has no memory for the plan's weights: {words}")
            raise EngineFileError(f"{self.compiler} {self.version_text} cannot read the plan: {words}")
        return TrtPlan(self, self._module, runtime, engine)

    def words(self) -> str:
        """Return the library's last warnings and errors."""
        return "; ".join(self.log_lines) or "it gave no reason"


class TrtPlan:
    """An opened plan. One thread at a time.

    No method keeps the engine in a variable of its own: an exception keeps its frames, and with them what they hold,
    while the device's context is closed.
    """

    def __init__(self, library: Library, module: Any, runtime: Any, engine: Any) -> None:
        self.library = library
        self._module = module
        self._runtime = runtime  # must outlive the engine
        self._engine = engine
        self._cache: Any = None

    def close(self) -> None:
        """Release it, after its contexts."""
        self._cache = self._engine = self._runtime = None

    def tensors(self) -> list[Tensor]:
        """Return its inputs and outputs."""
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        return [self._tensor(name) for name in names]

    def _tensor(self, name: str) -> Tensor:
        kinds = self._module
        is_input = self._engine.get_tensor_mode(name) == kinds.TensorIOMode.INPUT
        dtype = self._engine.get_tensor_dtype(name).name
        ask = getattr(self._engine, "get_aliased_input_tensor", None)
        aliases = None if is_input or ask is None else ask(name)
        return Tensor(
            name,
            is_input,
            _TYPES.get(dtype, dtype.lower()),
            tuple(self._engine.get_tensor_shape(name)),
            self._engine.get_tensor_location(name) == kinds.TensorLocation.HOST,
            aliases or None,
        )

    @property
    def num_profiles(self) -> int:
        """How many optimization profiles it has."""
        return int(self._engine.num_optimization_profiles)

    def input_range(self, name: str, profile: int) -> tuple[Shape, Shape]:
        """Return an input's smallest and largest shape in a profile."""
        low, _, high = self._engine.get_tensor_profile_shape(name, profile)
        return tuple(low), tuple(high)

    def scratch_bytes(self, profile: int) -> int:
        """Return the device memory that a context of a profile works in; depends on the weight budget."""
        return int(self._engine.get_device_memory_size_for_profile_v2(profile))

    @property
    def streamable_bytes(self) -> int:
        """Weights that may stay on the host; 0 = the plan was not built with weight streaming."""
        return max(0, int(self._engine.streamable_weights_size))

    def set_weight_budget(self, num_bytes: int) -> None:
        """Keep that many bytes of the streamable weights on the device. Before any context is made."""
        self._engine.weight_streaming_budget_v2 = num_bytes
        if int(self._engine.weight_streaming_budget_v2) != num_bytes:
            raise OutOfMemoryError(
                f"{self.library.compiler} does not take a weight streaming budget of {num_bytes} bytes: "
                f"{self.library.words()}"
            )

    def context(
        self, profile: int, stream: int, graphs: GraphMode, *, repeats: bool, cache: bytes | None = None
    ) -> TrtContext:
        """Return a context of a profile whose scratch memory the caller gives it.

        graphs : "own" makes TensorRT-RTX compile its kernels for a shape before they first run, so that what is
            captured afterwards are those
        repeats : its runs have a few shapes that come again. TensorRT-RTX then compiles kernels for each in the
            background; for a profile whose shapes are always new it would do nothing else
        cache : serialized kernels for TensorRT-RTX's compiler, of an earlier run; what does not fit is not used
        """
        kinds = self._module
        strategy = kinds.ExecutionContextAllocationStrategy.USER_MANAGED
        if not hasattr(kinds, "CudaGraphStrategy"):
            context = TrtContext(self.library, self._engine.create_execution_context(strategy))
        else:
            config = self._engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(strategy)
            kernels = kinds.DynamicShapesKernelSpecializationStrategy
            if not repeats:
                config.dynamic_shapes_kernel_specialization_strategy = kernels.NONE
            elif graphs == "own":
                config.dynamic_shapes_kernel_specialization_strategy = kernels.EAGER
            if graphs == "library":
                config.cuda_graph_strategy = kinds.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            self._set_cache(config, cache)
            context = TrtContext(self.library, self._engine.create_execution_context(config))
        try:
            context.select(profile, stream)
        except BaseException:
            context.close()
            raise
        return context

    def _set_cache(self, config: Any, blob: bytes | None) -> None:
        """Give a context the plan's runtime cache, filled from a blob the first time."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            self.cache_was_used = bool(blob and self._cache.deserialize(blob))
        config.set_runtime_cache(self._cache)

    cache_was_used = False

    def cache_bytes(self) -> bytes | None:
        """Return the kernels compiled so far, serialized; None where the library keeps none."""
        if self._cache is None:
            return None
        memory = self._cache.serialize()
        return None if memory is None else bytes(memory)


class TrtContext:
    """A context of one profile. Its shapes and addresses stay as they were set."""

    def __init__(self, library: Library, context: Any) -> None:
        if context is None:
            raise CudaError(f"{library.compiler} makes no context of the plan: {library.words()}")
        self._library = library
        self._context = context
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}

    def close(self) -> None:
        """Release it, when its work is done and before the plan."""
        self._context = None

    def select(self, profile: int, stream: int) -> None:
        """Choose the profile; in the stream, before any run."""
        self._check(self._context.set_optimization_profile_async(profile, stream), f"profile {profile}")

    def set_scratch(self, address: int, num_bytes: int) -> None:
        """Give it the memory to work in; contexts whose runs do not overlap may share it."""
        self._context.set_device_memory(address, num_bytes)

    def set_input(self, name: str, shape: Shape, address: int) -> None:
        """Set an input's shape of the next runs and where it lies."""
        if self._shapes.get(name) != shape:
            self._check(self._context.set_input_shape(name, shape), f"shape {shape} of input {name}")
            self._shapes[name] = shape
        self.set_address(name, address)

    def set_address(self, name: str, address: int) -> None:
        """Set where an input or output lies."""
        if self._addresses.get(name) != address:
            self._check(self._context.set_tensor_address(name, address), f"an address for {name}")
            self._addresses[name] = address

    def unset_inputs(self) -> Sequence[str]:
        """Return the inputs that still have no shape."""
        return list(self._context.infer_shapes())

    def run(self, stream: int) -> None:
        """Hand a run to the stream, without waiting; raises CudaError with the library's words."""
        self._library.log_lines.clear()
        self._check(self._context.execute_async_v3(stream), "the run")

    def is_capturable(self, stream: int) -> bool:
        """Return whether a run may be captured; True where the library cannot tell."""
        ask = getattr(self._context, "is_stream_capturable", None)
        return True if ask is None else bool(ask(stream))

    def _check(self, taken: bool, what: str) -> None:
        if not taken:
            raise CudaError(f"{self._library.compiler} refuses {what}: {self._library.words()}")


def _make_logger(module: Any, lines: deque[str]) -> Any:
    class Logger(module.ILogger):  # type: ignore[misc]
        """Keeps warnings and errors for messages; prints nothing."""

        def __init__(self) -> None:
            super().__init__()

        def log(self, severity: Any, message: str) -> None:
            if str(severity).rsplit(".", 1)[-1] in ("INTERNAL_ERROR", "ERROR", "WARNING"):
                lines.append(message)

    return Logger()
