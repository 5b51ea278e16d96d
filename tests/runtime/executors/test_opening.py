"""Opening a GPU target: which device, what is refused and with which words, and that nothing is left behind."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from fake_engines import RtxEngine
from fake_machine import Machine
from plansmith.builder.batch import StepBatch
from plansmith.plugins.sampling import spec
from plansmith.runtime.batch import ModelInfo
from plansmith.runtime.engine import Engine, SamplingParams
from plansmith.runtime.errors import (
    CudaError,
    EngineFileError,
    Error,
    InvalidArgumentError,
    OutOfMemoryError,
    ShutdownError,
    UnsupportedError,
)
from plansmith.runtime.executors import cuda, opening, runtime_cache, trt
from plansmith.runtime.executors.cuda import Device
from plansmith.runtime.executors.executor import TensorRtExecutor
from plansmith.runtime.manifest import Manifest, load_manifest
from plansmith.serving.metrics.readings import read_state

TARGET = "sm89"


class World(Machine):
    """A machine with an engine that has a plan for sm89."""

    def __init__(self, engine: RtxEngine, **gpu: Any) -> None:
        super().__init__(engine, **gpu)
        self.path = engine.path

    @property
    def manifest(self) -> Manifest:
        return load_manifest(self.path)

    def open(self, kv_cache_bytes: int = 0) -> TensorRtExecutor:
        return self.executor(self.path, kv_cache_bytes=kv_cache_bytes)

    def open_streaming(self, kv_cache_bytes: int = 0) -> TensorRtExecutor:
        """Open the plan as one that was built with weight streaming, which its manifest says."""
        target = self.manifest.target(TARGET)
        streams = dataclasses.replace(target, flags=(*target.flags, "weight_streaming"))
        manifest = dataclasses.replace(self.manifest, targets={TARGET: streams})
        library = trt.Library(self.trt, "tensorrt_rtx")
        return opening.open_tensorrt(
            manifest, TARGET, kv_cache_bytes=kv_cache_bytes, bindings=self.cuda, library=library
        )


@pytest.fixture
def world(rtx_engine: Any) -> Iterator[World]:
    made = World(rtx_engine())
    yield made
    assert made.problems() == []


@pytest.fixture
def installed(world: World) -> Iterator[World]:
    """Let Engine.open find the machine."""
    with world.installed():
        yield world


def test_an_executor_describes_its_plan_and_leaves_nothing(world: World) -> None:
    executor = world.open()
    info = executor.describe()
    assert isinstance(info, ModelInfo)
    assert (info.max_batch_size, info.max_num_tokens, info.tokens_per_block) == (8, 32, 8)
    assert info.samples_rows == 1 and info.max_logits_rows == 8
    manifest = world.manifest
    kv = manifest.model.kv_bytes_per_token(manifest.target(TARGET).kv_dtype)
    assert info.kv_bytes_per_block == 8 * kv
    executor.open(20)
    use = executor.device_use()
    assert use.used + use.free == use.total and use.used > 20 * info.kv_bytes_per_block
    executor.close()
    executor.close()


def test_an_engine_tells_its_devices_memory(installed: World) -> None:
    with Engine.open(installed.path, "auto") as engine:
        assert engine.target == TARGET
        use = engine.device_use()
        assert use is not None and use.used > 0 and use.pinned > 0
        stats = engine.stats()
        assert 0.8 * use.total < stats.kv_cache_bytes < use.total
        readings = read_state(stats, None, use)["nv_trt_llm_runtime_memory_metrics"]
        assert (readings["gpu"], readings["pinned"]) == (use.used, use.pinned)
    with pytest.raises(ShutdownError):
        engine.device_use()


def test_auto_is_the_gpu_where_it_runs_and_cpu_elsewhere(
    installed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert opening.usable_target(installed.manifest) == TARGET
    installed.cuda.sm = (8, 6)
    monkeypatch.setattr(cuda, "load_bindings", lambda: FakeCuda(sm=(8, 6)))
    assert opening.usable_target(installed.manifest) == "cpu"
    monkeypatch.setattr(cuda, "load_bindings", lambda: FakeCuda(missing=True))
    assert opening.usable_target(installed.manifest) == "cpu"
    with Engine.open(installed.path, "auto", num_threads=1) as engine:
        assert engine.device_use() is None and engine.target == "cpu"


def test_auto_goes_by_the_device_that_is_named(installed: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two GPUs the second is asked for: its target is opened, not the one that the first would run."""
    manifest = installed.manifest
    other = dataclasses.replace(manifest.target(TARGET), sm=("sm86",))
    both = dataclasses.replace(manifest, targets={"sm86": other, **manifest.targets})
    devices = [Device(0, "A10", "GPU-aa", "sm86", 1), Device(1, "L4", "GPU-bb", "sm89", 1)]
    monkeypatch.setattr(cuda.Driver, "devices", lambda _driver: devices)
    found = {wanted: opening.usable_target(both, device=wanted) for wanted in (None, 0, "1", "GPU-b")}
    assert found == {None: "sm86", 0: "sm86", "1": TARGET, "GPU-b": TARGET}
    for wanted in (7, "GPU-xyz", "\N{SUPERSCRIPT TWO}"):
        with pytest.raises(UnsupportedError, match="is not there; choose one of 0: A10"):
            opening.usable_target(both, device=wanted)
    with pytest.raises(UnsupportedError, match="is not there; choose one of"):
        Engine.open(installed.path, "auto", device="GPU-xyz")


