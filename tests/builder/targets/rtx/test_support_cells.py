"""TensorRT-RTX itself compiles, or refuses, every cell of the support table."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from plansmith.builder.graph import build_graph, save
from plansmith.builder.graph.graph_builder import GraphBuilder
from plansmith.builder.graph.linear import linear
from plansmith.builder.graph.weights import WeightLoader
from plansmith.builder.precision import of_checkpoint, precision
from plansmith.builder.scheme import ROW, WHOLE, Scheme
from plansmith.builder.targets.compiler_child import FATAL_WARNINGS
from plansmith.builder.targets.registry import find_targets
from plansmith.builder.targets.rtx import contract, targets
from plansmith.builder.targets.rtx.compile import compile_plan
from plansmith.builder.targets.rtx.pen import Pen
from plansmith.builder.targets.rtx.products import lower_products
from plansmith.builder.targets.support import Need, check_support, need_of, takes
from quantized_weights import SCHEMES, RandomQuantizedWeights, quantization, quantized_spec
from rtx_cells import Cell, Outcome, Product, compile_cells, products_of
from rtx_models import LIMITS

pytest.importorskip("tensorrt_rtx")

SPEC = quantized_spec()
MORE = {
    "fp8_channels_static": Scheme("fp8", ROW, input="fp8", input_group=WHOLE),
    "int4_fp8_static": Scheme("int4", 32, input="fp8", input_group=WHOLE),
    "int8_groups_static": Scheme("int8", 32, input="int8", input_group=WHOLE),
    "w4a8_zeros": Scheme("int4", 32, zero_points=True, input="fp8", input_group=WHOLE, fp8_grid=True),
    "w4a8_rows": Scheme("int4", 32, input="fp8", input_group=ROW, fp8_grid=True),
}
SAME = {
    "int4_64",
    "int4_128",
    "int4_awq",
    "int4_awq_zeros",
    "int8_static",
    "fp8_blocks_128",
}  # as others to a compiler
ALL = {name: one for name, one in (SCHEMES | MORE).items() if name not in SAME}
CODES = {"int8": "int8", "fp8": "fp8_e4m3", "fp4": "fp4_e2m1"}  # as plans name them


def one_product(name: str, compute: ir.DataType, *, is_lowered: bool = True) -> ir.Model:
    """Return a graph of one lowered product of 256 inputs and 128 outputs; of floats with the name "float"."""
    g = GraphBuilder(compute)
    if name == "float":
        held, recipe = quantization(SPEC, Scheme()), precision("fp16")
    else:
        held = quantization(SPEC, ALL[name])
        recipe = of_checkpoint(held, "float32")
    w = WeightLoader(g, RandomQuantizedWeights(SPEC, held), recipe)
    x = g.input("x", compute, ("T", 256))
    y = linear(g, w, x, "layers.0.down", 128, bias=False, rows="T")
    g.output(g.node("Relu", [y], "end", compute, ("T", 128)))
    model = g.finish("one", {})
    model.graph.opset_imports[contract.DOMAIN] = 1
    if is_lowered:
        lower_products(Pen(model.graph, compute))
    model.graph.opset_imports.pop("plansmith")
    return model


def pool_update(pool: ir.DataType) -> ir.Model:
    """Return a graph that writes two heads' rows of that type into a pool."""
    g = GraphBuilder(ir.DataType.FLOAT16)
    cache = g.input("pool", pool, ("NB", 2, 8, 32))
    rows = g.input("rows", pool, ("U", 2, 32))
    starts = g.input("starts", ir.DataType.INT32, ("NB",))
    lengths = g.input("lengths", ir.DataType.INT32, ("NB1",))
    out = ir.Value(name="pool_out", shape=ir.Shape(["NB", 2, 8, 32]), type=ir.TensorType(pool))
    attrs = {"update_form": "packed_nhd", "mode": "linear", "axis": -2}
    g.add(contract.KV_CACHE_UPDATE, [cache, rows, starts, lengths], [out], "update", attrs, contract.DOMAIN)
    g.output(out)
    model = g.finish("pool", {})
    model.graph.opset_imports[contract.DOMAIN] = 1
    model.graph.opset_imports.pop("plansmith")
    return model


