"""The compiler as a whole: the same bytes each time, one weight at a time, memory near the plan's size."""

from __future__ import annotations

import hashlib
import json
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from plansmith.builder.graph import build_graph
from plansmith.builder.limits import Limits, make_limits
from plansmith.builder.mapped import release_pages
from plansmith.builder.precision import precision
from plansmith.builder.spec import DecoderSpec, LayerSpec
from plansmith.builder.targets.cpu import compile_plan, packing, read_plan
from plansmith.builder.targets.cpu.plan_file import OpCode
from tiny_graph import EVERYTHING, RandomWeights, rope, tiny_spec


def compiled(path: Path, recipe: str, spec: DecoderSpec, weights: RandomWeights) -> dict[str, object]:
    limits = make_limits(spec.max_position_embeddings, tokens_per_block=16)
    model = build_graph(spec, weights, precision(recipe).on_cpu(), limits)
    return compile_plan(model, spec, limits, path)


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "int8", "int4"])
def test_the_same_inputs_give_the_same_bytes(recipe: str, tmp_path: Path) -> None:
    spec = tiny_spec(**EVERYTHING)
    hashes = set()
    for n in range(2):
        compiled(tmp_path / f"{n}.plan", recipe, spec, RandomWeights(spec))
        hashes.add(hashlib.sha256((tmp_path / f"{n}.plan").read_bytes()).hexdigest())
    assert len(hashes) == 1
    compiled(tmp_path / "other.plan", recipe, spec, RandomWeights(spec, seed=1))
    assert hashlib.sha256((tmp_path / "other.plan").read_bytes()).hexdigest() not in hashes


@pytest.mark.parametrize("recipe", ["fp32", "int8", "int4"])
def test_weights_are_read_once_and_let_go(recipe: str, tmp_path: Path) -> None:
    no_biases = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), False)  # q, k and v's are put side by side
    spec = tiny_spec(**{**EVERYTHING, **no_biases})
    weights = RandomWeights(spec)
    compiled(tmp_path / "model.plan", recipe, spec, weights)
    assert sorted(weights.reads) == sorted(weights.names())
    assert weights.peak_alive <= 2  # the one at hand, and the one before until the next is there


def test_statistics_and_header_tell_what_was_written(tmp_path: Path) -> None:
    spec = tiny_spec()
    limits = make_limits(128, max_batch_size=3, max_num_tokens=40, max_input_len=60, max_seq_len=64)
    model = build_graph(spec, RandomWeights(spec), precision("int4"), limits)
    seen: list[tuple[str, int, int]] = []
    stats = compile_plan(model, spec, limits, tmp_path / "p", progress=lambda *what: seen.append(what))
    plan = read_plan(tmp_path / "p")
    assert stats["plan_bytes"] == plan.file_bytes == (tmp_path / "p").stat().st_size
    assert stats["ops"] == len(plan.ops) and stats["tensors"] == len(plan.tensors) == len(seen)
    assert stats["ops_by_code"]["linear"] == sum(op.code is OpCode.LINEAR for op in plan.ops)
    assert set(stats["bytes_by_dtype"]) == {"f32", "i8", "i4"}
    assert [name for name, _, _ in seen] == [t.name for t in plan.tensors]
    done = [bytes_done for _, bytes_done, _ in seen]
    assert done == sorted(done) and done[-1] <= seen[-1][2] == plan.file_bytes
    assert plan.model == {
        "vocab_size": 96,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "max_batch_size": 3,
        "max_num_tokens": 40,
        "max_input_len": 60,
        "max_seq_len": 64,
        "tokens_per_block": 32,
    }


def test_widths_that_no_tile_divides(tmp_path: Path) -> None:
    """q, k and v of 40, 20 and 20 columns meet inside a tile of 16 outputs."""
    spec = tiny_spec(head_dim=10, ropes=(rope(10),), hidden_size=32, intermediate_size=37, vocab_size=51)
    weights = RandomWeights(spec)
    compiled(tmp_path / "p", "fp32", spec, weights)
    tensors = {t.name: t for t in read_plan(tmp_path / "p").tensors}
    for name, parts in (("q|k|v", ("q", "k", "v")), ("gate|up", ("gate", "up"))):
        t = tensors[f"layers.0.{name}.weight"]
        got = packing.unpack(t.data, t.dtype, t.layout, t.rows, t.cols)
        np.testing.assert_array_equal(
            got, np.concatenate([weights.get(f"layers.0.{part}.weight") for part in parts])
        )


