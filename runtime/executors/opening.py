"""From a GPU target of an engine directory to its executor: which library, which device, whether it fits.

Everything that can be known is checked before anything is allocated, and what was allocated is released when
opening fails half way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import mmap
from collections.abc import Sequence
from typing import Any

from ..errors import CudaError, EngineFileError, Error, OutOfMemoryError, UnsupportedError
from ..manifest import BUILDABLE, Manifest
from ..page_cache import start_read_ahead
from . import cuda, kernel_bundle, memory, trt
from . import device_sampler as sampling
from .buckets import Buckets
from .cuda import Context, Device, Driver
from .executor import TensorRtExecutor
from .graphs import MAX_GRAPHS, DecodeGraphs
from .launching import Parts
from .memory import Demand, Footprint
from .options import CPU, GpuOptions
from .plan import Plan
from .runtime_cache import RuntimeCache
from .staging import aligned
from .trt import GraphMode, Library, TrtContext, TrtPlan

_log = logging.getLogger("plansmith.gpu")
# CUDA graphs and their contexts get at most this part of the device's memory.
_GRAPHS_PART = 32


def open_tensorrt(
    manifest: Manifest,
    target: str,
    options: GpuOptions | None = None,
    *,
    kv_cache_bytes: int = 0,
    bindings: Any = None,
    library: Library | None = None,
) -> TensorRtExecutor:
    """Open a GPU target's plan on a device; the caller closes the executor, or gives it to an engine.

    kv_cache_bytes : what the KV pools are to have, 0 = whatever is left; decides whether the plan fits
    bindings, library : instead of cuda.bindings.driver and the manifest's compiler
    raises UnsupportedError without a library, driver or device that runs the plan, EngineFileError for a plan that is
        not the manifest's, OutOfMemoryError where it does not fit, with what would; CudaError
    """
    options = options or GpuOptions()
    options.check()
    entry = manifest.target(target)
    start_read_ahead([manifest.plan_path(target)])  # while library and driver start
    library = library or trt.load_library(entry.compiler)
    library.check_version(entry.compiler_version, f"{manifest.build_command(target)} --force")
    driver = Driver(bindings or cuda.load_bindings())
    library.check_driver(driver.version)
    device = choose_device(driver.devices(), manifest, target, options.device)
    context = driver.open(device)
    try:
        with context.current():
            opening = _Opening(manifest, target, options, library, context, kv_cache_bytes)
            return TensorRtExecutor(manifest, target, opening.parts())
    except BaseException:
        context.close()
        raise


def choose_device(
    devices: Sequence[Device], manifest: Manifest, target: str, wanted: int | str | None
) -> Device:
    """Return the device to open a target on.

    wanted : an index, a UUID or its beginning; None = the first that runs the plan
    raises UnsupportedError where there is none, with what this engine has for it or how to build it
    """
    if not devices:
        raise UnsupportedError(
            "the driver sees no GPU that this process may use; set CUDA_VISIBLE_DEVICES, or open the cpu target of an "
            "engine that has it"
        )
    runs_on = manifest.target(target).sm
    if wanted is None:
        fitting = [one for one in devices if one.sm in runs_on]
        if fitting:
            return fitting[0]
        raise _wrong_device(devices[0], manifest, target)
    device = _named(devices, wanted)
    if device.sm not in runs_on:
        raise _wrong_device(device, manifest, target)
    return device


def _named(devices: Sequence[Device], wanted: int | str) -> Device:
    text = str(wanted).strip()
    found = (
        [one for one in devices if str(one.index) == (text.lstrip("0") or "0")]
        if text.isascii() and text.isdecimal()
        else [one for one in devices if text and _bare(one.uuid).startswith(_bare(text))]
    )
    if len(found) != 1:
        listed = "; ".join(f"{one.index}: {one.name}, {one.sm}, {one.uuid}" for one in devices)
        problem = "is not there" if not found else "is not one alone"
        raise UnsupportedError(f"device {text!r} {problem}; choose one of {listed}")
    return found[0]


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-")


def _wrong_device(device: Device, manifest: Manifest, target: str) -> UnsupportedError:
    entry = manifest.target(target)
    others = [name for name, one in manifest.targets.items() if device.sm in one.sm]
    if others:
        fix = f"open target {' or '.join(others)} of this engine, which runs there"
    elif device.sm in BUILDABLE:
        fix = f"build one that does with: {manifest.build_command(device.sm)}"
    else:
        fix = f"no target that this version builds here ({', '.join(BUILDABLE)}) does either; open the cpu target"
    return UnsupportedError(
        f"device {device.index} ({device.name}) is {device.sm}, the plan of target {target} in {manifest.root} runs on "
        f"{', '.join(entry.sm) or 'no GPU'}; {fix}"
    )


def usable_target(manifest: Manifest, bindings: Any = None, *, device: int | str | None = None) -> str:
    """Return what target "auto" stands for: the first GPU target that a device here runs, else cpu, else the first.

    device : as in GpuOptions; None = any device counts, else this one alone
    A library or driver that is missing or too old counts as no GPU. Nothing is allocated.
    raises UnsupportedError for a device that is not among those here
    """
    gpu = [name for name, entry in manifest.targets.items() if entry.sm]
    devices: list[Device] = []
    if gpu:
        with contextlib.suppress(Error):
            driver = Driver(bindings or cuda.load_bindings())
            devices = driver.devices()
    if devices and device is not None:
        devices = [_named(devices, device)]
    here = {one.sm for one in devices}
    with contextlib.suppress(Error):
        for name in gpu if here else ():
            if _can_run(manifest, name, here, driver):
                return name
    return CPU if CPU in manifest.targets else next(iter(manifest.targets), CPU)


def _can_run(manifest: Manifest, target: str, here: set[str], driver: Driver) -> bool:
    entry = manifest.targets[target]
    if not here & set(entry.sm):
        return False
    try:
        library = trt.load_library(entry.compiler)
        library.check_version(entry.compiler_version, "")
        library.check_driver(driver.version)
    except Error:
        return False
    return True


@dataclasses.dataclass
class _Opening:
    """What is opened one after another, with the context current; all of it is released where one fails."""

    manifest: Manifest
    target: str
    options: GpuOptions
    library: Library
    context: Context
    kv_cache_bytes: int
    fitted: Demand | None = None
    is_streaming: bool = False  # some of the weights stay on the host

    def parts(self) -> Parts:
        """Open everything but the pools."""
        stack = contextlib.ExitStack()
        try:
            return self._open(stack)
        except OutOfMemoryError as error:
            stack.close()
            if self.fitted is None:
                raise
            # It seemed to fit: the driver rounds sizes up, and others take memory meanwhile.
            raise OutOfMemoryError(f"{self.fitted.explain(self.kv_cache_bytes)} ({error})") from error
        except BaseException:
            stack.close()
            raise

    def _open(self, stack: contextlib.ExitStack) -> Parts:
        manifest, context, limits = self.manifest, self.context, self.manifest.limits
        self.free, self.total = context.memory()
        bundle = self._bundle()
        trt_plan = self._deserialize()
        stack.callback(trt_plan.close)
        plan = Plan(trt_plan, manifest, self.target)
        graph_mode = self._graph_mode()
        buckets = None
        if graph_mode != "off" or self.library.is_rtx:  # which compiles kernels for each shape
            width = -(-limits.max_seq_len // limits.tokens_per_block)
            buckets = Buckets(limits.max_batch_size, width)
        rows = plan.max_logits_rows + (buckets.max_padding if buckets else 0)
        scratch = self._fit(plan, rows, buckets, bundle is not None)
        stream = context.stream()
        stack.callback(_quietly, context.destroy_stream, stream)
        address = context.alloc(scratch)
        stack.callback(_quietly, context.free, address)
        logits = context.alloc(4 * (rows + 1) * manifest.model.vocab_size)
        stack.callback(_quietly, context.free, logits)
        cache = self._cache(plan)
        blob = cache.load() if self.library.is_rtx else None
        if cache.note:
            _log.warning("%s", cache.note)
        if self.is_streaming:
            graph_mode = "off"  # a run then copies weights and waits for them, which cannot be captured

        def new_context(profile: int) -> TrtContext:
            # Only decode runs come again with the same shapes.
            repeats = plan.is_decode(profile)
            mode: GraphMode = graph_mode if repeats else "off"
            made = trt_plan.context(profile, int(stream), mode, repeats=repeats, cache=blob)
            made.set_scratch(address, scratch)
            return made

        contexts = []
        for profile in range(plan.num_profiles):
            contexts.append(new_context(profile))
            stack.callback(contexts[-1].close)
        graphs: DecodeGraphs[TrtContext] | None = None
        if graph_mode == "own":
            most = self.options.cuda_graph_cache_size or MAX_GRAPHS
            graphs = DecodeGraphs(context, most, self.total // _GRAPHS_PART)
            stack.callback(graphs.close)
        sampler = None
        if bundle is not None:
            sampler = sampling.DeviceSampler(context, bundle, rows, manifest.model.vocab_size)
            stack.callback(sampler.close)
        # From here on in reverse: let the work end, keep what was compiled, then release.
        if self.library.is_rtx:
            stack.callback(lambda: cache.save(_cache_bytes(trt_plan)))
        stack.callback(_quietly, context.wait, stream)
        return Parts(
            context, stream, plan, contexts, new_context, logits, rows, buckets, graphs, sampler, stack
        )

    def _graph_mode(self) -> GraphMode:
        if self.options.cuda_graphs == "auto":
            return "library" if self.library.is_rtx else "own"
        return "own" if self.options.cuda_graphs == "own" else "off"

    def _bundle(self) -> kernel_bundle.KernelBundle | None:
        """Return the engine's kernels for this device; None = it has none, and tokens are drawn on the host."""
        files = self.manifest.target(self.target).files
        listed = next((one for one in files if one.path.endswith(f"/{kernel_bundle.BUNDLE_NAME}")), None)
        if listed is None or not self.options.device_sampling:
            return None
        folder = self.manifest.path(listed).parent
        return kernel_bundle.load(folder, int(self.context.device.sm.removeprefix("sm")))

    def _deserialize(self) -> TrtPlan:
        path = self.manifest.plan_path(self.target)
        try:
            size = path.stat().st_size
            if size > self.free and not self.manifest.target(self.target).streams_weights:
                self._demand(Footprint(size, 0, 0, 0), 0).check(self.kv_cache_bytes)
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return self.library.deserialize(mapped)
        except (OSError, ValueError) as error:
            raise EngineFileError(f"{path} cannot be read ({error}); copy the engine again") from error

    def _cache(self, plan: Plan) -> RuntimeCache:
        device = self.context.device
        return RuntimeCache(
            self.manifest.plan_path(self.target).parent,
            self.options.cache_dir,
            plan.target.key,
            f"{device.name}-{device.sm}",
            self.context.driver.version,
            self.library.version_text,
        )

    def _demand(self, footprint: Footprint, num_reserve_blocks: int) -> Demand:
        device = self.context.device
        return Demand(
            self.manifest,
            self.target,
            f"{device.name} (device {device.index})",
            self.free,
            self.total,
            footprint,
            memory.block_shape(self.manifest, self.target),
            num_reserve_blocks,
        )

    def _fit(self, plan: Plan, rows: int, buckets: Buckets | None, is_sampling: bool) -> int:
        """Return the contexts' scratch memory, after choosing a weight budget where the weights do not fit.

        raises OutOfMemoryError where the plan does not fit even so
        """
        vocab_size = self.manifest.model.vocab_size
        logits = 4 * (rows + 1) * vocab_size
        if is_sampling:
            logits += sampling.device_bytes(rows, vocab_size)
        reserve = 0
        if buckets is not None and not plan.is_packed:
            reserve = buckets.num_reserve_blocks(self.manifest.limits.tokens_per_block)
        shape = memory.block_shape(self.manifest, self.target)
        staging = sum(aligned(one) for one in plan.staging_bytes(self.free // shape.block_bytes + 1))
        weights = self._choose_weights(plan, logits + staging + shape.pool_bytes(reserve))
        scratch = plan.scratch_bytes()
        demand = self._demand(Footprint(weights, scratch, staging, logits), reserve)
        demand.check(self.kv_cache_bytes)
        self.fitted = demand
        return scratch

    def _choose_weights(self, plan: Plan, others: int) -> int:
        """Return what the weights take of the device; those of a streaming plan that do not fit stay on the host."""
        streamable, share = plan.trt.streamable_bytes, self.options.gpu_weights_percent
        if streamable == 0:
            if share is not None and share < 1:
                raise UnsupportedError(
                    f"gpu_weights_percent is {share:g}, and all weights of target {self.target} in "
                    f"{self.manifest.root} have to be on the device; leave it out, or build for weight streaming with: "
                    f"{self.manifest.build_command(self.target)} --weight-streaming"
                )
            return max(0, self.free - self.context.memory()[0])
        plan.trt.set_weight_budget(0)  # the largest scratch: with room for the weights on their way
        now = self.context.memory()[0]
        if share is not None:
            plan.trt.set_weight_budget(int(streamable * share))
            self.is_streaming = share < 1
            return max(0, self.free - now) + int(streamable * share)
        sequence = self._demand(Footprint(0, 0, 0, 0), 0).sequence_bytes
        kv = self.kv_cache_bytes or max(sequence, self.total // 10)
        margin = min(memory.MARGIN, self.total // 64)
        budget = memory.weight_budget(streamable, now, plan.scratch_bytes() + others, kv, margin)
        plan.trt.set_weight_budget(budget)
        self.is_streaming = budget < streamable
        if self.is_streaming:
            _log.warning(
                "%s of the weights of target %s stay in host memory and come over in every step: %s do not fit",
                memory.size_text(streamable - budget),
                self.target,
                memory.size_text(streamable),
            )
        return max(0, self.free - now) + budget


def _cache_bytes(plan: TrtPlan) -> bytes | None:
    with contextlib.suppress(Error, RuntimeError):
        return plan.cache_bytes()
    return None


def _quietly(release: Any, *what: Any) -> None:
    with contextlib.suppress(CudaError, OutOfMemoryError):
        release(*what)
