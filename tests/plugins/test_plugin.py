"""The quickly deployable plugins, registered with and driven by TensorRT 11's own Python modules, kernels compiled."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plansmith.plugins.paged_attention import plugin_ops, spec

for package in ("tensorrt_bindings", "tensorrt_rtx", "triton"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the package {package}", allow_module_level=True)

HEADS, KV_HEADS, DIM, BLOCK = 8, 2, 64, 32
SHAPE = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "head_dim": DIM}
ATTRIBUTES: dict[str, Any] = {
    **SHAPE, "scale": 0.125, "softcap": 0.0, "window": 0, "query_rows": 4, "split_len": 512,
}  # fmt: skip
POOL = ["NB", KV_HEADS, BLOCK, DIM]
DIMS: dict[str, list[Any]] = {
    "q": ["T", HEADS * DIM], "k": ["T", KV_HEADS * DIM], "v": ["T", KV_HEADS * DIM], "k_pool": POOL, "v_pool": POOL,
    "cu_query_lens": ["B1"], "kv_lens": ["B"], "block_table": ["B", "MB"], "k_scale": [], "v_scale": [],
    "out": ["T", HEADS * DIM], "partials": ["B", 4, HEADS, "S", DIM], "stats": ["B", 4, HEADS, "S", 2],
}  # fmt: skip
FREE = {"T": 37, "B": 5, "B1": 6, "MB": 40, "NB": 100, "S": 3}


def drive(half: str, pool: str, sm: int, ops: Any = plugin_ops.OPS, **changes: Any) -> dict[str, Any]:
    """Build plugins for these types in a process of its own."""
    types = dict.fromkeys(DIMS, half) | {
        "k_pool": pool,
        "v_pool": pool,
        "partials": "FLOAT",
        "stats": "FLOAT",
    }
    types |= dict.fromkeys(("cu_query_lens", "kv_lens", "block_table"), "INT32")
    types |= dict.fromkeys(("k_scale", "v_scale"), "FLOAT")
    plugins = {
        op.name: {
            "types": {name: types[name] for name in op.inputs},
            "attributes": {name: kind((ATTRIBUTES | changes)[name]) for name, kind in op.attributes.items()},
            "dims": {name: DIMS[name] for name in op.inputs},
            "free": FREE,
        }
        for op in ops
    }
    job = json.dumps({"sm": sm, "plugins": plugins})
    driver = Path(__file__).with_name("plugin_driver.py")
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run([sys.executable, driver, job], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr[-2000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def half() -> dict[str, Any]:
    """Everything in float16 on Hopper."""
    return drive("HALF", "HALF", 90)


def test_types_shapes_and_what_is_in_place(half: dict[str, Any]) -> None:
    facts = {name: (one["types"], one["shapes"], one["aliases"]) for name, one in half.items()}
    out = [37, 512]
    assert facts["KvWrite"] == (["HALF", "HALF"], [[100, 2, 32, 64]] * 2, [2, 3])
    assert facts["PagedAttentionDecode"] == (
        ["HALF", "FLOAT", "FLOAT"],
        [out, [5, 4, 8, 3, 64], [5, 4, 8, 3, 2]],
        [-1, -1, -1],
    )
    assert facts["PagedAttentionCombine"] == (["HALF"], [out], [0])
    assert facts["PagedAttentionPrefill"] == (["HALF"], [out], [0])


def test_types_are_the_networks_and_rows_are_plain(half: dict[str, Any]) -> None:
    for op in plugin_ops.OPS:
        supported = half[op.name]["supported"]
        assert len(supported) == len(op.inputs) + len(op.outputs)  # one combination
        assert {layout for _, layout in supported} == {"LINEAR"}
        assert [kind for kind, _ in supported[len(op.inputs) :]] == half[op.name]["types"]


def test_launches(half: dict[str, Any]) -> None:
    prefill = spec.prefill_kernel(spec.Attention("fp16", "same", HEADS, KV_HEADS, DIM, sm=90))
    wanted = {
        "KvWrite": ([37, 1, 1], [5, 40, 100]),
        "PagedAttentionDecode": ([2, 5, 3], [3, 40, 37, 100]),
        "PagedAttentionCombine": ([8, 4, 5], [3, 37]),
    }
    for name, made in half.items():
        threads = re.search(r"\.reqntid (\d+)", made["ptx"])
        assert threads is not None and made["block"] == [int(threads[1]), 1, 1]
        assert 0 <= made["shared_bytes"] <= plugin_ops.LAUNCH_SHARED_BYTES
        if name in wanted:
            assert (made["grid"], made["numbers"]) == wanted[name]
    made = half["PagedAttentionPrefill"]
    # 4 heads a group; the tile has fewer rows than the kernel's own where that would not fit.
    grids = [[2, 37 // (rows // 4) + 5, 1] for rows in (128, 64, 32, 16)]
    assert prefill.constants["M"] == 128 and made["grid"] in grids
    assert made["numbers"] == [40, 5, 37, 100]


def parameters(ptx: str) -> list[str]:
    entry = re.search(r"\.entry \w+\(([^)]*)\)", ptx)
    assert entry is not None
    return [part.split()[-1] for part in entry[1].split(",")]


def test_parameters_are_inputs_numbers_outputs(half: dict[str, Any]) -> None:
    for op in plugin_ops.OPS:
        made = half[op.name]
        names = parameters(made["ptx"])
        assert len(names) == len(op.inputs) + len(made["numbers"]) + len(op.outputs)
        # What is written in place is taken as an output; scales of pools of floats not at all.
        unused = {"k_scale", "v_scale"} if op.name != "PagedAttentionCombine" else set()
        for name, parameter in zip(op.inputs, names, strict=False):
            assert ("unused" in parameter) == (name in op.outputs or name in unused)
        assert not any("unused" in parameter for parameter in names[len(op.inputs) :])
        body = made["ptx"][made["ptx"].index(".reqntid") :]
        read = set(re.findall(r"\[(\w+_param_\d+)\]", body))
        assert read <= set(names), "the code reads a parameter that TensorRT does not pass"
        assert all(name.startswith(made["symbol"]) for name in names)


def assemble(made: dict[str, Any], arch: str, folder: Path) -> None:
    """Have the assembler take a kernel's PTX."""
    import triton

    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    path = folder / f"{made['symbol']}.ptx"
    path.write_text(made["ptx"])
    subprocess.run([ptxas, f"-arch={arch}", path, "-o", path.with_suffix(".cubin")], check=True)


