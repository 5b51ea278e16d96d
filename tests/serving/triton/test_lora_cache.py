"""Adapters of requests in a real engine: what stays, what leaves, what comes back, and who waits for whom."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lora_requests import RANK, arrays, request
from plansmith.runtime import errors
from plansmith.runtime.engine import Engine, SamplingParams
from plansmith.serving.triton.lora_cache import LoraCache
from plansmith.serving.triton.lora_store import LoraStore, fingerprint_of
from plansmith.serving.triton.row import LoraRequest
from tiny_engines import build_tiny

PROMPT = [1, 5, 9, 33]


class GatedEngine(Engine):
    """An engine whose loads of adapters wait while `gate` is closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate = threading.Event()
        self.gate.set()
        self.num_waiting = 0
        self.num_loads = 0

    def load_adapter_arrays(self, name: str, config: Any, weights: Any) -> int:
        self.num_waiting += 1
        assert self.gate.wait(20)
        self.num_waiting -= 1
        self.num_loads += 1
        return super().load_adapter_arrays(name, config, weights)


@pytest.fixture(scope="module")
def engine_dir(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tiny_checkpoint("llama"), tmp_path_factory.mktemp("lora") / "engine")


@pytest.fixture
def engine(engine_dir: Path) -> Iterator[GatedEngine]:
    with GatedEngine.open(engine_dir, num_threads=1, max_adapters=2, max_adapter_rank=8) as engine:
        yield engine  # type: ignore[misc]


def tokens(engine: Engine, adapter: str | None) -> tuple[int, ...]:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, detokenize=False, adapter=adapter)
    return engine.generate(PROMPT, params)[0].token_ids


def load_once(cache: LoraCache, one: LoraRequest) -> str:
    name = cache.acquire(one)
    cache.release(name)
    return name


def name_of(engine: Engine, task_id: int) -> str:
    """Return the engine's name of a task's adapter."""
    (name,) = [name for name in engine.adapters if name.startswith(f"lora_task_id {task_id} (")]
    return name


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def write_directory(path: Path, config: Any, weights: Any) -> None:
    path.mkdir(parents=True)
    np.save(path / "model.lora_config.npy", config[None])
    np.save(path / "model.lora_weights.npy", weights[None])


# ---------------------------------------------------------------- loading and leaving


def test_an_adapter_that_came_once_is_there_by_its_id(engine: GatedEngine) -> None:
    cache = LoraCache(engine)
    assert cache.task_ids == [] and engine.adapters == {}
    first = cache.acquire(request(engine, 7))
    assert (
        cache.acquire(LoraRequest(7)) == first and cache.task_ids == [7] and list(engine.adapters) == [first]
    )
    config, weights = arrays(engine, 7)
    other = load_once(cache, request(engine, 8))
    got, base = tokens(engine, first), tokens(engine, None)
    assert got != base and got != tokens(engine, other)
    cache.release(first)
    cache.release(first)
    load_once(cache, request(engine, 9))  # 8 was used last, so 7 leaves
    engine.unload_adapter(other)
    engine.load_adapter_arrays("itself", config, weights)
    assert tokens(engine, "itself") == got


def test_the_least_recently_used_leaves(engine: GatedEngine) -> None:
    cache = LoraCache(engine)
    for task_id in (1, 2):
        load_once(cache, request(engine, task_id))
    load_once(cache, LoraRequest(1))
    load_once(cache, request(engine, 3))
    assert cache.task_ids == [1, 3]
    assert [name.split()[1] for name in engine.adapters] == ["1", "3"]
    with pytest.raises(errors.NotFoundError, match=r"^lora_task_id 2 is not in the cache; send lora_weights"):
        cache.acquire(LoraRequest(2))


def test_adapters_in_use_stay(engine: GatedEngine) -> None:
    cache = LoraCache(engine)
    first, second = cache.acquire(request(engine, 1)), cache.acquire(request(engine, 2))
    with pytest.raises(errors.OutOfMemoryError, match=r"all 2 LoRA adapters .* max_adapters"):
        cache.acquire(request(engine, 3))
    assert cache.task_ids == [1, 2]
    cache.release(first)
    load_once(cache, request(engine, 3))
    assert cache.task_ids == [2, 3] and second in engine.adapters
    cache.release(second)
    for name in (first, second, "lora_task_id 9"):
        with pytest.raises(errors.InvalidArgumentError, match="released more often"):
            cache.release(name)


