"""plansmith size: what it says of known models, from a config.json alone, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.builder.limits import Limits
from plansmith.builder.spec import weight_shapes
from plansmith.builder.weight_sizes import shape_of
from plansmith.cli._size_model import Checkpoint, open_model
from plansmith.cli._size_plans import checkpoint_plans
from plansmith.runtime.manifest import load_manifest
from plansmith.sizing.memory import Load
from plansmith.sizing.skus import SKUS
from random_weights import LLAMA, LLAMA_7B, LLAMA_70B, spec_of

Run = Callable[..., Any]
SMOL: dict[str, Any] = LLAMA | {  # SmolLM2-135M's shape
    "head_dim": 64,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
DOCS = Path(__file__).parents[2] / "docs" / "sizing.md"


def model(path: Path, config: dict[str, Any], **changes: Any) -> Path:
    """Write a config.json into a new directory and return that."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    return path


def rows_of(plansmith: Run, *arguments: object) -> list[dict[str, Any]]:
    """Return the rows of --json."""
    result = plansmith("size", *arguments, "--json")
    assert result.status == 0, result.err
    rows: list[dict[str, Any]] = json.loads(result.out)["rows"]
    return rows


def row_of(plansmith: Run, *arguments: object) -> dict[str, Any]:
    (row,) = rows_of(plansmith, *arguments)
    return row


def error_of(plansmith: Run, *arguments: object) -> str:
    """Return the sentence of a refusal."""
    result = plansmith("size", *arguments)
    assert result.status in (1, 2) and not result.out, result.out
    return str(result.err)


def test_a_7b_from_its_config_alone(plansmith: Run, tmp_path: Path) -> None:
    llama = model(tmp_path / "llama", LLAMA_7B)
    row = row_of(plansmith, llama, "--sku", "h100", "-p", "fp16", "--context", 4096, "--sequences", 2)
    assert row["weights_bytes"] == pytest.approx(13.5e9, rel=0.01)
    assert row["kv_bytes"] == 2 * 4096 * 2 * 32 * 32 * 128 * 2
    assert 18e9 <= row["total_bytes"] <= 21e9
    parts = ("weights_bytes", "kv_bytes", "activations_bytes", "logits_bytes", "reserve_bytes")
    assert row["total_bytes"] == sum(row[part] for part in parts)
    assert row["fits"] and row["devices"] == 1 and row["memory_bytes"] == SKUS["h100"].memory_bytes
    # Decoding reads the weights, but for the embedding's table, and the sequence's KV.
    read = row["weights_bytes"] - 2 * 32000 * 4096 + row["kv_bytes"] / 2
    assert row["decode_tokens_s"] == pytest.approx(3.35e12 / read, rel=1e-6)
    assert row_of(plansmith, llama / "config.json", "--sku", "h100", "-p", "fp16")["fits"]


def test_a_70b_on_80_gb_gpus(plansmith: Run, tmp_path: Path) -> None:
    llama = model(tmp_path / "llama", LLAMA_70B)
    half, eighth = rows_of(plansmith, llama, "--sku", "h100", "--precision", "fp16,fp8")
    assert (half["fits"], half["devices"], half["decode_tokens_s"]) == (False, 2, None)
    assert half["split"].startswith("2 devices with 72.5 GB of 85.5 GB each: weights 70.6 GB")
    assert (eighth["fits"], eighth["devices"]) == (True, 1) and eighth["max_sequences"] >= 1
    table = plansmith("size", llama, "--sku", "h100", "-p", "fp16").out
    assert "on 2" in table and "This version runs a model on one device" in table


def test_more_sequences_and_longer_ones_take_more(plansmith: Run, tmp_path: Path) -> None:
    llama = model(tmp_path / "llama", LLAMA_7B)
    one = row_of(plansmith, llama, "--sku", "l40s", "-p", "fp16", "--context", 1024)
    many = row_of(plansmith, llama, "--sku", "l40s", "-p", "fp16", "--context", 1024, "--batch", 8)
    long = row_of(plansmith, llama, "--sku", "l40s", "-p", "fp16", "--context", 2048)
    assert many["kv_bytes"] == 8 * one["kv_bytes"] and long["kv_bytes"] == 2 * one["kv_bytes"]
    assert one["max_sequences"] > long["max_sequences"] > 1
    asked = ("--sku", "l40s", "-p", "fp16", "--context", 2048, "--sequences")
    assert row_of(plansmith, llama, *asked, long["max_sequences"])["fits"]
    assert not row_of(plansmith, llama, *asked, long["max_sequences"] + 1)["fits"]