def test_a_machine_without_a_driver_or_a_gpu(rtx_engine: Any) -> None:
    missing = World(rtx_engine(), missing=True)
    with pytest.raises(
        UnsupportedError, match=r"no working NVIDIA driver.*nvidia-smi.*open the cpu target"
    ) as caught:
        missing.open()
    # Without cuda-python's own words about where it searched.
    assert "no working NVIDIA driver (libcuda.so.1 cannot be loaded); check" in str(caught.value)
    none = World(rtx_engine(), num_devices=0)
    with pytest.raises(UnsupportedError, match=r"sees no GPU.*CUDA_VISIBLE_DEVICES"):
        none.open()


def test_another_gpu_is_told_what_runs_there(rtx_engine: Any) -> None:
    with pytest.raises(
        UnsupportedError, match=r"is sm86.* build one that does with: plansmith build .*--target sm86"
    ):
        World(rtx_engine(), sm=(8, 6)).open()
    with pytest.raises(UnsupportedError, match=r"sm87, the plan of target sm89 .* open the cpu target"):
        World(rtx_engine(), sm=(8, 7)).open()
    manifest = load_manifest(rtx_engine().path)
    both = dataclasses.replace(
        manifest,
        targets={
            **manifest.targets,
            "rtx": dataclasses.replace(manifest.target(TARGET), sm=("sm80", "sm86")),
        },
    )
    with pytest.raises(UnsupportedError, match="open target rtx of this engine, which runs there"):
        opening.choose_device([Device(0, "A10", "GPU-1", "sm86", 1)], both, TARGET, None)


def test_a_device_is_named_by_index_or_uuid(rtx_engine: Any) -> None:
    manifest = load_manifest(rtx_engine().path)
    devices = [
        Device(0, "A10", "GPU-aa00", "sm86", 1),
        Device(1, "L4", "GPU-bb11", "sm89", 1),
        Device(2, "L4", "GPU-bb22", "sm89", 1),
    ]

    def choose(wanted: int | str | None) -> int:
        return opening.choose_device(devices, manifest, TARGET, wanted).index

    assert [choose(one) for one in (None, 1, "2", "GPU-bb2", "BB11")] == [1, 1, 2, 2, 1]
    with pytest.raises(
        UnsupportedError, match=r"'GPU-bb' is not one alone; choose one of 0: A10, sm86, GPU-aa00"
    ):
        choose("GPU-bb")
    assert choose("002") == 2
    for wanted in (3, "GPU-cc", "", "9" * 5000):
        with pytest.raises(UnsupportedError, match="is not there; choose one of"):
            choose(wanted)
    with pytest.raises(UnsupportedError, match="is sm86"):
        choose(0)


