"""plansmith inspect on a tiny engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.fixture
def copy(engine_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(engine_dir, tmp_path / "copy")


def test_tables(plansmith: Run, engine_dir: Path) -> None:
    result = plansmith("inspect", engine_dir, "--check-hashes")
    assert result.status == 0
    for words in ("LlamaForCausalLM", "plansmith-cpu", "fp32", "files are whole (contents checked)"):
        assert words in result.out


@pytest.mark.parametrize(
    ("words", "group", "kv"),
    [
        (("-p", "int8"), "32 columns", "float16"),
        (("-p", "int4", "--group-size", 64, "--kv-cache-dtype", "float32"), "64 columns", "float32"),
        (("-p", "bf16"), "", "float16"),
    ],
)
def test_groups_and_pools_are_told(
    plansmith: Run,
    tiny_checkpoint: Callable[[str], Path],
    tmp_path: Path,
    words: tuple[object, ...],
    group: str,
    kv: str,
) -> None:
    out = tmp_path / "engine"
    built = plansmith("build", tiny_checkpoint("llama"), "-o", out, "--max-seq-len", 64, *words)
    assert built.status == 0, built.err
    (out / "build_report.json").unlink()  # which is no part of the engine
    (row,) = [one for one in plansmith("inspect", out).out.splitlines() if "group size" in one]
    assert row.split("│")[2].strip() == group
    (pools,) = [one for one in plansmith("inspect", out).out.splitlines() if "KV pools" in one]
    assert kv in pools
    wanted = f"group size {group}, KV pools {kv}" if group else f"KV pools {kv}"
    assert f"cpu: {wanted}\n" in built.out


def test_groups_of_every_precision() -> None:
    from plansmith.builder.precision import PRECISIONS, of_checkpoint
    from plansmith.builder.scheme import ROW, WHOLE, Quantization, Scheme

    on_gpu = {name: one.weight_groups for name, one in PRECISIONS.items()}
    on_cpu = {name: one.on_cpu().weight_groups for name, one in PRECISIONS.items()}
    floats = dict.fromkeys(("fp32", "fp16", "bf16"), "")
    assert on_gpu == {**floats, "int8": "an output", "int4": "128 columns"}
    assert on_cpu == {**floats, "int8": "32 columns", "int4": "32 columns"}
    schemes = {"q": Scheme("fp8", WHOLE), "k": Scheme("int8", ROW), "v": Scheme("int4", 64), "o": Scheme()}
    mixed = of_checkpoint(Quantization("mixed", "somebody", tuple(schemes.items())), "float16")
    assert mixed.weight_groups == mixed.on_cpu().weight_groups == "a tensor, an output, 64 columns"


def test_json_has_all(plansmith: Run, engine_dir: Path) -> None:
    content = json.loads(plansmith("inspect", engine_dir, "--json", "--plan").out)
    manifest = content["manifest"]
    model = manifest["model"]
    assert manifest["targets"]["cpu"]["files"][0]["path"] == "targets/cpu/model.plan"
    assert content["build_report"]["cpu"]["status"] == "built"
    token = 2 * model["num_layers"] * model["num_kv_heads"] * model["head_dim"] * 4
    assert content["kv_cache"]["cpu"]["bytes_per_token"] == token
    assert content["kv_cache"]["cpu"]["bytes_at_limits"] == token * 8 * 128
    codes = [op["op"] for op in content["plan"]["ops"]]
    assert codes.count("paged_attention") == model["num_layers"] and codes[0] == "embed"
    names = {one["name"] for one in content["plan"]["tensors"]}
    assert {"embed.weight", "final_norm.weight"} <= names


def test_plan_as_tables(plansmith: Run, engine_dir: Path) -> None:
    out = plansmith("inspect", engine_dir, "--plan").out
    assert "2 paged_attention" in out and "embed.weight" in out


def test_damage_is_told(plansmith: Run, copy: Path) -> None:
    plan = copy / "targets" / "cpu" / "model.plan"
    data = bytearray(plan.read_bytes())
    data[-1] ^= 1
    plan.write_bytes(bytes(data))
    assert plansmith("inspect", copy).status == 0
    result = plansmith("inspect", copy, "--check-hashes")
    assert result.status == 1
    assert "changed after the build" in result.err and "--force" in result.err


def test_without_a_report(plansmith: Run, copy: Path) -> None:
    (copy / "build_report.json").write_text("not json")
    assert plansmith("inspect", copy).status == 0


def test_what_is_no_engine(plansmith: Run, tmp_path: Path) -> None:
    result = plansmith("inspect", tmp_path)
    assert result.status == 1
    assert "is not an engine directory: it has no manifest.json" in result.err


def test_an_engine_without_a_cpu_plan(plansmith: Run, copy: Path) -> None:
    from plansmith.runtime.manifest import load_manifest

    manifest = load_manifest(copy)
    manifest.targets["other"] = manifest.targets.pop("cpu")
    (copy / "manifest.json").write_text(manifest.to_text())
    result = plansmith("inspect", copy, "--plan")
    assert result.status == 1
    assert "has no target 'cpu', only other" in result.err


def test_a_quantized_engine(plansmith: Run, tmp_path: Path) -> None:
    from tiny_quantized import make_modelopt

    checkpoint, _ = make_modelopt("fp8", tmp_path / "fp8", kv="FP8")
    assert plansmith("build", checkpoint, "-o", tmp_path / "engine", "--draft", "int4").status == 0
    out = plansmith("inspect", tmp_path / "engine", "--plan").out
    for words in (
        "fp8 in products",
        "float8_e4m3fn, 256 B a token",
        "KV float8_e4m3fn",
        "inputs as f8_static (8), float (1)",
    ):
        assert words in out, words
    plan = json.loads(plansmith("inspect", tmp_path / "engine", "--plan", "--json").out)["plan"]
    assert plan["kv_format"] == "f8" and not any(one["zero_points"] for one in plan["tensors"])
    assert not [op for op in plan["ops"] if op["op"] == "round_input"]
    assert [op["input"] for op in plan["ops"] if op["op"] == "linear"] == ["f8_static"] * 8 + ["float"]