def test_a_list_of_names_and_defaults(plansmith: Run, tmp_path: Path) -> None:
    llama = model(tmp_path / "llama", LLAMA_7B)
    rows = rows_of(plansmith, llama)
    assert {row["device"] for row in rows} == set(SKUS)
    assert [row["precision"] for row in rows if row["device"] == "a10"] == ["fp16", "int8", "int4"]
    assert [row["precision"] for row in rows if row["device"] == "rtx5090"] == [
        "fp16",
        "int8",
        "fp8",
        "int4",
        "nvfp4",
    ]
    named = rows_of(plansmith, llama, "--sku", "NVIDIA L40S,a100-80g", "--sku", "cpu", "-p", "int8")
    assert [row["device"] for row in named] == ["l40s", "a100-80g", "cpu"]


def test_an_efficiency_scales_the_speeds(plansmith: Run, tmp_path: Path) -> None:
    llama = model(tmp_path / "llama", LLAMA_7B)
    whole = row_of(plansmith, llama, "--sku", "h100", "-p", "fp16")
    half = row_of(plansmith, llama, "--sku", "h100", "-p", "fp16", "--efficiency", 0.5)
    for name in ("prefill_tokens_s", "decode_tokens_s", "decode_batch_tokens_s"):
        assert half[name] == pytest.approx(whole[name] / 2)
    text = plansmith("size", llama, "--sku", "h100", "-p", "fp16", "--efficiency", 0.5).out
    assert "0.5 of what the datasheet bounds" in text


def test_kv_pools_of_another_type(plansmith: Run, tmp_path: Path) -> None:
    llama = model(tmp_path / "llama", LLAMA_7B)
    own = row_of(plansmith, llama, "--sku", "h100", "-p", "fp16")
    fp8 = row_of(plansmith, llama, "--sku", "h100", "-p", "fp16", "--kv-cache-dtype", "fp8")
    assert 2 * fp8["kv_bytes"] == own["kv_bytes"]
    assert "no FP8 KV pools" in error_of(
        plansmith, llama, "--sku", "l40s", "-p", "fp16", "--kv-cache-dtype", "fp8"
    )
    text = error_of(plansmith, llama, "--sku", "l40s", "-p", "fp16", "--kv-cache-dtype", "fp8")
    assert "plansmith build CHECKPOINT --target sm89 --precision fp16" in text and "quantize" not in text
    assert "none of these GPUs takes a recipe" in error_of(
        plansmith, llama, "--sku", "l40s", "--kv-cache-dtype", "int8"
    )


def test_a_recipe_that_a_gpu_lacks_is_told(plansmith: Run, tmp_path: Path) -> None:
    llama = model(tmp_path / "llama", LLAMA_7B)
    rows = rows_of(plansmith, llama, "--sku", "a10,l4", "-p", "fp8")
    assert "has no FP8 products" in rows[0]["reason"] and "total_bytes" not in rows[0]
    assert rows[1]["reason"] == "" and rows[1]["total_bytes"] > 7e9
    text = plansmith("size", llama, "--sku", "a10,l4", "-p", "fp8").out
    assert "a10 fp8: sm86" in text
    assert "has no FP8 products" in error_of(plansmith, llama, "--sku", "a10", "-p", "fp8")


def test_the_cpu_of_this_machine(plansmith: Run, tmp_path: Path) -> None:
    llama = model(tmp_path / "llama", LLAMA_7B, num_hidden_layers=2)
    row = row_of(
        plansmith, llama, "--sku", "cpu", "-p", "int8", "--memory-bytes", 8_000_000_000, "--threads", 4
    )
    assert row["fits"] and row["memory_bytes"] == 8_000_000_000 and row["decode_tokens_s"] is None
    tight = row_of(plansmith, llama, "--sku", "cpu", "-p", "int8", "--memory-bytes", 100_000_000)
    assert not tight["fits"] and tight["devices"] is None and tight["max_sequences"] == 0
    assert row_of(plansmith, llama, "--sku", "cpu", "-p", "int8")["memory_bytes"] > 0
    asked = ("--sku", "cpu", "-p", "int8", "--threads", 4, "--sequences", 32)
    row = row_of(plansmith, llama, *asked, "--memory", "64GiB")
    total = row["total_bytes"]
    assert total > 2 << 30
    assert row["reserve_bytes"] == 64 << 20  # which the runtime leaves to Python
    for spare, fits in ((0, True), (-1, False)):
        assert row_of(plansmith, llama, *asked, "--memory-bytes", total + spare)["fits"] == fits


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3_longrope"])
def test_checkpoints_of_families(plansmith: Run, tiny_checkpoint: Callable[[str], Path], family: str) -> None:
    rows = rows_of(plansmith, tiny_checkpoint(family), "--sku", "l40s,cpu", "-p", "bf16", "--context", 64)
    assert [row["fits"] for row in rows] == [True, True]