def test_an_adapter_that_a_request_still_runs_with_is_not_taken_from_it(engine_dir: Path) -> None:
    with Engine.open(engine_dir, num_threads=1, max_adapters=1, manual_step=True) as engine:
        cache = LoraCache(engine)
        name = load_once(cache, request(engine, 1))
        running = engine.submit(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True, adapter=name))
        engine.step()
        with pytest.raises(errors.OutOfMemoryError, match="in use"):
            cache.acquire(request(engine, 2))
        assert cache.task_ids == [1] and cache.acquire(LoraRequest(1)) == name
        cache.release(name)
        assert len(running.result().token_ids) == 4
        load_once(cache, request(engine, 2))
        assert cache.task_ids == [2]


def test_an_engine_with_less_room_than_told_makes_room(engine: GatedEngine) -> None:
    cache = LoraCache(engine, max_adapters=9)
    engine.load_adapter_arrays("another's", *arrays(engine, 99))
    for task_id in (1, 2, 3):
        load_once(cache, request(engine, task_id))
        assert cache.task_ids == [task_id]
    held = cache.acquire(LoraRequest(3))
    with pytest.raises(errors.OutOfMemoryError, match="adapters are loaded"):
        cache.acquire(request(engine, 4))
    assert cache.task_ids == [3] and "another's" in engine.adapters
    cache.release(held)


def test_one_that_somebody_else_unloaded_makes_room_too(engine: GatedEngine) -> None:
    cache = LoraCache(engine)
    name = load_once(cache, request(engine, 1))
    engine.unload_adapter(name)
    load_once(cache, request(engine, 2))
    load_once(cache, request(engine, 3))
    assert cache.task_ids == [2, 3]


def test_an_engine_without_adapters_says_so(engine: GatedEngine) -> None:
    with pytest.raises(errors.UnsupportedError, match="lora_task_id is 5, but the engine takes no LoRA"):
        LoraCache(engine, max_adapters=0).acquire(request(engine, 5))


# ---------------------------------------------------------------- other arrays under an id


def test_an_id_stands_for_its_arrays(engine: GatedEngine) -> None:
    cache = LoraCache(engine)
    name = load_once(cache, request(engine, 1))
    assert load_once(cache, request(engine, 1)) == name
    config, weights = arrays(engine, 1)
    assert load_once(cache, LoraRequest(1, weights.astype(np.float32), config)) == name
    changed = weights.copy()
    changed[-1, 0] += 1
    other_config = config.copy()
    other_config[0, 0] = 0
    for other in (LoraRequest(1, changed, config), LoraRequest(1, weights, other_config)):
        with pytest.raises(
            errors.InvalidArgumentError, match=r"^lora_task_id 1 is in the cache with other arrays"
        ):
            cache.acquire(other)
    assert engine.num_loads == 1
    for task_id in (2, 3):
        load_once(cache, request(engine, task_id))
    load_once(cache, request(engine, 1, seed=44))  # nobody knows the old one any more


def test_arrays_that_do_not_fit_leave_nothing_behind(engine: GatedEngine) -> None:
    cache = LoraCache(engine, host_memory_bytes=1 << 30)
    config, weights = arrays(engine, 1)
    for bad, error in (
        (LoraRequest(1, weights[:, :10], config), errors.ShapeError),
        (LoraRequest(1, weights, config * [99, 1, 1]), errors.CheckpointError),
        (LoraRequest(1, np.repeat(weights, 5, axis=1), config * [1, 1, 5]), errors.ShapeError),
    ):
        with pytest.raises(error):
            cache.acquire(bad)
        assert cache.task_ids == [] and engine.adapters == {}
        with pytest.raises(errors.NotFoundError):
            cache.acquire(LoraRequest(1))
    load_once(cache, LoraRequest(1, weights, config))


# ---------------------------------------------------------------- what comes back


def test_host_memory_brings_an_adapter_back(engine: GatedEngine) -> None:
    cache = LoraCache(engine, host_memory_bytes=1 << 30)
    want = tokens(engine, load_once(cache, request(engine, 1)))
    for task_id in (2, 3):
        load_once(cache, request(engine, task_id))
    assert cache.task_ids == [2, 3]
    with pytest.raises(errors.InvalidArgumentError, match="other arrays"):
        cache.acquire(request(engine, 1, seed=44))
    assert tokens(engine, load_once(cache, LoraRequest(1))) == want
    with pytest.raises(errors.InvalidArgumentError, match="other arrays"):
        cache.acquire(request(engine, 1, seed=44))