def test_the_assembler_takes_them(half: dict[str, Any], tmp_path: Path) -> None:
    for made in half.values():
        assemble(made, "sm_90a", tmp_path)


@pytest.mark.parametrize(
    ("half_type", "pool", "sm"),
    [
        ("BF16", "FP8", 100),
        pytest.param("HALF", "INT8", 80, marks=pytest.mark.slow),
        pytest.param("HALF", "FP8", 103, marks=pytest.mark.slow),
        pytest.param("HALF", "HALF", 120, marks=pytest.mark.slow),
    ],
)
def test_quantized_pools_and_other_gpus(half_type: str, pool: str, sm: int, tmp_path: Path) -> None:
    ops = (plugin_ops.KV_WRITE, plugin_ops.PREFILL)
    made = drive(half_type, pool, sm, ops, softcap=30.0, window=100)
    assert made["KvWrite"]["types"] == [pool, pool]
    for op in ops:
        one = made[op.name]
        by_input = dict(zip(op.inputs, parameters(one["ptx"]), strict=False))
        for name in ("k_scale", "v_scale"):
            assert ("unused" in by_input[name]) == (pool == half_type)
        arch = f"sm_{sm}a" if sm >= 90 else f"sm_{sm}"
        assert f".target {arch}\n" in one["ptx"]
        # A version that a driver of CUDA 12.9 reads: its instructions are no newer than that.
        version = re.search(r"^\.version (\d+)\.(\d+)$", one["ptx"], re.MULTILINE)
        assert version is not None and (int(version[1]), int(version[2])) <= (8, 8)
        assemble(one, arch, tmp_path)


def test_what_a_layer_knows_is_in_its_kernels_name(half: dict[str, Any]) -> None:
    symbols = [one["symbol"] for one in half.values()]
    windowed = drive("HALF", "HALF", 90, (plugin_ops.COMBINE,), window=100)
    assert len({*symbols, windowed["PagedAttentionCombine"]["symbol"]}) == len(symbols) + 1


def test_tiles_that_take_less_shared_memory() -> None:
    from plansmith.plugins.paged_attention.plugin import smaller_tiles

    kernel = spec.prefill_kernel(spec.Attention("fp16", "same", 8, 1, 128, sm=90))
    groups = list(smaller_tiles(kernel, min_rows=32))
    sizes = [(one.constants["M"], one.constants["N"], one.num_warps) for one, *_ in groups]
    assert sizes == [(128, 128, 8), (128, 64, 8), (64, 64, 4), (64, 32, 4), (32, 32, 4), (32, 16, 4)]
    assert [[one.num_stages for one in group] for group in groups] == [*[[2]] * 5, [2, 1]]
    combine = spec.combine_kernel(spec.Attention("fp16", "same", 8, 1, 128))
    assert list(smaller_tiles(combine, min_rows=8)) == [[combine]]