def test_a_gguf_file(plansmith: Run, tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    from tiny_gguf import write_gguf

    gguf = write_gguf(tiny_checkpoint("llama3"), tmp_path / "tiny.gguf")
    assert row_of(plansmith, gguf, "--sku", "l40s", "-p", "fp16", "--context", 64)["fits"]


def test_a_quantized_checkpoint_is_sized_as_it_is(plansmith: Run, tmp_path: Path) -> None:
    from tiny_quantized import make_modelopt

    path, _ = make_modelopt("fp8", tmp_path / "fp8")
    rows = rows_of(plansmith, path, "--sku", "l40s,a10", "--context", 64)
    assert [(row["device"], row["precision"]) for row in rows] == [("l40s", "fp8")]
    assert (
        rows_of(plansmith, path, "--sku", "l40s", "-p", "fp16", "--context", 64)[0]["weights_bytes"]
        > (rows[0]["weights_bytes"])
    )
    assert "is quantized already (fp8)" in error_of(plansmith, path, "-p", "int8", "--context", 64)
    for weights in path.glob("*.safetensors"):
        weights.unlink()
    text = plansmith("size", path, "--sku", "l40s", "-p", "fp8", "--context", 64).out
    assert "says that the weights are quantized, and they are not here" in text


def test_an_engine_is_sized_by_its_plans(plansmith: Run, engine_dir: Path) -> None:
    plan = engine_dir / "targets" / "cpu" / "model.plan"
    (row,) = rows_of(plansmith, engine_dir, "--sequences", 3)
    assert row["device"] == "cpu" and row["weights_bytes"] == plan.stat().st_size
    assert (
        row["kv_bytes"] > 3 * 128 * 2 * 2 * 2 * 32 * 4
    )  # tokens, K and V, layers, heads, head size, float32
    assert "none of which runs on the GPUs" in error_of(plansmith, engine_dir, "--sku", "l40s")
    assert "whose limits were fixed when it was built" in error_of(
        plansmith, engine_dir, "--max-batch-size", 4
    )
    assert "is an engine of precision fp32" in error_of(plansmith, engine_dir, "-p", "fp16")
    assert "the engine was built for 128 tokens" in error_of(plansmith, engine_dir, "--context", 129)
    assert "max_batch_size 8 runs no more" in error_of(plansmith, engine_dir, "--sequences", 9)


def gpu_engine(engine_dir: Path, out: Path, config: dict[str, Any], precision: str, size: int) -> Path:
    """Write an engine with cpu and a stand-in for an sm89 plan of a model, of so many bytes; return it."""
    shutil.copytree(engine_dir, out)
    manifest, spec = load_manifest(out), spec_of(config)
    cpu = manifest.targets["cpu"]
    entry = dataclasses.replace(
        cpu,
        compiler="tensorrt_rtx",
        compiler_version="1.7.1.116",
        sm=("sm89",),
        token_layout="rectangular",
        row_alignment="right",
        compute_dtype="float16",
        kv_dtype="float16",
        files=(dataclasses.replace(cpu.files[0], path="targets/sm89/model.plan", size=size),),
    )
    shape = dataclasses.asdict(shape_of(spec))
    count = sum(math.prod(one) for one in weight_shapes(spec).values())
    windows = (0,) * spec.num_layers
    model = dataclasses.replace(manifest.model, **shape, windows=windows, num_parameters=count)
    targets = {"cpu": cpu, "sm89": entry}
    changed = dataclasses.replace(manifest, precision=precision, model=model, targets=targets)
    (out / "manifest.json").write_text(changed.to_text(), encoding="utf-8")
    return out


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_an_engine_takes_what_its_checkpoint_was_predicted_to(
    plansmith: Run, engine_dir: Path, tmp_path: Path, precision: str, is_tied: bool
) -> None:
    config = SMOL | {"tie_word_embeddings": is_tied}
    asked = ("--sku", "l4", "--context", 128, "--sequences", 8)
    same = ("--max-batch-size", 8, "--max-num-tokens", 64, "--tokens-per-block", 8)
    before = row_of(plansmith, model(tmp_path / "smol", config), *asked, *same, "-p", precision)
    size = before["plan_file_bytes"]
    assert size > before["weights_bytes"]
    after = row_of(plansmith, gpu_engine(engine_dir, tmp_path / "engine", config, precision, size), *asked)
    assert after["plan_file_bytes"] == size and after["weights_bytes"] == before["weights_bytes"]
    # The manifest tells no norms and biases.
    assert after["decode_tokens_s"] == pytest.approx(before["decode_tokens_s"], rel=0.005)


def test_an_engine_has_a_row_for_each_device_that_was_named(
    plansmith: Run, engine_dir: Path, tmp_path: Path
) -> None:
    engine = gpu_engine(engine_dir, tmp_path / "engine", SMOL, "fp16", 300_000_000)
    asked = ("--context", 128)
    assert [row["device"] for row in rows_of(plansmith, engine, "--sku", "cpu,l4,L4,cpu", *asked)] == [
        "cpu",
        "l4",
    ]
    l40s, h100 = rows_of(plansmith, engine, "--sku", "l40s,h100", *asked)
    assert (l40s["device"], l40s["reason"], h100["device"]) == ("l40s", "", "h100")
    assert h100["reason"] == "the engine has plans for cpu, sm89, none of them runs on sm90"
    assert (
        "h100 fp16: the engine has plans for cpu, sm89"
        in plansmith("size", engine, "--sku", "l40s,h100", *asked).out
    )
    everywhere = [row["device"] for row in rows_of(plansmith, engine, *asked)]
    assert everywhere.count("cpu") == 1 and "l40s" in everywhere and "h100" not in everywhere


def test_what_config_json_leaves_out_is_told(plansmith: Run, tmp_path: Path) -> None:
    config = {name: value for name, value in LLAMA_7B.items() if name != "num_hidden_layers"}
    llama = model(tmp_path / "llama", config)
    words = "config.json does not say all of the shape: num_hidden_layers 32 of llama's defaults is assumed"
    assert words in plansmith("size", llama, "--sku", "l40s").out
    assert words in json.loads(plansmith("size", llama, "--sku", "l40s", "--json").out)["note"]
    whole = model(tmp_path / "whole", LLAMA_7B)
    assert "assumed" not in plansmith("size", whole, "--sku", "l40s").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--sku", "h1000"), "no GPU is called 'h1000'; did you mean h100"),
        (("--sku", "a100"), "may be a100-40g or a100-80g"),
        (("--sku", " , "), "a list of names is empty"),
        (("-p", "fp7"), "--precision 'fp7' is not known; choose one or more of"),
        (("--kv-cache-dtype", "int3"), "--kv-cache-dtype 'int3' is not known"),
        (
            ("--context", 5000),
            "--context is 5000, the model has positions for 4096 tokens; give at most that",
        ),
        (("--context", 1), "--context"),
        (("--sequences", 9, "--max-batch-size", 8), "sequences is 9, a plan with max_batch_size 8"),
        (("--max-num-tokens", 16), "max_num_tokens is 16 and max_batch_size 64"),
        (
            ("--max-batch-size", 5000, "--max-num-tokens", 6000),
            "--max-batch-size is 5000, it must be between",
        ),
        (
            ("--tokens-per-block", 24),
            "--tokens-per-block is 24, it must be one of 8, 16, 32, 64, 128; give another --tokens-per-block",
        ),
        (("--memory-bytes", "16 apples"), "--memory is '16 apples', it must be a size above 0"),
        (("--efficiency", 1.5), "efficiency is 1.5, it must be above 0 and at most 1"),
        (("--plot", "memory.pdf"), "give a name that ends in .svg or .png"),
        (("--plot", "memory.svg", "--plot-over", "weights"), "--plot-over 'weights' is not known"),
    ],
)
def test_bad_input_is_refused(
    plansmith: Run, tmp_path: Path, arguments: tuple[object, ...], words: str
) -> None:
    assert words in error_of(plansmith, model(tmp_path / "llama", LLAMA_7B), *arguments)


