"""The chain of plugin nodes, launched as its descriptions say, against the op's reference."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from plansmith.builder.targets.tensorrt import contract
from plansmith.plugins.paged_attention import plugin_ops
from plansmith.plugins.paged_attention.plugin import smaller_tiles
from plansmith.plugins.paged_attention.plugin_ops import Layer, PluginOp
from plansmith.plugins.paged_attention.reference import paged_attention, quantize_kv
from plansmith.plugins.torch_launch import launch

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS, WIDTH = 4, 2, 32, 16, 40, 20
LENGTHS = (
    (1, 290),
    (5, 40),
    (2, 133),
    (17, 17),
    (1, 1),
)  # (new rows, positions held after the step) a sequence
SHAPE = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "head_dim": DIM}


class Problem:
    """A step's tensors under the plugins' names, and what the op's reference makes of them."""

    def __init__(self, kv: str, window: int, softcap: float) -> None:
        rng = np.random.default_rng(3)
        rows = [n for n, _ in LENGTHS]
        self.attributes: dict[str, Any] = {
            **SHAPE, "scale": DIM**-0.5, "softcap": softcap, "window": window, "query_rows": 2, "split_len": 128,
        }  # fmt: skip
        self.kv, self.blank, self.edge = kv, torch.nan, 0
        self.whole: dict[str, Any] = {}
        tokens = sum(rows)
        q, k, v = (
            rng.standard_normal((tokens, heads * DIM)).astype(np.float16)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        table = np.full((len(rows), WIDTH), -1, np.int32)
        free = iter(rng.permutation(BLOCKS).tolist())
        for b, (_, held) in enumerate(LENGTHS):
            used = -(-held // BLOCK)
            table[b, :used] = [next(free) for _ in range(used)]
        step = {
            "cu_query_lens": np.cumsum([0, *rows]).astype(np.int32),
            "kv_lens": np.array([held for _, held in LENGTHS], np.int32),
            "block_table": table,
        }
        scales = {"k_scale": 0.04, "v_scale": 0.03} if kv != "same" else {"k_scale": 1.0, "v_scale": 1.0}
        pools = rng.standard_normal((2, BLOCKS, KV_HEADS, BLOCK, DIM)).astype(np.float16)
        kind = "float" if kv == "same" else kv
        pools_held = [
            quantize_kv(pool.astype(np.float32), scale, kind).astype(np.float16)  # type: ignore[arg-type]
            for pool, scale in zip(pools, scales.values(), strict=True)
        ]
        scores = {name: self.attributes[name] for name in ("scale", "softcap", "window")}
        self.wanted, k_pool, v_pool = paged_attention(
            q, k, v, *pools_held, *step.values(), **SHAPE, **scores, kv=kind, **scales  # type: ignore[arg-type]
        )  # fmt: skip
        self.tensors: dict[str, Any] = {
            **{name: torch.from_numpy(array) for name, array in {"q": q, "k": k, "v": v, **step}.items()},
            **{name: torch.tensor(value, dtype=torch.float32) for name, value in scales.items()},
            "k_pool": self.codes(pools_held[0]),
            "v_pool": self.codes(pools_held[1]),
        }
        self.wanted_pools = {"k_pool": self.codes(k_pool), "v_pool": self.codes(v_pool)}

    def codes(self, numbers: Any) -> Any:
        """A pool as the kernels have it."""
        if self.kv == "fp8":
            return torch.from_numpy(numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
        return torch.from_numpy(numbers.astype(np.int8 if self.kv == "int8" else np.float16))

    def put(self, name: str, inner: Any) -> None:
        """Set a tensor, between two stretches of numbers that nobody may touch."""
        ends = torch.full((self.edge,), torch.nan, dtype=inner.dtype)
        self.whole[name] = torch.cat([ends, inner.flatten(), ends])
        self.tensors[name] = self.whole[name][self.edge : self.edge + inner.numel()].view(inner.shape)

    def run(self, op: PluginOp, *, is_smallest: bool = False) -> None:
        """Launch a node's kernel; what it gives is blank before."""
        attributes = {name: kind(self.attributes[name]) for name, kind in op.attributes.items()}
        layer = Layer("fp16", self.kv, BLOCK, attributes, 80)  # type: ignore[arg-type]
        shapes = {name: tuple(self.tensors[name].shape) for name in op.inputs}
        for name, shape in op.shapes(attributes, shapes).items():
            dtype = self.tensors[op.like[name]].dtype if name in op.like else torch.float32
            self.put(name, torch.full(shape, self.blank, dtype=dtype))
        kernel = op.kernel(layer)
        if is_smallest:
            *_, (*_, kernel) = smaller_tiles(kernel, op.min_rows(layer))
        made = op.launch(layer, kernel, shapes)
        order = [name for name in op.order(kernel, made.numbers) if name is not None]
        assert sorted(order) == sorted(kernel.signature), "TensorRT would pass something else"
        pointers = {name: self.tensors[name] for name in order if name not in made.numbers}
        launch(kernel, made.grid, {**pointers, **made.numbers})


@pytest.mark.parametrize(
    ("kv", "window", "softcap"),
    [("same", 0, 0.0), ("same", 150, 0.0), ("same", 0, 5.0), ("fp8", 20, 5.0), ("int8", 0, 0.0)],
)
def test_the_chain_is_the_op(kv: str, window: int, softcap: float) -> None:
    problem = Problem(kv, window, softcap)
    problem.run(plugin_ops.KV_WRITE)
    for name, pool in problem.wanted_pools.items():
        assert torch.equal(problem.tensors[name], pool), name
    first, end = np.cumsum([0, *(n for n, _ in LENGTHS)])[[0, -1]]
    assert first == 0 and end == len(problem.wanted)
    for op in (plugin_ops.DECODE, plugin_ops.COMBINE, plugin_ops.PREFILL):
        problem.run(op)
    out = problem.tensors["out"].numpy().astype(np.float64)
    # float16 output: 2^-11 of a value; weights and quantized values are float16 in the products as well.
    np.testing.assert_allclose(out, problem.wanted, atol=3e-3 * max(1.0, np.abs(problem.wanted).max()))


def test_the_smallest_tiles_are_the_op() -> None:
    problem = Problem("same", 150, 0.0)
    for op in plugin_ops.OPS:
        problem.run(op, is_smallest=True)
    out = problem.tensors["out"].numpy().astype(np.float64)
    np.testing.assert_allclose(out, problem.wanted, atol=3e-3 * max(1.0, np.abs(problem.wanted).max()))


def test_each_node_leaves_the_others_rows_alone() -> None:
    problem = Problem("same", 0, 0.0)
    few, whole = np.zeros(26, bool), np.zeros(26, bool)
    starts = np.cumsum([0, *(n for n, _ in LENGTHS)])
    for b, (n, held) in enumerate(LENGTHS):
        few[starts[b] : starts[b + 1]] = n <= 2
        whole[starts[b] : starts[b + 1]] = n <= 2 and held <= 128
    for op, written in (
        (plugin_ops.DECODE, whole),
        (plugin_ops.COMBINE, few),
        (plugin_ops.PREFILL, few | True),
    ):
        problem.run(op)
        done = ~torch.isnan(problem.tensors["out"]).any(dim=1).numpy()
        np.testing.assert_array_equal(done, written)


def run_no_step(step: dict[str, Any]) -> Problem:
    """Run every node on lengths and tables that no step has, and see that nothing beyond the tensors is touched."""
    problem = Problem("same", 0, 0.0)
    problem.blank, problem.edge = 7.0, 1 << 16
    problem.tensors |= {name: torch.from_numpy(array.astype(np.int32)) for name, array in step.items()}
    for name in ("k_pool", "v_pool", "q"):
        problem.put(name, torch.full_like(problem.tensors[name], 0.25))
    for op in plugin_ops.OPS:
        problem.run(op)
    for name, numbers in problem.whole.items():
        edges = torch.cat([numbers[: problem.edge], numbers[-problem.edge :]])
        assert torch.isnan(edges).all(), f"{name}: written beyond"
        assert not torch.isnan(problem.tensors[name]).any(), f"{name}: of what was read beyond a tensor"
    return problem


@pytest.mark.parametrize("bounds", [(-(2**31), 2**31), (-3, 40), (0, 2), (-400, 400)])
def test_random_numbers_as_a_step(bounds: tuple[int, int]) -> None:
    rng = np.random.default_rng(11)
    shapes = {"cu_query_lens": 6, "kv_lens": 5, "block_table": (5, WIDTH)}
    run_no_step({name: rng.integers(*bounds, shape) for name, shape in shapes.items()})


@pytest.mark.parametrize("rows", [2, 5])  # decode's and combine's, prefill's
@pytest.mark.parametrize(
    ("first_row", "kv_len"),
    [(-40, 200), (26, 200), (0, 1), (0, -9), (0, 2 * WIDTH * BLOCK), (0, 2**31 - 1)],
    ids=["before", "behind", "fewer than rows", "negative", "more than the table", "most"],
)
def test_sequences_that_no_step_has_are_left_alone(rows: int, first_row: int, kv_len: int) -> None:
    starts = first_row + rows * np.arange(6)
    problem = run_no_step(
        {"cu_query_lens": starts, "kv_lens": np.full(5, kv_len), "block_table": np.zeros((5, WIDTH))}
    )
    for name in ("out", "partials", "stats"):
        assert (problem.tensors[name] == 7.0).all(), name


def test_blocks_that_no_pool_has() -> None:
    for block in (-1, BLOCKS, 2**31 - 1):
        starts, lens = np.array([0, 1, 2, 8, 9, 10]), np.full(5, 200)
        run_no_step({"cu_query_lens": starts, "kv_lens": lens, "block_table": np.full((5, WIDTH), block)})


def test_names_are_the_graphs() -> None:
    ops = {op.name: op for op in plugin_ops.OPS}
    assert tuple(ops) == contract.PLUGINS
    assert (plugin_ops.NAMESPACE, plugin_ops.VERSION) == (contract.NAMESPACE, contract.VERSION)
