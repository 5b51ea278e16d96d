"""The arithmetic of a GPU's memory: known models, and how each part grows."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plansmith.builder.limits import Limits
from plansmith.builder.targets.registry import find_targets
from plansmith.builder.weight_sizes import assumed_recipe, plan_sizes, shape_of
from plansmith.runtime.errors import InvalidArgumentError
from plansmith.runtime.executors.pools import BlockShape
from plansmith.sizing.memory import (
    Load,
    MemoryUse,
    ModelShape,
    device_counts,
    devices_needed,
    gpu_use,
    kv_block_bytes,
    kv_bytes,
    kv_room,
    sequences_that_fit,
    size_text,
    split_use,
)
from plansmith.sizing.skus import SKUS
from random_weights import LLAMA_7B, LLAMA_70B, spec_of

shapes = st.builds(
    ModelShape,
    num_layers=st.integers(1, 100),
    num_heads=st.just(32),
    num_kv_heads=st.sampled_from([1, 2, 4, 8, 16, 32]),
    head_dim=st.sampled_from([64, 96, 128, 256]),
    hidden_size=st.integers(64, 8192),
    intermediate_size=st.integers(64, 32768),
    vocab_size=st.integers(1000, 256000),
)


def served(config: dict[str, object], precision: str, target: str, load: Load) -> MemoryUse:
    """Return what a model takes on a GPU."""
    spec = spec_of(config)
    limits = Limits(
        load.max_batch_size, load.max_num_tokens, load.context, load.context, 1, load.tokens_per_block
    )
    (found,) = find_targets([target])
    sizes = plan_sizes(spec, assumed_recipe(precision, spec), limits, found)
    gathers = found.compiler == "rtx"
    return gpu_use(shape_of(spec), load, sizes.weight_bytes, kv_value_bytes=2, gathers_pages=gathers)


@pytest.mark.parametrize("target", ["sm80", "sm90"])
@pytest.mark.parametrize(("context", "sequences"), [(2048, 4), (4096, 2)])
def test_a_7b_at_fp16_is_served_in_18_to_21_gb(target: str, context: int, sequences: int) -> None:
    batch = 64 if target == "sm90" else 16  # pages are gathered for a full batch
    use = served(LLAMA_7B, "fp16", target, Load(context, sequences, max_batch_size=batch))
    assert use.weights == pytest.approx(13.5e9, rel=0.01)
    assert 18e9 <= use.total <= 21e9


def test_a_70b_needs_two_80_gb_gpus_at_fp16_and_one_at_fp8() -> None:
    load, h100 = Load(4096), SKUS["h100"].memory_bytes
    shape = shape_of(spec_of(LLAMA_70B))
    half, eighth = (served(LLAMA_70B, name, "sm90", load) for name in ("fp16", "fp8"))
    assert half.weights == pytest.approx(141e9, rel=0.01) and half.total > h100
    assert devices_needed(shape, half, h100) == 2
    assert eighth.weights == pytest.approx(72.7e9, rel=0.01)
    assert devices_needed(shape, eighth, h100) == 1


@given(
    shape=shapes, sequences=st.integers(1, 512), blocks=st.integers(1, 4096), value=st.sampled_from([1, 2, 4])
)
def test_kv_is_a_product(shape: ModelShape, sequences: int, blocks: int, value: int) -> None:
    load = Load(32 * blocks, sequences, max_batch_size=512, max_num_tokens=512)
    expected = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * value * 32 * blocks * sequences
    assert kv_bytes(shape, load, value) == expected
    # A token more takes a block more of each sequence; the last token of a block takes none.
    block = kv_block_bytes(shape, 32, value)
    more, fewer = (dataclasses.replace(load, context=32 * blocks + by) for by in (1, -31))
    assert kv_bytes(shape, more, value) == expected + sequences * block
    assert kv_bytes(shape, fewer, value) == expected


@given(shape=shapes, factor=st.integers(2, 5))
def test_kv_grows_linearly_in_each_factor(shape: ModelShape, factor: int) -> None:
    load = Load(256, 3)
    once = kv_bytes(shape, load, 2)
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        larger = dataclasses.replace(shape, **{name: factor * getattr(shape, name)})
        assert kv_bytes(larger, load, 2) == factor * once
    assert kv_bytes(shape, dataclasses.replace(load, context=factor * 256), 2) == factor * once
    assert kv_bytes(shape, load, 2 * factor) == factor * once


def test_a_block_is_what_the_executors_pools_hold() -> None:
    shape = ModelShape(4, 16, 8, 64, 1024, 4096, 32000)
    assert kv_block_bytes(shape, 16, 2) == BlockShape(4, 8, 16, 64, 2).block_bytes


@given(shape=shapes, sequences=st.integers(1, 64), context=st.integers(16, 8192))
def test_what_fits_fits_and_one_more_does_not(shape: ModelShape, sequences: int, context: int) -> None:
    load = Load(context, sequences)
    use = gpu_use(shape, load, 1 << 30, kv_value_bytes=2)
    memory = use.beside_kv + int(kv_bytes(shape, load, 2) / 0.9) + 16
    fitting = sequences_that_fit(shape, load, 2, kv_room(use, memory))
    assert fitting == sequences
    room = kv_room(use, memory)
    assert kv_bytes(shape, dataclasses.replace(load, sequences=fitting + 1), 2) > room


def test_without_room_nothing_fits() -> None:
    shape = shape_of(spec_of(LLAMA_7B))
    use = gpu_use(shape, Load(2048), 20 << 30, kv_value_bytes=2)
    assert kv_room(use, 16 << 30) == 0
    assert sequences_that_fit(shape, Load(2048), 2, 0) == 0


def test_no_more_sequences_than_the_batch_fit() -> None:
    shape = shape_of(spec_of(LLAMA_7B))
    assert sequences_that_fit(shape, Load(128, max_batch_size=8), 2, 1 << 40) == 8


@given(shape=shapes, devices=st.sampled_from([2, 4, 8, 16, 32]))
def test_devices_share_evenly_and_keep_a_kv_head_each(shape: ModelShape, devices: int) -> None:
    use = gpu_use(shape, Load(1024, 4), 40 << 30, kv_value_bytes=2)
    part = split_use(shape, use, devices)
    assert part.weights * devices >= use.weights > (part.weights - 1) * devices
    assert part.kv * min(devices, shape.num_kv_heads) >= use.kv
    assert part.reserve == use.reserve and part.activations == use.activations
    assert split_use(shape, use, 1) == use


def test_only_cuts_that_divide_the_heads_are_tried() -> None:
    shape = dataclasses.replace(shape_of(spec_of(LLAMA_7B)), num_heads=12)
    assert list(device_counts(shape)) == [1, 2, 4]
    assert list(device_counts(dataclasses.replace(shape, num_heads=9))) == [1]
    use = MemoryUse(weights=100 << 30, kv=1 << 30, activations=0, logits=0)
    assert devices_needed(shape, use, 24 << 30) is None  # 4 are too few, 8 do not divide 12 heads
    assert devices_needed(shape, use, 40 << 30) == 4


def test_plans_that_gather_pages_take_a_layers_kv_besides() -> None:
    shape, load = shape_of(spec_of(LLAMA_7B)), Load(2048, 4)
    gathers, pages = (gpu_use(shape, load, 0, kv_value_bytes=2, gathers_pages=one) for one in (True, False))
    a_layer = kv_bytes(shape, dataclasses.replace(load, sequences=load.max_batch_size), 2) // shape.num_layers
    assert gathers.activations > a_layer > 8 * pages.activations
    assert gathers.kv == pages.kv and gathers.logits == pages.logits
    longer = dataclasses.replace(load, max_seq_len=4096)  # the plan's scratch is for its limit
    assert gpu_use(shape, longer, 0, kv_value_bytes=2).activations > 1.9 * a_layer


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (Load(128, 65), "sequences is 65, a plan with max_batch_size 64"),
        (Load(128, 0), "sequences is 0"),
        (Load(0), "context is 0"),
        (Load(128, max_num_tokens=32), "max_num_tokens is 32 and max_batch_size 64"),
        (Load(128, max_seq_len=100), "context is 128, a plan with max_seq_len 100"),
    ],
)
def test_loads_that_contradict_are_refused(load: Load, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        load.check()


def test_sizes_in_words() -> None:
    use = MemoryUse(weights=3 << 30, kv=1 << 20, activations=2048, logits=0)
    assert use.words() == "weights 3.0 GiB, KV cache 1.0 MiB, activations 2.0 KiB"
    assert size_text(12) == "12 bytes"


def test_the_arithmetic_needs_no_package() -> None:
    """The runtime and scripts import it alone."""
    code = (
        "import sys; import plansmith.sizing.memory, plansmith.sizing.cpu_memory, plansmith.sizing.roofline; "
        "bad = [m for m in sys.modules if m.split('.')[0] in ('numpy', 'torch', 'onnx_ir', 'rich')]; "
        "assert not bad and 'plansmith.builder' not in sys.modules, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
