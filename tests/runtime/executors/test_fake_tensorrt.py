"""The double's TensorRT: like the real classes, runs the plan, and catches each wrong program."""

from __future__ import annotations

import ctypes
import gc
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import cuda.bindings.driver as cuda_driver
import numpy as np
import pytest
import tensorrt_rtx as real
from fake_cuda import FakeCuda
from fake_memory import DoubleError
from fake_plans import Plan
from fake_tensorrt import METHODS, FakeTensorRt
from plansmith.builder.batch import BatchPlanner
from plansmith.builder.targets.rtx import step_inputs
from rtx_numpy import NumpySession

NUM_BLOCKS = 24
GLOBAL = cuda_driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL


class Log(real.ILogger):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        self.lines.append(message)


class Program:
    """What an executor does, by hand: one context a profile over pools, inputs copied where each run wants them."""

    def __init__(self, engine: Any, **options: Any) -> None:
        self.cuda = FakeCuda(**options)
        self.cuda.cuInit(0)
        self.cuda.cuCtxPushCurrent(self.cuda.cuDevicePrimaryCtxRetain(0)[1])
        self.trt = FakeTensorRt(self.cuda)
        self.plan: Plan = engine.plan()
        self.trt.know(self.plan, engine.plan_bytes)
        self.log = Log()
        self.engine = self.trt.Runtime(self.log).deserialize_cuda_engine(engine.plan_bytes)
        self.stream = self.cuda.cuStreamCreate(1)[1]
        self.pools: dict[str, int] = {}
        self.pinned = self.cuda.cuMemHostAlloc(1 << 16, 0)[1]
        self.logits = self.device(8 * engine.spec.vocab_size * 4)
        for one in self.plan.tensors:
            if one.is_input and "pool" in one.name:
                self.pools[one.name] = self.device(NUM_BLOCKS * int(np.prod(one.shape[1:])) * 2)

    def device(self, size: int) -> int:
        return int(self.cuda.cuMemAlloc(size)[1])

    def context(self, profile: int) -> Any:
        context = self.engine.create_execution_context()
        assert context.set_optimization_profile_async(profile, int(self.stream))
        for name, address in self.pools.items():
            one = self.plan.tensor(name)
            assert one is not None
            assert context.set_input_shape(name, (NUM_BLOCKS, *one.shape[1:]))
            assert context.set_tensor_address(name, address)
            assert context.set_tensor_address(name.replace("_pool.", "_pool_out."), address)
        assert context.set_tensor_address("logits", self.logits)
        return context

    def bind(self, context: Any, inputs: dict[str, Any]) -> None:
        for name, array in inputs.items():
            assert context.set_input_shape(name, array.shape), self.log.lines
            address = self.device(array.nbytes)
            self.cuda.cuMemcpyHtoD(address, np.ascontiguousarray(array), array.nbytes)
            assert context.set_tensor_address(name, address)

    def run(self, context: Any) -> bool:
        return bool(context.execute_async_v3(int(self.stream)))

    def result(self, count: int, vocab_size: int) -> Any:
        size = count * vocab_size * 4
        self.cuda.cuMemcpyDtoHAsync(self.pinned, self.logits, size, self.stream)
        self.cuda.cuStreamSynchronize(self.stream)
        raw = np.frombuffer((ctypes.c_uint8 * size).from_address(self.pinned), np.uint8)
        return raw.view(np.float32).reshape(count, vocab_size).copy()


@pytest.fixture
def program(rtx_engine: Callable[..., Any]) -> Iterator[Program]:
    yield Program(rtx_engine())


def first_decode(engine: Any) -> dict[str, Any]:
    """Inputs of a decode step of two sequences."""
    for part in parts_of(engine):
        if part.inputs["input_ids"].shape[1] == 1:
            return dict(part.inputs)
    raise AssertionError


def steps_of(engine: Any) -> Iterator[Any]:
    rng = np.random.default_rng(5)
    sequences = [rng.integers(3, engine.spec.vocab_size, n).tolist() for n in (12, 1, 20, 9)]
    limits = engine.limits
    yield from BatchPlanner(
        sequences,
        num_blocks=NUM_BLOCKS,
        tokens_per_block=limits.tokens_per_block,
        max_blocks_per_seq=limits.max_blocks_per_seq,
        max_num_tokens=limits.max_num_tokens,
        max_batch_size=limits.max_batch_size,
        seed=3,
    )