def test_host_memory_is_bounded(engine: GatedEngine) -> None:
    requests = [request(engine, task_id) for task_id in range(4)]
    prints = [fingerprint_of(one) for one in requests]
    size = sum(array.nbytes for array in arrays(engine, 0))
    store = LoraStore(max_bytes=2 * size)
    for one, mark in zip(requests[:2], prints, strict=False):
        assert mark is not None
        store.keep(one, mark)
    assert store.find(0) == (requests[0], prints[0]) and store.num_bytes == 2 * size
    assert prints[2] is not None
    store.keep(requests[2], prints[2])
    assert store.find(1) == (None, None) and store.find(2)[0] is requests[2] and store.num_bytes == 2 * size
    store.keep(requests[2], prints[2])
    assert store.num_bytes == 2 * size
    small = LoraStore(max_bytes=size - 1)
    small.keep(requests[0], b"")
    assert small.find(0) == (None, None) and small.num_bytes == 0


def test_a_directory_of_adapters(engine: GatedEngine, tmp_path: Path) -> None:
    for task_id in (10, 2, 31):
        config, weights = arrays(engine, task_id, np.float32)
        write_directory(tmp_path / str(task_id), config, weights)
    (tmp_path / "readme").mkdir()
    (tmp_path / "5").write_text("no directory")
    cache = LoraCache(engine, prefetch_dir=tmp_path)
    assert cache.task_ids == [2, 10]
    want = tokens(engine, load_once(cache, LoraRequest(2)))
    engine.unload_adapter(next(name for name in engine.adapters if " 10 " in name))
    engine.load_adapter_arrays("itself", *arrays(engine, 2))
    assert tokens(engine, "itself") == want
    engine.unload_adapter("itself")
    load_once(cache, LoraRequest(31))
    assert 31 in cache.task_ids
    load_once(cache, request(engine, 31))  # sent in float16, as clients do, it is the same adapter
    with pytest.raises(errors.InvalidArgumentError, match="other arrays"):
        cache.acquire(request(engine, 31, seed=44))