PRODUCT_SHAPES = {"x": [[1, 256], [32, 256], [64, 256]]}
POOL_SHAPES = {
    "pool": [[1, 2, 8, 32], [4, 2, 8, 32], [8, 2, 8, 32]],
    "rows": [[1, 2, 32], [4, 2, 32], [8, 2, 32]],
    "starts": [[1], [4], [8]],
    "lengths": [[2], [5], [9]],
}
GRAPHS: dict[str, tuple[Need, dict[str, list[list[int]]]]] = {
    "fp16": ("fp16", PRODUCT_SHAPES),
    "bf16": ("bf16", PRODUCT_SHAPES),
    "kv_fp8": ("kv_fp8", POOL_SHAPES),
    "kv_int8": ("kv_int8", POOL_SHAPES),
    **{name: (need_of(scheme), PRODUCT_SHAPES) for name, scheme in ALL.items()},  # type: ignore[dict-item]
}


def graph_of(name: str) -> ir.Model:
    if name.startswith("kv_"):
        return pool_update(ir.DataType.FLOAT8E4M3FN if name == "kv_fp8" else ir.DataType.INT8)
    if name in ("fp16", "bf16"):
        return one_product("float", ir.DataType.FLOAT16 if name == "fp16" else ir.DataType.BFLOAT16)
    return one_product(name, ir.DataType.FLOAT16)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    scratch = tmp_path_factory.mktemp("cells")
    cells = []
    for name, (_, shapes) in GRAPHS.items():
        path = scratch / f"{name}.onnx"
        save(graph_of(name), path)
        for target in targets.TARGETS.values():
            cells.append(Cell(f"{name} {target.name}", path, target.capabilities, shapes))
    halves = [scratch / "0", scratch / "1"]
    for half in halves:
        half.mkdir()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(compile_cells, (cells[0::2], cells[1::2]), halves)
    return first | second


@pytest.mark.parametrize("target", targets.TARGETS)
@pytest.mark.parametrize("name", GRAPHS)
def test_every_cell(name: str, target: str, outcomes: dict[str, Outcome]) -> None:
    need, _ = GRAPHS[name]
    found = outcomes[f"{name} {target}"]
    sms = [one.lower() for one in targets.TARGETS[target].capabilities]
    assert (found.products is not None) == takes("rtx", sms, need), found.words
    if found.products is None:
        assert "HW-specific datatypes" in found.words or "must have type Float" in found.words, found.words
    else:
        assert FATAL_WARNINGS.search(found.words) is None
    if name in ALL and found.products is not None:
        _check_products(ALL[name], found.products)


def _meet_as_codes(scheme: Scheme) -> bool:
    weight = "fp8" if scheme.fp8_grid else scheme.weight
    has_groups = scheme.input_group > 0 or (scheme.weight_group > 0 and not scheme.fp8_grid)
    return weight == scheme.input and (weight == "fp4" or not has_groups)


def _check_products(scheme: Scheme, products: tuple[Product, ...]) -> None:
    """Codes meet codes where one scale a row and one an output are all there is; else floats do."""
    for one in products:
        if not _meet_as_codes(scheme):
            assert (one.a, one.b, one.out) == ("half", "half", "half")
            continue
        assert one.a == one.b == CODES[scheme.input]
        # The sums of codes meet a scale before they become float16, and no scale of one group meets another's sums.
        assert one.out == "half" and one.alpha < 1e-3 and one.folded == 0


def _gpu_of(name: str) -> str:
    """Return a GPU that takes a scheme: sm89, for which the compiler joins products most, if it can."""
    return "sm120" if SCHEMES[name].weight == "fp4" else "sm89"