def parts_of(engine: Any) -> Iterator[Any]:
    for step in steps_of(engine):
        yield from step_inputs.split(step.batch, NUM_BLOCKS, engine.limits.tokens_per_block)


@pytest.mark.parametrize("name", METHODS)
def test_classes_have_the_real_methods(name: str) -> None:
    """Every public attribute of the double is the real class's, and takes what that documents."""
    theirs, mine = getattr(real, name), METHODS[name]
    if name == "IHostMemory":  # a buffer, which plain Python can only be by being one
        assert bytes(mine(b"ab")) == b"ab" and mine(b"ab").nbytes == 2
        return
    for attribute, one in vars(mine).items():
        if attribute.startswith("_") or attribute in ("module", "kernels", "fail", "engine_header_size"):
            continue
        assert hasattr(theirs, attribute), attribute
        if not inspect.isfunction(one):
            assert isinstance(getattr(theirs, attribute), property), attribute
            continue
        documented = re.findall(
            rf"{attribute}\(self: [\w.]+(?:, (.*))?\) -> ", getattr(theirs, attribute).__doc__
        )
        if not documented:
            continue
        names = {
            re.findall(r"(\w+): ", re.sub(r"\[[^]]*\]|<[^>]*>", "", text)).__str__() for text in documented
        }
        own = list(inspect.signature(one).parameters)[1:]
        assert any(own == eval(text) for text in names) or len(documented) > 1, (attribute, own, names)


def test_attributes_set_by_the_double_are_the_real_ones(program: Program) -> None:
    for one, theirs in ((program.engine, real.ICudaEngine), (program.context(0), real.IExecutionContext)):
        for name in vars(one):
            assert name.startswith("_") or hasattr(theirs, name), name


def test_plan_is_described_as_it_was_compiled(program: Program, rtx_engine: Callable[..., Any]) -> None:
    engine = program.engine
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    assert names[0] == "input_ids" and "logits" in names
    assert engine.get_tensor_mode("logits") == real.TensorIOMode.OUTPUT
    assert tuple(engine.get_tensor_shape("k_pool.0")) == (-1, 2, 8, 32)
    assert engine.get_aliased_input_tensor("k_pool_out.1") == "k_pool.1"
    assert engine.get_aliased_input_tensor("logits") is None
    low, _, high = engine.get_tensor_profile_shape("input_ids", 0)
    assert tuple(low) == (1, 1) and tuple(high) == (8, 1)
    assert engine.device_memory_size_v2 == max(
        engine.get_device_memory_size_for_profile_v2(i) for i in range(2)
    )


@pytest.mark.parametrize("eager", [False, True])
def test_runs_give_the_graphs_own_logits(rtx_engine: Callable[..., Any], eager: bool) -> None:
    import onnx_ir as ir

    engine = rtx_engine()
    program = Program(engine)
    program.cuda.streams.eager = eager
    session = NumpySession(ir.load(engine.graph), NUM_BLOCKS)
    for pool in session.pools.values():
        pool[:] = np.frombuffer(b"\xff\xff", np.float16)[0]
    contexts = [program.context(profile) for profile in range(2)]
    for part in parts_of(engine):
        rows = part.inputs["logits_rows"][: engine.limits.max_batch_size]  # the planner wants all of them
        part.inputs["logits_rows"] = rows
        wanted = session.run(part.inputs)["logits"]
        context = contexts[0 if part.inputs["input_ids"].shape[1] == 1 else 1]
        program.bind(context, part.inputs)
        assert program.run(context), program.log.lines
        got = program.result(len(wanted), engine.spec.vocab_size)
        np.testing.assert_array_equal(got, wanted)
    assert program.cuda.memory.violations == []


def ready(program: Program, engine: Any) -> Any:
    """Return a decode context with everything bound."""
    context = program.context(0)
    program.bind(context, first_decode(engine))
    return context


def test_a_shape_outside_the_profile_is_refused(program: Program) -> None:
    context = program.context(0)
    assert not context.set_input_shape("input_ids", (9, 1))
    assert not context.set_input_shape("input_ids", (2, 2))
    assert not context.set_input_shape("logits", (1, 320))
    assert not context.set_tensor_address("nothing", 256)
    assert not context.set_optimization_profile_async(2, int(program.stream))
    assert "does not satisfy any optimization profiles" in program.log.lines[0]