CHILD = """
import json, sys
from pathlib import Path
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.graph import build_graph
from plansmith.builder.limits import make_limits
from plansmith.builder.precision import precision
from plansmith.builder.targets.cpu import compile_plan

def high_water_mark():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

checkpoint = open_checkpoint(sys.argv[1])
limits = make_limits(checkpoint.spec.max_position_embeddings)
model = build_graph(checkpoint.spec, checkpoint.weights, precision(sys.argv[2]), limits)
before = high_water_mark()
stats = compile_plan(model, checkpoint.spec, limits, sys.argv[3])
print(json.dumps({"before": before, "peak": high_water_mark(), "plan": stats["plan_bytes"]}))
"""


def write_checkpoint(path: Path, layers: int, hidden: int, vocab: int) -> None:
    """Write a float32 llama of given size with a tokenizer, without torch."""
    from safetensors.numpy import save_file
    from tiny_models import write_tokenizer

    inner = 3 * hidden
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    row = np.arange(inner, dtype=np.float32) / inner
    tensors = {"model.embed_tokens.weight": np.tile(row[:hidden], (vocab, 1))}
    for n in range(layers):
        p = f"model.layers.{n}."
        for name in "qkvo":
            tensors[f"{p}self_attn.{name}_proj.weight"] = np.tile(row[:hidden], (hidden, 1))
        for name in ("gate", "up"):
            tensors[f"{p}mlp.{name}_proj.weight"] = np.tile(row[:hidden], (inner, 1))
        tensors[f"{p}mlp.down_proj.weight"] = np.tile(row, (hidden, 1))
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{p}{name}.weight"] = np.ones(hidden, np.float32)
    tensors["model.norm.weight"] = np.ones(hidden, np.float32)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(path)


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peak memory is read from /proc")
def test_a_build_holds_hardly_more_than_the_plan(tmp_path: Path) -> None:
    """230 MB of float32: what is resident is at most the mapped checkpoint, a weight or two, and Python."""
    write_checkpoint(tmp_path / "checkpoint", layers=12, hidden=512, vocab=32000)
    command = [
        sys.executable,
        "-c",
        CHILD,
        str(tmp_path / "checkpoint"),
        "fp32",
        str(tmp_path / "model.plan"),
    ]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert result["plan"] > 180e6
    assert result["peak"] < 1.3 * result["plan"]
    assert result["peak"] - result["before"] < result["plan"]


def test_limits_alone_change_the_header(tmp_path: Path) -> None:
    spec = tiny_spec()
    tensors = []
    for batch in (4, 8):
        limits = Limits(max_batch_size=batch, max_seq_len=64, max_input_len=64, max_num_tokens=64)
        model = build_graph(spec, RandomWeights(spec), precision("bf16"), limits)
        compile_plan(model, spec, limits, tmp_path / "p")
        plan = read_plan(tmp_path / "p")
        assert plan.model["max_batch_size"] == batch
        tensors.append([t.data.tobytes() for t in plan.tensors])
    assert tensors[0] == tensors[1]


def test_layers_without_rotary_embedding(tmp_path: Path) -> None:
    spec = tiny_spec(layers=(LayerSpec(rope_idx=-1), LayerSpec()))
    compiled(tmp_path / "p", "fp32", spec, RandomWeights(spec))
    names = [op.name for op in read_plan(tmp_path / "p").ops if op.code is OpCode.ROPE]
    assert names == ["layers.1.q_rope|k_rope"]


def resident_file_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssFile"))


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="pages cannot be let go here")
def test_pages_of_a_mapped_weight_are_let_go_and_come_back(tmp_path: Path) -> None:
    numbers = np.arange(8 << 20, dtype=np.float32)
    (tmp_path / "weights").write_bytes(b"header--" + numbers.tobytes())
    mapped = np.asarray(np.memmap(tmp_path / "weights", np.uint8, "r"))[8:].view(np.float32)
    weight = mapped.reshape(2048, 4096).T[:, 100:2000]  # as a transposed slice of a fused tensor
    assert weight.sum() > 0
    before = resident_file_bytes()
    release_pages(weight)
    assert before - resident_file_bytes() > 0.9 * weight.nbytes
    np.testing.assert_array_equal(weight, numbers.reshape(2048, 4096).T[:, 100:2000])
    release_pages(numbers)  # not a file's: must stay as it is
    assert numbers[-1] == len(numbers) - 1