def test_what_is_no_model_is_refused(plansmith: Run, tmp_path: Path) -> None:
    assert "does not exist" in error_of(plansmith, tmp_path / "absent")
    assert "config.json: is missing" in error_of(plansmith, tmp_path / "config.json")
    (tmp_path / "empty").mkdir()
    assert "has no config.json, so nothing tells the model's shape" in error_of(plansmith, tmp_path / "empty")
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    assert "broken.json" in error_of(plansmith, tmp_path / "broken.json")
    odd = model(tmp_path / "odd", LLAMA_7B, model_type="mixtral")
    assert "mixture of experts" in error_of(plansmith, odd)


@pytest.mark.parametrize("over", ["sequences", "context"])
def test_a_plot_shows_recipes_and_limits(plansmith: Run, tmp_path: Path, over: str) -> None:
    pytest.importorskip("matplotlib")
    llama = model(tmp_path / "llama", LLAMA_7B)
    out = tmp_path / "memory.svg"
    result = plansmith(
        "size", llama, "--sku", "l40s,h100", "-p", "fp16,int8", "--plot", out, "--plot-over", over
    )
    assert result.status == 0, result.err
    text = out.read_text(encoding="utf-8")
    for words in ("fp16, TensorRT-RTX (l40s)", "int8, TensorRT (h100)", "l40s", "h100", "memory, GB"):
        assert words in text
    assert f"the drawing is in {out}" in result.err
    plansmith(
        "size",
        llama,
        "--sku",
        "l40s",
        "-p",
        "fp16",
        "--plot",
        tmp_path / "one.png",
        "--memory-bytes",
        1 << 34,
    )
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_a_curve_crosses_a_limit_where_the_table_says(plansmith: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from plansmith.cli import _size_plot

    llama = model(tmp_path / "llama", LLAMA_7B)
    found = open_model(llama, None)
    assert isinstance(found, Checkpoint)
    load = Load(2048)
    limits = Limits(64, 2048, 2048, 2048, 1, 32)
    plans = list(checkpoint_plans(found, [SKUS["l40s"], None], ["fp16"], None, limits))
    figure = _size_plot.size_figure(plans, load, "sequences", 4096, threads=2)
    gpu, cpu, *lines = figure.axes[0].get_lines()
    assert gpu.get_label() == "fp16, TensorRT-RTX (l40s)" and cpu.get_label() == "fp16, cpu"
    assert len(lines) == 2  # the GPU's memory and this machine's
    assert {"l40s", "cpu"} <= {text.get_text() for text in figure.axes[0].texts}
    row = row_of(plansmith, llama, "--sku", "l40s", "-p", "fp16", "--context", 2048)
    limit = SKUS["l40s"].memory_bytes / 1e9
    fitting = [x for x, y in zip(gpu.get_xdata(), gpu.get_ydata(), strict=True) if y <= limit]
    beyond = [x for x, y in zip(gpu.get_xdata(), gpu.get_ydata(), strict=True) if y > limit]
    assert max(fitting) <= row["max_sequences"] < min(beyond)


def examples() -> list[tuple[str, str]]:
    """Return the commands that docs/sizing.md shows, with what it says they print."""
    found = []
    for block in DOCS.read_text(encoding="utf-8").split("```console\n")[1:]:
        command, _, output = block.partition("```")[0].partition("\n")
        assert command.startswith("$ plansmith size ")
        found.append((command.removeprefix("$ plansmith "), output))
    return found


def test_the_docs_show_what_is_printed(
    plansmith: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(tmp_path / "llama-2-7b", LLAMA_7B)
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model(tmp_path / "llama-3.1-70b", LLAMA_70B, rope_scaling=scaling)
    monkeypatch.chdir(tmp_path)
    shown = examples()
    assert len(shown) >= 3
    for command, output in shown:
        result = plansmith(*command.split())
        assert result.status == 0, result.err
        assert result.out == output


def test_the_table_is_whole_on_a_narrow_terminal(
    plansmith: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    llama = model(tmp_path / "llama", LLAMA_7B)
    text = plansmith("size", llama, "--sku", "rtx6000-blackwell", "-p", "fp16").out
    assert "rtx6000-blackwell" in text and "decode, all" in text


def test_a_copy_without_tokenizer_is_enough(
    plansmith: Run, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copy(tiny_checkpoint("qwen3") / "config.json", tmp_path)
    alone = row_of(plansmith, tmp_path, "--sku", "l40s", "-p", "int8", "--context", 64)
    whole = row_of(plansmith, tiny_checkpoint("qwen3"), "--sku", "l40s", "-p", "int8", "--context", 64)
    assert alone == whole