def test_what_is_missing_is_refused(program: Program, rtx_engine: Callable[..., Any]) -> None:
    context = program.context(0)
    assert not program.run(context)
    assert "Neither shape nor values were specified for input input_ids" in program.log.lines[-1]
    context = ready(program, rtx_engine())
    context.set_tensor_address("logits", 0)
    assert not program.run(context)
    assert "Address is not set for output tensor logits" in program.log.lines[-1]
    other = program.engine.create_execution_context()
    assert not other.set_input_shape("input_ids", (1, 1))
    assert "No optimization profile" in program.log.lines[-1]


@pytest.mark.parametrize(
    "spoil,words",
    [
        (lambda p, c: c.set_tensor_address("input_ids", p.device(4)), "outside"),
        (lambda p, c: c.set_tensor_address("input_ids", p.device(512) + 4), "not aligned"),
        (lambda p, c: c.set_tensor_address("kv_lens", p.pinned), "is not device memory"),
        (lambda p, c: c.set_tensor_address("k_pool_out.0", p.pools["k_pool.1"]), "memory of its input"),
        (lambda p, c: c.set_tensor_address("logits", p.pools["v_pool.0"]), "overlaps"),
        (lambda p, c: p.cuda.cuMemFree(p.pools["k_pool.0"]), "use after free"),
    ],
)
def test_wrong_addresses_are_caught(
    rtx_engine: Callable[..., Any], program: Program, spoil: Any, words: str
) -> None:
    context = ready(program, rtx_engine())
    spoil(program, context)
    with pytest.raises(DoubleError, match=words):
        program.run(context)


def test_scratch_memory_is_the_users_with_that_strategy(
    rtx_engine: Callable[..., Any], program: Program
) -> None:
    config = program.engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(real.ExecutionContextAllocationStrategy.USER_MANAGED)
    before = program.cuda.memory.device_bytes
    program.engine.create_execution_context(config)
    assert program.cuda.memory.device_bytes == before
    strategy = real.ExecutionContextAllocationStrategy.USER_MANAGED
    make, program.engine.create_execution_context = (
        program.engine.create_execution_context,
        lambda: make(strategy),
    )
    context = ready(program, rtx_engine())
    assert not program.run(context)
    assert "device memory of 0 bytes is less" in program.log.lines[-1]
    size = program.engine.get_device_memory_size_for_profile_v2(0)
    scratch = program.device(size)
    context.set_device_memory(scratch, size - 1)
    assert not program.run(context)
    context.set_device_memory(scratch, size)
    assert program.run(context)
    program.cuda.cuMemFree(scratch)
    with pytest.raises(DoubleError, match="use after free"):
        program.cuda.cuStreamSynchronize(program.stream)


def test_one_context_on_two_streams_races(rtx_engine: Callable[..., Any], program: Program) -> None:
    context = ready(program, rtx_engine())
    other = program.cuda.cuStreamCreate(1)[1]
    assert program.run(context)
    assert context.execute_async_v3(int(other))
    program.cuda.cuStreamSynchronize(program.stream)
    with pytest.raises(DoubleError, match="race: TensorRT run"):
        program.cuda.cuStreamSynchronize(other)


def test_a_context_outlives_its_runs(rtx_engine: Callable[..., Any], program: Program) -> None:
    context = ready(program, rtx_engine())
    assert program.run(context)
    del context
    gc.collect()
    assert any("destroyed while a run of it was queued" in one for one in program.cuda.memory.violations)


def test_a_capture_needs_a_run_of_its_shapes_before(rtx_engine: Callable[..., Any], program: Program) -> None:
    context, stream = ready(program, rtx_engine()), program.stream
    program.cuda.cuStreamBeginCapture(stream, GLOBAL)
    assert not program.run(context)
    assert "run once before capture" in program.log.lines[-1]
    assert program.cuda.cuStreamEndCapture(stream)[0].name == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    assert program.run(context)
    program.cuda.cuStreamBeginCapture(stream, GLOBAL)
    assert program.run(context)
    graph = program.cuda.cuStreamEndCapture(stream)[1]
    executable = program.cuda.cuGraphInstantiate(graph, 0)[1]
    first = program.result(2, 320)
    program.cuda.cuMemsetD8Async(program.logits, 0, 2 * 320 * 4, stream)
    program.cuda.cuGraphLaunch(executable, stream)
    np.testing.assert_array_equal(program.result(2, 320), first)
    del context
    gc.collect()
    program.cuda.cuGraphLaunch(executable, stream)
    with pytest.raises(DoubleError, match="after its context had been destroyed"):
        program.cuda.cuStreamSynchronize(stream)


