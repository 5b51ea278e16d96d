"""verify tells a right engine from a wrong one, at every precision."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from plansmith.builder.build import build_engine, plan_build
from plansmith.builder.graph import build_graph
from plansmith.builder.limits import make_limits
from plansmith.builder.precision import of_checkpoint
from plansmith.builder.scheme import KvFormat, Quantization, Scheme
from plansmith.builder.spec import DecoderSpec
from plansmith.builder.targets.cpu import compile_plan, read_plan
from plansmith.builder.verify import verify
from plansmith.builder.verify_subject import Subject, open_subject
from plansmith.runtime.errors import EngineFileError, InvalidArgumentError
from quantized_weights import SCHEMES, RandomQuantizedWeights, quantization, quantized_spec
from tiny_engines import build_tiny
from tiny_models import VOCAB_SIZE, write_tokenizer

GetCheckpoint = Callable[[str], pathlib.Path]
SMALL: dict[str, Any] = {"num_sequences": 4, "max_length": 40}


def kinds(report: Any) -> set[tuple[str, str]]:
    return {(one.subject, one.referee) for one in report.comparisons}


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "int8", "int4"])
def test_a_right_engine_passes(tiny_checkpoint: GetCheckpoint, name: str) -> None:
    with open_subject(tiny_checkpoint("llama"), precision_name=name) as subject:
        report = verify(subject, **SMALL)
    assert report.passed, report.comparisons
    first = report.comparisons[0]
    assert (first.subject, first.referee) == ("cpu", "reference")
    assert report.steps > 4 and first.rows > 40
    # On two layers the rounding has no room to drift: far closer than the bound of a deep model.
    # A K or V that two right engines round to two neighbours in float16 costs a little; fp32 rounds none.
    assert first.mean_kl < {"fp32": 1e-9, "fp16": 1e-7, "bf16": 1e-7}.get(name, 3e-4)
    assert kinds(report) == {("cpu", "reference")} | (
        {("reference", "unrounded")} if name.startswith("int") else set()
    )


def test_it_is_said_of_each_target_what_was_checked(
    tiny_checkpoint: GetCheckpoint, fake_rtx: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    out = tmp_path / "engine"
    limits = {"max_batch_size": 4, "max_num_tokens": 32, "max_seq_len": 64, "tokens_per_block": 8}

    def build(*targets: str) -> None:
        build_engine(plan_build(tiny_checkpoint("llama"), targets, limits=limits, precision="int8"), out)

    build("sm89", "rtx")
    words = rf"{out} are whole .* the cpu target, which it does not have; add it with: .*--target cpu"
    with pytest.raises(EngineFileError, match=words), open_subject(out):
        pass
    build("cpu")
    with open_subject(out) as subject:
        notes = {note.partition(":")[0]: note for note in subject.notes}
        assert verify(subject, **SMALL).notes == subject.notes
    assert list(notes) == ["target cpu", "target rtx", "target sm89"]
    assert notes["target cpu"].endswith("its plan was run and its logits compared")
    assert notes["target sm89"].endswith("its plan was not run, it needs a GPU that is sm89")
    assert notes["target rtx"].endswith("it needs a GPU that is sm80 or sm86 or sm89 or sm120")
    plan = out / "targets" / "sm89" / "model.plan"
    plan.write_bytes(plan.read_bytes()[::-1])
    with pytest.raises(EngineFileError, match="sm89"), open_subject(out):
        pass


@dataclasses.dataclass(frozen=True)
class InMemory:
    """As much of a checkpoint as verify looks at, over random weights of a scheme."""

    spec: DecoderSpec
    weights: RandomQuantizedWeights
    quantization: Quantization
    path: pathlib.Path

    def tokenizer_files(self) -> dict[str, pathlib.Path]:
        return {"tokenizer.json": self.path / "tokenizer.json"}


def subject_of(scheme: Scheme, path: pathlib.Path, kv: KvFormat = "float") -> Subject:
    spec = quantized_spec(num_layers=2, vocab_size=VOCAB_SIZE, max_position_embeddings=64)
    held = quantization(spec, scheme, kv=kv, name="some_new_recipe")
    write_tokenizer(path)
    checkpoint: Any = InMemory(spec, RandomQuantizedWeights(spec, held), held, path)
    limits = make_limits(64, max_batch_size=4, max_num_tokens=24, max_seq_len=64, tokens_per_block=8)
    recipe = of_checkpoint(held, "float16").on_cpu()
    model = build_graph(spec, checkpoint.weights, recipe, limits)
    compile_plan(model, spec, limits, path / "model.plan")
    return Subject(checkpoint, recipe, limits, path / "model.plan")


CASES: list[tuple[str, KvFormat]] = [
    *((name, "float") for name in SCHEMES),
    ("int8_wo", "fp8"),
    ("int8_static", "int8"),
]


@pytest.mark.parametrize(("name", "kv"), CASES)
def test_every_scheme_has_a_verdict(name: str, kv: KvFormat, tmp_path: pathlib.Path) -> None:
    subject = subject_of(SCHEMES[name], tmp_path, kv)
    first, *rest = verify(subject, num_sequences=3, max_length=24).comparisons
    assert (first.subject, first.referee) == ("cpu", "reference") and first.passed, first
    if SCHEMES[name].input == "float" and kv == "float":
        # Nothing is rounded on the way, so only the order of additions differs, as at fp32.
        assert first.threshold.max_diff <= 2e-2 and first.mean_kl < 1e-6 and rest == []
        return
    # The bound is the noise of a deep model's rounding; two layers have no room for it.
    assert np.isfinite(first.threshold.mean_kl) and first.mean_kl < 1e-3
    assert [(one.subject, one.referee) for one in rest] == [("reference", "unrounded")]
    assert rest[0].mean_kl > 0


@pytest.mark.parametrize(("name", "kv"), [("int8_wo", "float"), ("int4_awq", "float"), ("int8_wo", "fp8")])
def test_a_wrong_weight_of_a_quantized_checkpoint_fails(
    name: str, kv: KvFormat, tmp_path: pathlib.Path
) -> None:
    subject = subject_of(SCHEMES[name], tmp_path, kv)
    data = bytearray(subject.plan.read_bytes())
    one = next(t for t in read_plan(subject.plan).tensors if t.name == "layers.1.o.weight")
    values = np.ascontiguousarray(one.data).reshape(-1)
    at = data.find(values.tobytes())
    data[at : at + values.nbytes] = values[::-1].tobytes()
    subject.plan.write_bytes(bytes(data))
    assert not verify(subject, num_sequences=3, max_length=24).passed


def test_with_transformers(tiny_checkpoint: GetCheckpoint) -> None:
    pytest.importorskip("transformers")
    with open_subject(tiny_checkpoint("gemma2"), precision_name="fp32") as subject:
        report = verify(subject, ("reference", "transformers"), **SMALL)
    assert kinds(report) == {("cpu", "reference"), ("cpu", "transformers"), ("reference", "transformers")}
    assert report.passed, report.comparisons
    with open_subject(tiny_checkpoint("gemma2"), precision_name="int8") as subject:
        report = verify(subject, ("transformers",), **SMALL)
    assert kinds(report) == {("cpu", "transformers")} and report.passed


@pytest.mark.parametrize("name", ["fp32", "int8"])
@pytest.mark.parametrize("tensor", ["layers.1.o.weight", "layers.0.attn_norm.weight", "rope.0.sin"])
def test_a_wrong_weight_fails(
    tiny_checkpoint: GetCheckpoint, tmp_path: pathlib.Path, name: str, tensor: str
) -> None:
    """Reverse the bytes of one tensor of the plan: every other check of the file still passes."""
    with open_subject(tiny_checkpoint("llama"), precision_name=name) as subject:
        broken = tmp_path / "model.plan"
        data = bytearray(subject.plan.read_bytes())
        one = next(t for t in read_plan(subject.plan).tensors if t.name == tensor)
        values = np.ascontiguousarray(one.data).reshape(-1)
        at = data.find(values.tobytes())
        assert at > 0
        data[at : at + values.nbytes] = values[::-1].tobytes()
        broken.write_bytes(bytes(data))
        report = verify(dataclasses.replace(subject, plan=broken), **SMALL)
    assert not report.passed, report.comparisons


def test_other_limits_of_a_step_do_not_matter(tiny_checkpoint: GetCheckpoint) -> None:
    with open_subject(tiny_checkpoint("qwen3"), precision_name="fp32") as subject:
        reports = [verify(subject, **SMALL, seed=seed) for seed in (1, 2)]
    assert all(report.passed for report in reports)
    assert reports[0].steps != reports[1].steps


def test_an_engine_and_its_checkpoint(tiny_checkpoint: GetCheckpoint, tmp_path: pathlib.Path) -> None:
    moved = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "before")
    engine = build_tiny(moved, tmp_path / "engine", "int8")
    with open_subject(engine) as subject:
        assert subject.recipe.name == "int8" and subject.limits.max_seq_len == 128
        assert verify(subject, **SMALL).passed
    moved.rename(tmp_path / "after")
    with (
        pytest.raises(InvalidArgumentError, match=r"not at .* any more; say where it is"),
        open_subject(engine),
    ):
        pass
    with open_subject(engine, tmp_path / "after") as subject:
        assert subject.checkpoint.path == tmp_path / "after"
    other = tiny_checkpoint("qwen3")
    with pytest.raises(InvalidArgumentError, match="is not the checkpoint that"), open_subject(engine, other):
        pass
    with (
        pytest.raises(InvalidArgumentError, match=r"--precision fp32 is asked for, .* has int8"),
        open_subject(engine, tmp_path / "after", "fp32"),
    ):
        pass
    with (
        pytest.raises(InvalidArgumentError, match="goes with an engine directory"),
        open_subject(other, other),
    ):
        pass
    plan = engine / "targets" / "cpu" / "model.plan"
    data = bytearray(plan.read_bytes())
    data[-1] ^= 1
    plan.write_bytes(bytes(data))
    with pytest.raises(EngineFileError, match="changed after the build"), open_subject(engine):
        pass


def test_report_is_json(tiny_checkpoint: GetCheckpoint) -> None:
    with open_subject(tiny_checkpoint("llama"), precision_name="int8") as subject:
        report = verify(subject, **SMALL)
    content = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert content["passed"] is True
    assert content["comparisons"][0]["threshold"]["max_diff"] is None


def test_a_subject_is_closed_with_its_plan(tiny_checkpoint: GetCheckpoint) -> None:
    subject: Subject
    with open_subject(tiny_checkpoint("llama"), precision_name="fp32") as subject:
        assert subject.plan.is_file()
    assert not subject.plan.exists()


def test_progress_reaches_its_end(tiny_checkpoint: GetCheckpoint) -> None:
    told: list[tuple[str, str, int, int]] = []
    with open_subject(tiny_checkpoint("llama"), precision_name="int8") as subject:
        verify(subject, **SMALL, progress=lambda *step: told.append(step))
    assert [phase for _, phase, _, total in told if not total] == ["preparing the references"]
    done = [done for _, phase, done, _ in told if phase == "comparing"]
    assert done == sorted(done) and done[-1] == told[-1][3] and len(done) > 4
