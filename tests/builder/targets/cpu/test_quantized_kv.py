"""FP8, INT8 and float16 KV pools in the core against the float64 reference of the op, in mixed steps of a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from mixed_steps import row_errors, run
from plan_interpreter import PlanInterpreter
from plansmith.builder.graph import build_graph
from plansmith.builder.limits import make_limits
from plansmith.builder.precision import of_checkpoint
from plansmith.builder.scheme import Quantization
from plansmith.builder.spec import DecoderSpec
from plansmith.builder.targets.cpu import compile_plan
from plansmith.builder.targets.cpu.plan_file import Op
from plansmith.builder.targets.cpu.plan_reader import read_plan
from plansmith.builder.targets.cpu.session import CpuSession
from plansmith.plugins.paged_attention.reference import paged_attention
from plansmith.runtime.errors import InvalidArgumentError, UnsupportedError
from quantized_weights import RandomQuantizedWeights
from tiny_graph import EVERYTHING, rope, tiny_spec

Kv = Literal["float", "float16", "fp8", "int8"]
NUM_BLOCKS, BLOCK, LENGTHS = 24, 8, (60, 17, 5, 30, 1, 44)
TOLERANCE = 2e-5  # of the largest logit; float32 sums in another order give about 1e-6
# The steps of float16 are so fine, and so many, that every other row sees a value that fell on the other side. It costs
# a row this share of what their rounding does, which is 3e-5 and more.
FLOAT16_SHARE = 0.2
# Where float32 and float64 fall on two sides of a half, a code of K or V differs by one and what attends to it by up
# to a hundredth. It happens to one value in some ten thousand.
FLIPPED, FLIPPED_TOLERANCE = 0.1, 2e-2

# A window of 8, a soft cap, groups of 3 heads, and a head that is no multiple of a vector.
SPECS: dict[str, dict[str, Any]] = {
    "window": {},
    "everything": EVERYTHING,
    "odd": {"num_heads": 6, "head_dim": 20, "ropes": (rope(20),), "attn_scale": 20**-0.5},
}


class ReferenceAttention(PlanInterpreter):
    """The plan in numpy, with attention and the pools left to the op's own reference."""

    def __init__(self, path: Path, kv: Kv) -> None:
        super().__init__(path, NUM_BLOCKS)
        self.kv = kv
        layers, *shape = self.k_pools.shape
        self.pools = [list(np.full((2, *shape), np.nan)) for _ in range(layers)]

    def _paged_attention(self, op: Op) -> None:
        heads, kv_heads, width, layer, window = op.i[:5]
        q = self.view(op.ins[0], heads * width)
        # The codes are those of the core's float32 values.
        k, v = (self.view(op.ins[n], kv_heads * width).astype(np.float32) for n in (1, 2))
        k_scale, v_scale = (1.0, 1.0) if op.tensors[0] < 0 else self.matrix(op.tensors[0])[0]
        if self.kv == "float":
            k_scale = v_scale = 1.0
        b = self.batch
        out, *self.pools[layer] = paged_attention(
            *(q, k, v, *self.pools[layer], b.cu_query_lens, b.kv_lens, b.block_table),
            num_heads=heads,
            kv_num_heads=kv_heads,
            head_dim=width,
            scale=op.f[0],
            softcap=op.f[1],
            window=window,
            kv=self.kv,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        self.view(op.out, heads * width)[:] = out


def compiled(spec: DecoderSpec, kv: Kv, path: Path) -> Path:
    held = Quantization("test", "tests", (), "float" if kv == "float16" else kv)
    recipe = dataclasses.replace(of_checkpoint(held, "float32"), kv_format=kv)
    limits = make_limits(
        spec.max_position_embeddings,
        max_batch_size=4,
        max_num_tokens=24,
        max_seq_len=64,
        tokens_per_block=BLOCK,
    )
    graph = build_graph(spec, RandomQuantizedWeights(spec, held), recipe, limits)
    compile_plan(graph, spec, limits, path)
    return path


@pytest.mark.parametrize("kv", ["float16", "fp8", "int8"])
@pytest.mark.parametrize("fields", SPECS)
def test_the_core_attends_as_the_reference_does(fields: str, kv: Kv, tmp_path: Path) -> None:
    spec = tiny_spec(**SPECS[fields])
    plan = compiled(spec, kv, tmp_path / "model.plan")
    wanted = run(ReferenceAttention(plan, kv), 0, LENGTHS, spec.vocab_size)
    unquantized = run(ReferenceAttention(plan, "float"), 0, LENGTHS, spec.vocab_size)
    rounding = row_errors(unquantized, wanted)
    assert np.median(rounding) > (
        TOLERANCE if kv == "float16" else 20 * TOLERANCE
    )  # else nothing would be shown
    for isa in ("portable", "avx2", "avx512vnni", "avx512bf16", "amx", "neon"):
        try:
            session = CpuSession(plan, NUM_BLOCKS, num_threads=2, isa=isa)
        except (InvalidArgumentError, UnsupportedError):  # another machine, another library
            assert isa != "portable"
            continue
        with session:
            for seed in (0, 1):  # the second pass finds the first one's leftovers in the pools
                errors = row_errors(run(session, seed, LENGTHS, spec.vocab_size), wanted)
                if kv == "float16":
                    assert errors.max() < 5 * TOLERANCE
                    assert np.median(errors) < FLOAT16_SHARE * np.median(rounding)
                    continue
                assert errors.max() < FLIPPED_TOLERANCE
                assert (errors > TOLERANCE).mean() <= FLIPPED


@pytest.mark.parametrize("kv", ["float", "float16", "fp8", "int8"])
def test_a_block_has_the_bytes_of_its_codes(kv: Kv, tmp_path: Path) -> None:
    spec = tiny_spec()
    plan = compiled(spec, kv, tmp_path / "model.plan")
    values = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * BLOCK
    with CpuSession(plan, 1) as session:
        assert session.info.kv_bytes_per_block == values * {"float": 4, "float16": 2}.get(kv, 1)
    assert read_plan(plan).kv_format.name == {"float": "F32", "float16": "F16", "fp8": "F8", "int8": "I8"}[kv]