def test_a_context_that_captures_itself_cannot_be_captured(program: Program) -> None:
    config = program.engine.create_runtime_config()
    config.cuda_graph_strategy = real.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
    assert not program.engine.create_execution_context(config).is_stream_capturable(int(program.stream))
    assert program.context(0).is_stream_capturable(int(program.stream))


def test_plans_of_others_are_refused(rtx_engine: Callable[..., Any]) -> None:
    engine = rtx_engine()
    program = Program(engine)
    runtime = program.trt.Runtime(program.log)
    assert runtime.deserialize_cuda_engine(engine.plan_bytes[:-1]) is None
    assert "Serialization assertion" in program.log.lines[-1]
    program.cuda.sm = (7, 5)
    assert runtime.deserialize_cuda_engine(engine.plan_bytes) is None
    assert "not built for the current device" in program.log.lines[-1]
    with pytest.raises(TypeError):
        program.trt.Runtime("no logger")


def test_weights_take_device_memory_until_the_engine_goes(rtx_engine: Callable[..., Any]) -> None:
    engine = rtx_engine()
    program = Program(engine)
    held = program.cuda.memory.device_bytes
    del program.engine
    gc.collect()
    assert held - program.cuda.memory.device_bytes >= program.plan.weights_bytes
    program.cuda.memory.total_bytes = 1
    runtime = program.trt.Runtime(program.log)
    assert runtime.deserialize_cuda_engine(engine.plan_bytes) is None
    assert "OutOfMemory" in program.log.lines[-1]


def test_weights_stream_from_the_host(rtx_engine: Callable[..., Any]) -> None:
    engine = rtx_engine()
    program = Program(engine)
    plan = engine.plan(streamable_bytes=100_000)
    program.trt.know(plan, engine.plan_bytes)
    memory = program.cuda.memory
    before = memory.device_bytes
    trt_engine = program.trt.Runtime(program.log).deserialize_cuda_engine(engine.plan_bytes)
    assert memory.device_bytes - before == pytest.approx(plan.weights_bytes - 100_000, abs=512)
    scratch = trt_engine.device_memory_size_v2
    assert trt_engine.weight_streaming_budget_v2 == trt_engine.streamable_weights_size == 100_000
    trt_engine.weight_streaming_budget_v2 = 20_480
    assert memory.device_bytes - before == pytest.approx(plan.weights_bytes - 100_000 + 20_480, abs=512)
    assert trt_engine.device_memory_size_v2 == scratch + trt_engine.weight_streaming_scratch_memory_size
    context = trt_engine.create_execution_context()
    trt_engine.weight_streaming_budget_v2 = 0  # not beside a context
    assert trt_engine.weight_streaming_budget_v2 == 20_480
    del context
    gc.collect()
    memory.total_bytes = memory.device_bytes
    trt_engine.weight_streaming_budget_v2 = 100_000
    assert "OutOfMemory" in program.log.lines[-1]


def test_runtime_caches_fit_their_version_and_device(
    rtx_engine: Callable[..., Any], program: Program
) -> None:
    config = program.engine.create_runtime_config()
    cache = config.create_runtime_cache()
    assert config.set_runtime_cache(cache)
    make, program.engine.create_execution_context = (
        program.engine.create_execution_context,
        lambda: make(config),
    )
    context = ready(program, rtx_engine())
    assert program.run(context) and program.run(context) and program.trt.num_compiled == 1
    blob = bytes(cache.serialize())
    again = config.create_runtime_cache()
    assert again.deserialize(blob) and again.kernels == cache.kernels
    damaged = bytearray(blob)
    damaged[len(blob) // 2] ^= 1
    assert not config.create_runtime_cache().deserialize(damaged)
    program.cuda.sm = (9, 0)
    assert not config.create_runtime_cache().deserialize(blob)


def test_tensorrt_has_no_runtime_cache() -> None:
    trt = FakeTensorRt(FakeCuda(), is_rtx=False, version="11.4.0")
    assert not hasattr(trt, "CudaGraphStrategy") and hasattr(trt, "ExecutionContextAllocationStrategy")