def test_a_directory_of_pefts_form(engine: GatedEngine, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    assert engine.manifest is not None
    hidden = engine.manifest.model.hidden_size
    (tmp_path / "4").mkdir()
    prefix = "base_model.model.model.layers.0.self_attn.o_proj"
    source = np.random.default_rng(0)
    inputs = engine.model_info.num_heads * engine.model_info.head_dim
    save_file(
        {
            f"{prefix}.lora_A.weight": source.normal(0, 1, (RANK, inputs)).astype(np.float32),
            f"{prefix}.lora_B.weight": source.normal(0, 1, (hidden, RANK)).astype(np.float32),
        },
        tmp_path / "4" / "adapter_model.safetensors",
    )
    (tmp_path / "4" / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj"]}'
    )
    cache = LoraCache(engine, prefetch_dir=tmp_path)
    assert tokens(engine, load_once(cache, LoraRequest(4))) != tokens(engine, None)
    with pytest.raises(errors.InvalidArgumentError, match="other arrays"):
        cache.acquire(request(engine, 4))


def test_a_directory_that_is_not_there_or_holds_none_is_an_error(engine: GatedEngine, tmp_path: Path) -> None:
    with pytest.raises(
        errors.CheckpointError, match=r"missing: lora_prefetch_dir cannot be listed \(No such"
    ):
        LoraCache(engine, prefetch_dir=tmp_path / "missing")
    (tmp_path / "3").mkdir()
    with pytest.raises(errors.CheckpointError, match="3"):
        LoraCache(engine, prefetch_dir=tmp_path)


# ---------------------------------------------------------------- threads


def start(target: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run a call on a thread; its result or error is put into the list."""
    out: list[Any] = []

    def run() -> None:
        try:
            out.append(target())
        except errors.Error as error:
            out.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, out


def test_who_needs_a_loaded_adapter_does_not_wait_for_one_that_loads(engine: GatedEngine) -> None:
    cache = LoraCache(engine)
    name = load_once(cache, request(engine, 1))
    engine.gate.clear()
    sent = request(engine, 2)
    loading, loaded = start(lambda: cache.acquire(sent))
    eventually(lambda: engine.num_waiting == 1)
    assert cache.acquire(LoraRequest(1)) == name and cache.task_ids == [1]  # at once
    waiting = [start(lambda: cache.acquire(LoraRequest(2))) for _ in range(3)]
    time.sleep(0.05)
    assert all(not out for _, out in waiting)
    engine.gate.set()
    for thread, _ in [(loading, loaded), *waiting]:
        thread.join(20)
    assert engine.num_loads == 2 and {out[0] for _, out in waiting} == set(loaded)
    cache.release(name)
    for _ in range(4):
        cache.release(loaded[0])


def test_who_waits_for_a_load_that_fails_is_told_or_loads_its_own(engine: GatedEngine) -> None:
    cache = LoraCache(engine)
    good = request(engine, 1)
    assert good.weights is not None
    engine.gate.clear()
    bad = LoraRequest(1, good.weights[:, :10], good.config)
    threads = [start(lambda: cache.acquire(bad))]
    eventually(lambda: engine.num_waiting == 1)
    threads.append(start(lambda: cache.acquire(good)))
    time.sleep(0.05)
    engine.gate.set()
    for thread, _ in threads:
        thread.join(20)
    assert isinstance(threads[0][1][0], errors.ShapeError)
    assert list(engine.adapters) == threads[1][1] and cache.task_ids == [1]
    cache.release(threads[1][1][0])
    engine.gate.clear()
    bad = LoraRequest(2, good.weights[:, :10], good.config)
    threads = [start(lambda: cache.acquire(bad))]
    eventually(lambda: engine.num_waiting == 1)
    threads.append(start(lambda: cache.acquire(LoraRequest(2))))
    time.sleep(0.05)
    engine.gate.set()
    for thread, _ in threads:
        thread.join(20)
    assert [type(out[0]) for _, out in threads] == [errors.ShapeError, errors.NotFoundError]


def test_who_needs_room_can_wait_for_a_release(engine: GatedEngine) -> None:
    cache = LoraCache(engine)
    held = [cache.acquire(request(engine, task_id)) for task_id in (1, 2)]
    sent = request(engine, 3)
    thread, out = start(lambda: cache.acquire(sent, lambda: True))
    time.sleep(0.05)
    assert not out
    cache.release(held[0])
    thread.join(20)
    assert cache.task_ids == [2, 3] and out[0] in engine.adapters
    answers = iter([True, True, False])
    with pytest.raises(errors.OutOfMemoryError, match="in use"):
        cache.acquire(request(engine, 4), lambda: next(answers))
    assert next(answers, None) is None


def test_waiting_for_one_that_the_engine_still_uses(engine_dir: Path) -> None:
    with Engine.open(engine_dir, num_threads=1, max_adapters=1, manual_step=True) as engine:
        cache = LoraCache(engine)
        name = load_once(cache, request(engine, 1))
        running = engine.submit(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True, adapter=name))
        sent = request(engine, 2)
        thread, out = start(lambda: cache.acquire(sent, lambda: True))
        time.sleep(0.05)
        assert not out
        running.result()
        thread.join(20)
        assert cache.task_ids == [2] and out == list(engine.adapters)


def test_a_loaded_adapter_is_given_at_once_and_another_not_at_all(engine: GatedEngine) -> None:
    cache = LoraCache(engine)
    assert cache.acquire_loaded(LoraRequest(1)) is None
    name = load_once(cache, request(engine, 1))
    assert cache.acquire_loaded(request(engine, 1)) is None  # its arrays would have to be compared
    assert cache.acquire_loaded(LoraRequest(1)) == name
    with pytest.raises(errors.OutOfMemoryError):
        for task_id in (2, 3):
            cache.acquire(request(engine, task_id))  # the first is in use, and stays
    assert name in engine.adapters
    cache.release(name)
    engine.gate.clear()
    sent = request(engine, 4)
    cache.release(cache.acquire(LoraRequest(2)))
    cache.release(name_of(engine, 2))
    thread, _ = start(lambda: cache.acquire(sent))
    eventually(lambda: engine.num_waiting == 1)
    assert cache.acquire_loaded(LoraRequest(4)) is None
    engine.gate.set()
    thread.join(20)
    assert cache.acquire_loaded(LoraRequest(4)) is not None


def test_many_threads_get_their_own_adapters(engine: GatedEngine) -> None:
    cache = LoraCache(engine, host_memory_bytes=1 << 30)
    requests = {task_id: request(engine, task_id) for task_id in range(5)}
    want = {}
    for task_id, one in requests.items():
        want[task_id] = tokens(engine, load_once(cache, one))
    assert len(set(want.values())) == 5
    failures: list[BaseException] = []
    refused = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(12):
            task_id = choose.randrange(5)
            one = requests[task_id] if choose.random() < 0.3 else LoraRequest(task_id)
            try:
                name = cache.acquire(one)
            except errors.OutOfMemoryError:
                refused.append(task_id)
                continue
            try:
                assert tokens(engine, name) == want[task_id]
            finally:
                cache.release(name)

    def run(seed: int) -> None:
        try:
            work(seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(thread.is_alive() for thread in threads)
    assert len(engine.adapters) <= 2 and len(cache.task_ids) == len(engine.adapters)
    assert len(refused) < 40  # most got theirs
    for task_id in range(5):  # and none is left in use
        load_once(cache, LoraRequest(task_id))
