"""TensorRT compiles plans with our plugins on this GPU: the reference's logits come out, pools stay in place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from plansmith.builder.batch import BatchPlanner, PlannedStep
from plansmith.builder.graph import build_graph
from plansmith.builder.graph import contract as graph_contract
from plansmith.builder.limits import Limits
from plansmith.builder.precision import of_checkpoint
from plansmith.builder.scheme import KvFormat, Quantization
from plansmith.builder.targets.reference import ReferenceSession
from plansmith.builder.targets.tensorrt import contract, targets
from plansmith.builder.targets.tensorrt.compile import compile_plan
from plansmith.runtime.executors.cuda import Context
from plansmith.runtime.executors.trt import load_library
from quantized_weights import RandomQuantizedWeights, quantized_spec

pytestmark = pytest.mark.gpu
pytest.importorskip("tensorrt")

# Two splits of 512 positions, so that Combine is in the plan and used.
LIMITS = Limits(
    max_batch_size=4, max_num_tokens=256, max_input_len=1024, max_seq_len=1024, tokens_per_block=32
)
BLOCKS = 80
SPEC = quantized_spec(head_dim=32, max_position_embeddings=1024)


class Session:
    """A plan on the device with pools of NaN (int8: 99), run step by step."""

    def __init__(self, context: Context, plan: bytes, spec: Any) -> None:
        self.context, self.stream = context, context.stream()
        self.plan = load_library("tensorrt").deserialize(plan)
        self.run = self.plan.context(0, int(self.stream), "off", repeats=False)
        size = self.plan.scratch_bytes(0)
        self.run.set_scratch(context.alloc(max(256, size)), size)
        self.pools: dict[str, tuple[int, int]] = {}
        self.vocab_size = spec.vocab_size
        for one in self.plan.tensors():
            if one.is_input and graph_contract.is_pool(one.name):
                width = 2 if one.dtype in ("float16", "bfloat16") else 1
                shape = (BLOCKS, *one.shape[1:])
                held = np.full(int(np.prod(shape)) * width, 0x7F if one.dtype != "int8" else 99, np.uint8)
                address = self._give(held)
                self.run.set_input(one.name, shape, address)
                self.run.set_address(graph_contract.pool_out(one.name), address)
                self.pools[one.name] = (address, held.size)

    def _give(self, array: npt.NDArray[Any]) -> int:
        """Copy an array to memory of its own on the device."""
        pinned = self.context.alloc_pinned(max(256, array.nbytes))
        pinned.bytes[: array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
        address = self.context.alloc(max(256, array.nbytes))
        self.context.copy_to_device(address, pinned.address, array.nbytes, self.stream)
        self.context.wait(self.stream)
        self.context.free_pinned(pinned)
        return address

    def _take(self, address: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        pinned = self.context.alloc_pinned(num_bytes)
        self.context.copy_to_host(pinned.address, address, num_bytes, self.stream)
        self.context.wait(self.stream)
        taken: npt.NDArray[np.uint8] = pinned.bytes[:num_bytes].copy()
        self.context.free_pinned(pinned)
        return taken

    def step(self, step: PlannedStep) -> npt.NDArray[np.float32]:
        """Return the logits (R, V)."""
        arrays = {name: getattr(step.batch, name) for name in contract.STEP_INPUTS}
        addresses = {name: self._give(array) for name, array in arrays.items()}
        for name, array in arrays.items():
            self.run.set_input(name, array.shape, addresses[name])
        rows = step.batch.logits_rows.size
        logits = self.context.alloc(max(256, rows * self.vocab_size * 4))
        self.run.set_address(graph_contract.LOGITS, logits)
        self.run.run(int(self.stream))
        found = self._take(logits, rows * self.vocab_size * 4).view(np.float32).reshape(rows, -1)
        for address in (logits, *addresses.values()):
            self.context.free(address)
        return found

    def held(self, name: str) -> npt.NDArray[np.uint8]:
        """A pool's bytes."""
        return self._take(*self.pools[name])


@pytest.fixture(scope="session")
def target(context: Context) -> targets.TensorRtTarget:
    """The target of this GPU."""
    sm = context.device.sm
    found = next((one for one in targets.TARGETS.values() if one.sm == sm), None)
    if found is None:
        pytest.skip(f"no TensorRT target is {sm}")
    return found


def steps(vocab_size: int) -> Iterator[PlannedStep]:
    rng = np.random.default_rng(5)
    planner = BatchPlanner(
        [rng.integers(3, vocab_size, n).tolist() for n in (700, 90, 33, 5, 260)],
        num_blocks=BLOCKS,
        tokens_per_block=LIMITS.tokens_per_block,
        max_blocks_per_seq=LIMITS.max_blocks_per_seq,
        max_num_tokens=LIMITS.max_num_tokens,
        max_batch_size=LIMITS.max_batch_size,
        seed=1,
    )
    return iter(planner)


@pytest.mark.parametrize("kv", ["float", "fp8", "int8"])
def test_plan_gives_the_references_logits(
    kv: KvFormat, context: Context, target: targets.TensorRtTarget, tmp_path: Path
) -> None:
    if kv == "fp8" and int(target.sm.removeprefix("sm")) < 89:
        pytest.skip("FP8 tensors need sm89")
    held = Quantization("test", "tests", (), kv)
    weights = RandomQuantizedWeights(SPEC, held)
    graph, wide = (
        build_graph(SPEC, weights, of_checkpoint(held, kind), LIMITS, compute=kind)
        for kind in ("float16", "float32")
    )
    plan = tmp_path / "model.plan"
    done = compile_plan(graph, LIMITS, SPEC, target, plan, tmp_path / "log")
    assert not [line for line in done.warnings if "PagedAttention" in line or "KvWrite" in line]
    session, reference = Session(context, plan.read_bytes(), SPEC), ReferenceSession(wide, BLOCKS)
    before = session.held("k_pool.0")
    errors, size, used = [], [], set()
    for step in steps(SPEC.vocab_size):
        logits, wanted = session.step(step), reference.step(step.batch)
        used |= set(step.batch.block_table.ravel().tolist()) - {-1}
        if wanted.size:
            errors.append(np.square(logits - wanted).mean())
            size.append(np.square(wanted).mean())
    # As between float16 and float32 in numpy (tests/builder/targets/tensorrt); codes of pools fall either way at ties.
    assert np.sqrt(np.mean(errors) / np.mean(size)) < (0.01 if kv == "float" else 0.05)
    after, blocks = session.held("k_pool.0"), before.size // BLOCKS
    changed = {b for b in range(BLOCKS) if (before != after)[b * blocks : (b + 1) * blocks].any()}
    assert changed == used, "the plan wrote a copy of the pool, or blocks that no sequence has"