def test_versions_that_do_not_go_together(rtx_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    old = World(rtx_engine(), version=12080)
    with pytest.raises(UnsupportedError, match=r"driver supports CUDA 12.8, tensorrt_rtx .* CUDA 13"):
        old.open()
    other = World(rtx_engine())
    other.trt.__version__ = "1.9.0.4"
    with pytest.raises(
        UnsupportedError, match=r"built with tensorrt_rtx 1\.7.*1\.9\.0\.4 is installed.*--force"
    ):
        other.open()
    with pytest.raises(UnsupportedError, match="plansmith-cpu"):
        trt.load_library("plansmith-cpu")
    monkeypatch.setattr(trt.importlib, "import_module", _no_module)
    with pytest.raises(UnsupportedError, match=r"needs tensorrt, .*pip install -U 'plansmith\[tensorrt\]'"):
        trt.load_library("tensorrt")
    with pytest.raises(UnsupportedError, match=r"pip install 'plansmith\[gpu\]'"):
        cuda.load_bindings()


def _no_module(name: str) -> Any:
    raise ImportError(f"No module named {name!r}")


def test_too_little_memory_says_what_takes_how_much(rtx_engine: Any) -> None:
    world = World(rtx_engine(), total_bytes=1 << 20)
    with pytest.raises(
        OutOfMemoryError, match=r"does not fit on NVIDIA Double \(device 0\).*weights .*what helps"
    ):
        world.open()
    assert world.problems() == []
    world = World(rtx_engine())
    with pytest.raises(
        OutOfMemoryError, match=r"open it with kv_cache_bytes of at most \d+ \(room for \d+ tokens\)"
    ):
        world.open(kv_cache_bytes=1 << 40)
    assert world.problems() == []


def test_pools_get_the_share_that_is_asked_for(world: World) -> None:
    executor = world.open()
    half, most = executor.kv_budget(0.5, 0), executor.kv_budget(1.0, 0)
    block = executor.describe().kv_bytes_per_block
    assert abs(half - most / 2) <= block
    assert executor.kv_budget(0.5, 10 * block) == 10 * block
    with pytest.raises(OutOfMemoryError, match="give at most"):
        executor.kv_budget(0.5, most + 2 * block)
    executor.open(most // block)
    executor.close()


def test_a_plan_that_is_not_the_manifests_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = trt.TrtPlan.tensors

    def changed(plan: trt.TrtPlan) -> list[trt.Tensor]:
        first, second, *rest = tensors(plan)
        return [dataclasses.replace(first, dtype="int64"), dataclasses.replace(second, name="other"), *rest]

    monkeypatch.setattr(trt.TrtPlan, "tensors", changed)
    with pytest.raises(EngineFileError) as error:
        world.open()
    text = str(error.value)
    assert "input_ids is int64 instead of int32" in text
    assert "other is not in the manifest" in text and "position_ids is missing" in text


def test_a_damaged_plan_is_refused(world: World) -> None:
    world.trt.plans.clear()
    with pytest.raises(EngineFileError, match=r"cannot read the plan: .*Serialization"):
        world.open()


def test_options_that_do_not_apply(installed: World) -> None:
    with pytest.raises(UnsupportedError, match="takes no LoRA adapters"):
        Engine.open(installed.path, TARGET, max_adapters=2)
    with pytest.raises(
        UnsupportedError, match=f"target {TARGET} keeps no profile of its ops; open the cpu target"
    ):
        Engine.open(installed.path, TARGET, profile=True)
    with pytest.raises(InvalidArgumentError, match="cuda_graphs is 'on', it must be one of auto, off, own"):
        Engine.open(installed.path, TARGET, cuda_graphs="on")
    with pytest.raises(UnsupportedError, match="device '3' is not there; choose one of 0: NVIDIA Double"):
        Engine.open(installed.path, TARGET, device=3)
    for device in (-1, True, 10**5000):
        with pytest.raises(InvalidArgumentError, match=r"device is .*, it must be an integer between 0 and"):
            Engine.open(installed.path, TARGET, device=device)
    with pytest.raises(InvalidArgumentError, match="kv_cache_free_gpu_mem_fraction"):
        Engine.open(installed.path, TARGET, kv_cache_free_gpu_mem_fraction=1.5)


MAKERS = ("cuMemAlloc", "cuMemHostAlloc", "trt.create_context", "cuModuleLoadData", "cuEventCreate")


def leaves_nothing(world: World, names: list[str], index: int) -> bool:
    """Let call `index` of an opening fail; return whether it opened all the same."""
    world.cuda.calls.fail(None, index + 1)
    try:
        executor = world.open()
    except Error as error:
        assert str(error), names[index]
        is_open = False
    else:
        executor.close()
        is_open = True
    world.cuda.calls._failures.clear()
    assert world.problems() == [], (index, names[index])
    return is_open


def test_what_was_made_goes_when_the_rest_fails(world: World) -> None:
    world.open().close()
    names = list(world.cuda.calls.names)
    for name in MAKERS:
        assert not leaves_nothing(world, names, len(names) - 1 - names[::-1].index(name)), name


@pytest.mark.slow
def test_whatever_call_fails_nothing_is_left(world: World) -> None:
    world.open().close()
    names = list(world.cuda.calls.names)
    opened = [index for index in range(len(names)) if leaves_nothing(world, names, index)]
    # Calls that only release something, and the compiled kernels' cache, may fail unseen.
    assert len(opened) < len(names) / 2


def test_a_step_after_the_context_is_lost_says_so(world: World) -> None:
    executor = world.open()
    executor.open(8)
    world.cuda.calls.fail("cuMemcpyHtoDAsync", 1, "CUDA_ERROR_ILLEGAL_ADDRESS")
    step = StepBatch(
        input_ids=np.array([3], np.int32),
        position_ids=np.zeros(1, np.int32),
        query_lens=np.ones(1, np.int32),
        kv_lens=np.ones(1, np.int32),
        cu_query_lens=np.array([0, 1], np.int32),
        block_table=np.zeros((1, 1), np.int32),
        logits_rows=np.zeros(1, np.int32),
    )
    with pytest.raises(
        CudaError, match=r"cuMemcpyHtoDAsync failed: CUDA_ERROR_ILLEGAL_ADDRESS.*restart the process"
    ):
        executor.launch(step)  # type: ignore[arg-type]
    with pytest.raises(CudaError, match="does nothing any more: cuMemcpyHtoDAsync failed"):
        executor.launch(step)  # type: ignore[arg-type]
    executor.close()


def test_weights_that_do_not_fit_stay_on_the_host(rtx_engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = rtx_engine()

    def world(total_mib: int, streamable_mib: int) -> World:
        made = World(engine, total_bytes=total_mib << 20)
        plan = dataclasses.replace(
            engine.plan(), weights_bytes=40 << 20, streamable_bytes=streamable_mib << 20
        )
        made.trt.know(plan, engine.plan_bytes)
        return made

    roomy = world(64, 36)
    roomy.open_streaming().close()
    assert roomy.problems() == [] and not caplog.records
    with pytest.raises(OutOfMemoryError, match="no memory for the plan's weights"):
        world(32, 0).open_streaming()
    small = world(44, 36)
    executor = small.open_streaming(kv_cache_bytes=4 << 20)
    assert "stay in host memory and come over in every step: 36.0 MiB do not fit" in caplog.text
    executor.open((4 << 20) // executor.describe().kv_bytes_per_block)
    executor.close()
    assert small.problems() == []
    with pytest.raises(OutOfMemoryError, match="even with all weights on the host"):
        world(44, 36).open_streaming(kv_cache_bytes=40 << 20)


def test_a_plan_that_streams_weights_is_not_captured(rtx_engine: Any) -> None:
    """A run that copies weights waits for them, which no capture can hold."""
    engine = rtx_engine()
    for share, captured in ((1.0, True), (0.5, False)):
        world = World(engine)
        world.trt.know(dataclasses.replace(engine.plan(), streamable_bytes=4096), engine.plan_bytes)
        options = {"cuda_graphs": "own", "gpu_weights_percent": share, "manual_step": True}
        with world.engine(world.path, **options) as one:
            one.generate([[5, 6]], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
        assert (world.cuda.calls.counts["cuStreamBeginCapture"] > 0) == captured
        assert world.problems() == []


def test_kernels_of_another_version_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their arguments are others: launched as today's they would read what is no address."""
    scan = spec.SCAN
    newer = dataclasses.replace(scan, signature={**scan.signature, "more": "*i32"})
    monkeypatch.setattr(spec, "catalog", lambda: [newer])
    with pytest.raises(
        EngineFileError, match=r"sampling_scan .* compiled by another version .* build the engine"
    ):
        world.open()
    smaller = dataclasses.replace(scan, constants={**scan.constants, "CHUNK": 1024})
    monkeypatch.setattr(spec, "catalog", lambda: [smaller])
    with pytest.raises(EngineFileError, match="another version"):
        world.open()


def test_compiled_kernels_are_kept(
    rtx_engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rtx_engine()
    path = tmp_path / "engine"
    shutil.copytree(engine.path, path, ignore=shutil.ignore_patterns("runtime_cache*"))
    engine = dataclasses.replace(engine, path=path)
    folder = path / "targets" / TARGET
    prompt = [[5, 6, 7]]
    params = SamplingParams(max_tokens=2, ignore_eos=True)

    def compiled(world: World) -> int:
        with world.engine(path) as one:
            one.generate(prompt, params)
        assert world.problems() == []
        return int(world.trt.num_compiled)

    assert compiled(World(engine)) > 0
    (kept,) = folder.glob("runtime_cache.*.bin")
    assert "NVIDIA-Double-sm89-cuda13.0" in kept.name
    assert compiled(World(engine)) == 0
    kept.write_bytes(kept.read_bytes()[:-1])
    assert compiled(World(engine)) > 0 and "is damaged and is made again" in caplog.text
    assert compiled(World(engine)) == 0
    data = bytearray(kept.read_bytes())
    data[40] ^= 1
    kept.write_bytes(data)
    assert compiled(World(engine)) > 0
    assert not list(folder.glob(".runtime_cache.*"))

    # Another driver has a file of its own; where the engine cannot be written, it is the user's cache directory.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(runtime_cache.tempfile, "mkstemp", _refusing(folder))
    assert compiled(World(engine, version=13010)) > 0
    assert list((tmp_path / "cache" / "plansmith").rglob("*cuda13.1*.bin"))
    assert compiled(World(engine, version=13010)) == 0


def _refusing(folder: Path) -> Any:
    make = tempfile.mkstemp

    def mkstemp(**options: Any) -> Any:
        if options["dir"] == folder:
            raise PermissionError(13, "read-only")
        return make(**options)

    return mkstemp
