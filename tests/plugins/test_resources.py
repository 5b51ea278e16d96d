"""What a cubin takes, as the compiler and cuobjdump say it."""

from __future__ import annotations

import dataclasses

import pytest
from plansmith.plugins.aot import compile_kernels
from plansmith.plugins.catalog import catalog
from plansmith.plugins.resources import Resources, parse_resources
from plansmith.runtime.errors import BuildError

USAGE = """
  REG:64 STACK:2392 SHARED:1024 LOCAL:16 CONSTANT[0]:392 TEXTURE:0 SURFACE:0 SAMPLER:0

 Function next:
  REG:1 STACK:1 SHARED:1 LOCAL:1 CONSTANT[0]:0
"""
LOG = """
ptxas info    : Function properties for spill
    2392 bytes stack frame, 5128 bytes spill stores, 7172 bytes spill loads
"""


def test_numbers_of_the_first_function() -> None:
    found = parse_resources(USAGE, LOG)
    assert found == Resources(
        registers=64,
        stack_bytes=2392,
        spill_store_bytes=5128,
        spill_load_bytes=7172,
        local_bytes=16,
        static_shared_bytes=1024,
    )
    assert found.spills


@pytest.mark.parametrize(("usage", "log"), [(USAGE.replace("REG", "R"), LOG), (USAGE, ""), ("", LOG)])
def test_words_of_another_version(usage: str, log: str) -> None:
    with pytest.raises(BuildError, match=r"cannot be read from .*use triton 3.6 to 3.9"):
        parse_resources(usage, log)


def test_a_kernel_that_spills_is_seen() -> None:
    pytest.importorskip("triton")
    combine = next(k for k in catalog(80) if k.name == "attention_combine_fp16_same_d256")
    # 16 splits of 256 numbers over 32 threads are 128 registers each, and as many again beside them.
    crowded = dataclasses.replace(combine, num_warps=1, constants={**combine.constants, "N": 32})
    (one,) = compile_kernels([crowded], [80])
    assert one.resources.spills and one.resources.spill_store_bytes > 0
    assert one.resources.stack_bytes >= 4
