"""A quantized checkpoint and its original: how the original is found, and that layers can be exchanged between them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plansmith.builder.checkpoint import Checkpoint, open_checkpoint
from plansmith.builder.limits import make_limits
from plansmith.builder.precision import Precision, of_checkpoint, precision
from plansmith.calibration.eval_subject import QUANTIZE_RECORD, open_eval_subject, original_of
from plansmith.calibration.evaluate import EvalOptions, evaluate_plan
from plansmith.calibration.mixture import KV_CACHE, mixed, quantized_layers
from plansmith.calibration.scoring import PlanRunner, TokenRun, compile_cpu
from plansmith.calibration.sensitivity import measure_sensitivity
from plansmith.runtime.errors import InvalidArgumentError
from plansmith.runtime.manifest import load_manifest
from tiny_engines import build_tiny

LIMITS = make_limits(256, max_batch_size=2, max_num_tokens=64, max_seq_len=64, tokens_per_block=8)

Pair = tuple[Checkpoint, Precision, Checkpoint]


# SmoothQuant moves factors into the norms, AWQ also from one weight of a block into another.
@pytest.fixture(scope="module", params=["int8_sq", "int4_awq"])
def pair(
    request: pytest.FixtureRequest,
    tiny_checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    from tiny_quantized import make_modelopt

    path, _ = make_modelopt(request.param, tmp_path_factory.mktemp("quantized") / "it", kv="FP8")
    quantized = open_checkpoint(path)
    assert quantized.quantization is not None
    yield (
        quantized,
        of_checkpoint(quantized.quantization, "float32"),
        open_checkpoint(tiny_checkpoint("llama")),
    )


def logits(checkpoint: Any, recipe: Precision, path: Path) -> Any:
    plan = compile_cpu(checkpoint.spec, checkpoint.weights, recipe, LIMITS, path)
    tokens = tuple(np.random.default_rng(3).integers(3, 320, 48).tolist())
    return np.concatenate(
        [piece.logits for piece in PlanRunner(plan, LIMITS, "it", 1).run([TokenRun(tokens, 0)])]
    )


def test_layers_are_exchanged_whole(pair: Pair, tmp_path: Path) -> None:
    quantized, recipe, original = pair
    layers = quantized_layers(quantized.spec, recipe)
    assert layers == ("layers.0", "layers.1", KV_CACHE)
    plain = logits(original, precision("fp32"), tmp_path / "a.plan")
    none = mixed(quantized, recipe, original, [])
    np.testing.assert_array_equal(logits(none, none.recipe, tmp_path / "b.plan"), plain)
    own = logits(quantized, recipe, tmp_path / "c.plan")
    everything = mixed(quantized, recipe, original, layers)
    np.testing.assert_array_equal(logits(everything, everything.recipe, tmp_path / "d.plan"), own)
    assert np.abs(own - plain).max() > 0.01


def test_what_each_layer_costs(pair: Pair, tmp_path: Path) -> None:
    quantized, recipe, original = pair
    found = measure_sensitivity(quantized, recipe, original, mode="both", num_tokens=64, num_threads=1)
    for row in found.layers:
        assert 0 < (row.kl_alone or 0) < found.kl and (row.kl_kept or 0) > 0
    plan = compile_cpu(quantized.spec, quantized.weights, recipe, LIMITS, tmp_path / "it.plan")
    options = EvalOptions(length=64, contexts=(64,), greedy_tokens=0, num_threads=1)
    report = evaluate_plan(plan, quantized, recipe, LIMITS, original, options)
    assert report.overall.kl == pytest.approx(found.kl, rel=1.0)  # half of the same tokens
    with pytest.raises(InvalidArgumentError, match="is quantized itself"):
        evaluate_plan(plan, quantized, recipe, LIMITS, quantized, options)


def test_the_original_is_found(pair: Pair) -> None:
    quantized, recipe, original = pair
    record = quantized.path / QUANTIZE_RECORD
    assert original_of(original, precision("int8"), 256) is original
    for content in (None, "", "[]", "{}", '{"source": 3}', '{"source": {"path": 3}}', "[" * 100_000):
        record.unlink(missing_ok=True)
        if content is not None:
            record.write_text(content)
        with pytest.raises(InvalidArgumentError, match=r"give the unquantized checkpoint as --against"):
            original_of(quantized, recipe, 256)
    source = {"path": str(original.path), "fingerprint": original.fingerprint()}
    record.write_text(json.dumps({"source": source}))
    assert original_of(quantized, recipe, 256).path == original.path
    record.write_text(json.dumps({"source": {**source, "fingerprint": "0" * 64}}))
    with pytest.raises(InvalidArgumentError, match="another checkpoint now"):
        original_of(quantized, recipe, 256)
    record.write_text(json.dumps({"source": {**source, "path": "/no/such/place"}}))
    with pytest.raises(InvalidArgumentError, match="not there any more"):
        original_of(quantized, recipe, 256)
    record.unlink()


def test_an_engine_without_a_cpu_target_is_evaluated_within_its_own_limits(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    engine = build_tiny(tiny_checkpoint("llama"), tmp_path / "engine")
    manifest = load_manifest(engine)
    manifest.targets["sm89"] = manifest.targets.pop("cpu")
    (engine / "manifest.json").write_text(manifest.to_text())
    with open_eval_subject(engine) as subject:
        assert dataclasses.asdict(subject.limits) == dataclasses.asdict(manifest.limits)
        assert "no cpu target (sm89)" in subject.notes[0] and subject.recipe.name == "fp32"
    for moved_to, message in (
        (tiny_checkpoint("qwen3"), "is not the checkpoint that"),
        (tmp_path / "gone", "say where it is with --checkpoint"),
    ):
        with pytest.raises(InvalidArgumentError, match=message), open_eval_subject(engine, moved_to):
            pass