def with_half_scales(model: ir.Model) -> ir.Model:
    """Return a graph with its float32 scales in float16, as its products are."""
    for value in model.graph.initializers.values():
        if value.dtype == ir.DataType.FLOAT:
            value.const_value = ir.Tensor(value.const_value.numpy().astype(np.float16), name=value.name)  # type: ignore[union-attr]
            value.dtype = ir.DataType.FLOAT16
    for node in model.graph:
        node.attributes.pop("output_dtype", None)
    return model


def test_the_compiler_still_needs_these_forms(tmp_path: Path) -> None:
    """Graphs that are not lowered: where this fails, a newer compiler has come to compute them rightly."""
    cells = []
    for name in ("fp8_channels_static", "int8_groups_static"):
        save(
            with_half_scales(one_product(name, ir.DataType.FLOAT16, is_lowered=False)),
            tmp_path / f"{name}.onnx",
        )
        cells.append(Cell(name, tmp_path / f"{name}.onnx", ["SM89"], PRODUCT_SHAPES))
    found = compile_cells(cells, tmp_path)
    channels, groups = (found[cell.name].products for cell in cells)
    assert channels is not None and groups is not None
    assert channels[0] == Product("fp8_e4m3", "fp8_e4m3", "half", 1.0, 128)  # sums of codes in float16
    assert groups[0] == Product(
        "int8", "int8", "half", 1.0, 8 * 128
    )  # scales of 8 groups behind the whole sums


def test_scales_below_half_floats_reach_the_plan(tmp_path: Path) -> None:
    """The one factor of a product of codes is that of the input times that of the weight, here 2^-24 * 3."""
    model = one_product("fp8", ir.DataType.FLOAT16)
    scale, unit = (
        model.graph.initializers[f"rtx/{name}"]
        for name in ("layers.0.down.input.scale/held", "layers.0.down/input_q/unit")
    )
    for value in (scale, unit):
        value.const_value = ir.Tensor(np.array(3 * 2.0**-24, np.float16), name=value.name)
    save(model, tmp_path / "one.onnx")
    found = compile_cells([Cell("one", tmp_path / "one.onnx", ["SM89"], PRODUCT_SHAPES)], tmp_path)["one"]
    assert found.products is not None, found.words
    (product,) = found.products
    assert (product.a, product.b, product.folded) == ("fp8_e4m3", "fp8_e4m3", 0)
    assert product.alpha == pytest.approx(9 * 2.0**-48, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("int8_sq", "sm75"),
        ("int4_awq_zeros", "sm80"),
        ("fp8_rows", "sm89"),
        ("int8_rows", "rtx"),
        ("nvfp4", "sm120"),
        *(pytest.param(name, _gpu_of(name), marks=pytest.mark.slow) for name in SCHEMES),
    ],
)
def test_a_decoder(name: str, target: str, tmp_path: Path) -> None:
    spec, scheme = quantized_spec(num_layers=1, layers=SPEC.layers[:1]), SCHEMES[name]
    held = quantization(spec, scheme)
    recipe = of_checkpoint(held, "bfloat16")  # sm75 has none: the weights are stored as float16
    graph = build_graph(spec, RandomQuantizedWeights(spec, held), recipe, LIMITS, compute="float16")
    check_support(find_targets([target])[0], recipe, spec)
    done = compile_plan(graph, LIMITS, spec, target, tmp_path / "model.plan", tmp_path / "build.log")
    assert done.warnings == ()
    products = products_of((tmp_path / "model.plan").read_bytes())
    kinds = {one.a for one in products} & set(CODES.values())
    assert kinds == ({CODES[scheme.input]} if _meet_as_codes(scheme) else set())
    assert all(one.folded == 0 and (one.alpha < 1e-2 or one.a == "half") for one in products)
