"""Units: members that share them, the inputs of their keys, where they can be built, and errors with their line."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from plansmith.builder.build import build_engine, plan_build
from plansmith.builder.build_key import inputs_key, target_inputs
from plansmith.builder.checkpoint import checkpoint as checkpoint_module
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.device_kernels import DeviceKernels
from plansmith.builder.targets.registry import find_targets
from plansmith.fleet import buildable, opener, target_facts
from plansmith.fleet.fleet_file import Fleet
from plansmith.fleet.units import Unit, member_names, units_of
from plansmith.runtime.errors import CheckpointError, Error, InvalidArgumentError, UnsupportedError
from plansmith.runtime.manifest import load_manifest

MakeFleet = Callable[..., Fleet]


def by_name(fleet: Fleet, *only: str) -> dict[str, Unit]:
    return {unit.name: unit for unit in units_of(fleet, only=only)}


def test_skus_of_one_target_share_a_unit(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    units = by_name(fleet)
    assert {name: unit.members for name, unit in units.items()} == {
        "tiny/int8/cpu": ("tiny/int8/cpu",),
        "tiny/int8/sm89": ("tiny/int8/l4", "tiny/int8/l40s"),
        "tiny/fp16/cpu": ("tiny/fp16/cpu",),
        "tiny/fp16/sm89": ("tiny/fp16/l4", "tiny/fp16/l40s"),
    }
    assert len({unit.key for unit in units.values()}) == 4
    assert member_names(fleet)[:3] == ["tiny/int8/cpu", "tiny/int8/l4", "tiny/int8/l40s"]


def test_an_sku_with_limits_has_its_own(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(**{"l40s:": "l40s: {limits: {max_batch_size: 8}}"})
    units = by_name(fleet)
    shared, own = units["tiny/int8/sm89"], units["tiny/int8/sm89@l40s"]
    assert (shared.members, own.members) == (("tiny/int8/l4",), ("tiny/int8/l40s",))
    assert (shared.limits.max_batch_size, own.limits.max_batch_size) == (4, 8)
    assert set(own.changes(shared.inputs)) == {"limits.max_batch_size", "draft.limits.max_batch_size"}
    assert own.engine.name == "tiny-int8-l40s"


def test_the_plan_is_that_of_a_build(make_fleet: MakeFleet, tmp_path: Path) -> None:
    """Build a unit's plan as `plansmith build` would, and find its key and its tokenizer in the manifest."""
    unit = by_name(make_fleet())["tiny/int8/cpu"]
    assert unit.plan.draft is not None and unit.plan.draft.name == "int4"
    build_engine(unit.plan, tmp_path / "engine")
    manifest = load_manifest(tmp_path / "engine")
    inputs = {
        name: value
        for name, value in unit.inputs.items()
        if not name.startswith(("draft.", "kernels.")) and name != "tokenizer"
    }
    assert manifest.targets["cpu"].key == inputs_key(inputs)
    assert manifest.draft is not None
    draft = {
        name.removeprefix("draft."): value for name, value in unit.inputs.items() if name.startswith("draft.")
    }
    assert manifest.draft.targets["cpu"].key == inputs_key(draft)
    assert manifest.tokenizer.sha256 == unit.inputs["tokenizer"]
    same = plan_build(
        unit.checkpoint.path,
        ["cpu"],
        precision="int8",
        draft="int4",
        limits={"max_batch_size": 4, "max_num_tokens": 64, "max_seq_len": 128},
    )
    for field in ("targets", "recipe", "limits", "draft", "keep_draft", "weight_streaming"):
        assert getattr(same, field) == getattr(unit.plan, field)


def test_kernels_are_those_of_a_build(make_fleet: MakeFleet) -> None:
    units = by_name(make_fleet())
    gpu = units["tiny/fp16/sm89"]
    assert not any(name.startswith("kernels.") for name in units["tiny/fp16/cpu"].inputs)
    if importlib.util.find_spec("triton") is None:
        assert gpu.unknown >= {"kernels.key", "kernels.triton"}
    else:
        assert gpu.inputs["kernels.key"] == DeviceKernels([gpu.target])._key(gpu.target)
        assert not gpu.unknown


def test_every_checkpoint_is_opened_once(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []

    def counted(*arguments: object) -> object:
        opened.append(arguments)
        return open_checkpoint(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(opener, "open_checkpoint", counted)
    units_of(make_fleet(**{"skus:": "skus:\n  sm80:\n  rtx:"}))
    assert len(opened) == 1


def test_weights_are_hashed_once(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask twice, as two processes would; the second finds all in the user's folder."""
    from plansmith.builder.checkpoint import hash_cache

    hashed: list[object] = []

    def counted(paths: object) -> str:
        hashed.append(paths)
        return checkpoint_module.hash_files(paths)  # type: ignore[arg-type]

    monkeypatch.setattr(hash_cache, "hash_files", counted)
    monkeypatch.setattr(hash_cache, "_RACY_NS", -(10**18))  # the checkpoint may be of just now
    fleet = make_fleet()
    first, second = units_of(fleet), units_of(fleet)
    assert len(hashed) == 1
    assert [unit.key for unit in first] == [unit.key for unit in second]


def test_only_opens_what_is_asked_for(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(**{"recipes:": "  gone: {checkpoint: /nowhere}\nrecipes:"})
    assert list(by_name(fleet, "tiny/*/cpu")) == ["tiny/int8/cpu", "tiny/fp16/cpu"]
    with pytest.raises(CheckpointError, match=r"plansmith.yaml:6: /nowhere: does not exist"):
        by_name(fleet, "gone/*")


def test_a_pin(make_fleet: MakeFleet, tiny_checkpoint: Callable[[str], Path]) -> None:
    held = open_checkpoint(tiny_checkpoint("llama")).fingerprint()
    good = make_fleet(**{"CHECKPOINT}": f"CHECKPOINT, revision: '{held}'}}"})
    assert (units_of(good)[0].fingerprint, units_of(good)[0].missing_weights) == (held, "")
    bad = make_fleet(**{"CHECKPOINT}": f"CHECKPOINT, revision: '{'0' * 64}'}}"})
    with pytest.raises(CheckpointError) as error:
        units_of(bad)
    assert held in str(error.value) and "0" * 64 in str(error.value)
    assert "plansmith.yaml:5: " in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("max_batch_size: 4", "max_batch_size: 8", {"limits.max_batch_size", "draft.limits.max_batch_size"}),
        ("int8: {draft: int4}", "int8: {draft: int4, gate: kl<=1}", set()),  # a gate is no input of a plan
        ("max_batch_size: 4", "max_batch_size: 4, max_beam_width: 2", set()),  # no plan depends on it
    ],
)
def test_what_changes_a_key(make_fleet: MakeFleet, old: str, new: str, changed: set[str]) -> None:
    before = by_name(make_fleet())["tiny/int8/cpu"]
    after = by_name(make_fleet(**{old: new}))["tiny/int8/cpu"]
    assert set(after.changes(before.inputs)) == changed
    assert (after.key == before.key) == (not changed)


def test_a_tokenizer_of_other_words(
    make_fleet: MakeFleet, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "copy")
    path = copy / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": 77}))
    before = by_name(make_fleet())["tiny/fp16/cpu"]
    after = by_name(make_fleet(CHECKPOINT=str(copy)))["tiny/fp16/cpu"]
    assert set(after.changes(before.inputs)) == {"tokenizer"}


def test_a_gate_has_inputs_of_its_own(make_fleet: MakeFleet) -> None:
    gated = {"int8: {draft: int4}": "int8: {gate: 'kl<=0.05, top1 >= 0.9'}"}
    units = by_name(make_fleet(**gated))
    unit = units["tiny/int8/sm89"]
    assert unit.gate_inputs["bounds"] == "kl<=0.05,top1>=0.9"
    assert unit.gate_inputs["original"] == unit.fingerprint
    (cpu,) = find_targets(["cpu"])
    plan = target_inputs(cpu, unit.fingerprint, unit.checkpoint.spec, unit.recipe, unit.limits)
    measured = {f"plan.{name}": value for name, value in plan.items()}
    assert set(measured.items()) - set(unit.gate_inputs.items()) == {
        ("plan.limits.max_batch_size", "4"),
        ("plan.limits.max_num_tokens", "64"),
    }
    larger = by_name(make_fleet(**gated, **{"max_batch_size: 4": "max_batch_size: 8"}))["tiny/int8/cpu"]
    longer = by_name(make_fleet(**gated, **{"max_seq_len: 128": "max_seq_len: 256"}))["tiny/int8/cpu"]
    assert larger.gate_inputs == unit.gate_inputs != longer.gate_inputs
    assert not units["tiny/fp16/sm89"].gate_inputs


def test_where_it_can_be_built(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(target: object) -> str:
        raise UnsupportedError("there is no such GPU here")

    monkeypatch.setattr(buildable.tensorrt, "check_available", absent)
    units = by_name(make_fleet(**{"skus:": "skus:\n  h100:"}))
    gpu = units["tiny/fp16/sm90"]
    assert (gpu.buildable.state, gpu.buildable.needs) == ("gpu", "a GPU sm90, with TensorRT 11")
    assert gpu.unknown >= {"compiler_version", "kernel_compiler"}
    assert units["tiny/fp16/cpu"].buildable.state == "here"
    # A record of a machine that has the compiler is this unit's, whatever that compiler is.
    made = {**gpu.inputs, "compiler_version": "11.2", "kernel_compiler": "3.6"}
    assert gpu.agrees_with(made) and not gpu.agrees_with({**made, "compute": "other"})


def test_without_the_compiler(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = by_name(make_fleet())["tiny/fp16/sm89"]
    real = importlib.util.find_spec

    def hidden(name: str, package: str | None = None) -> object:
        return None if name == "tensorrt_rtx" else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    unit = by_name(make_fleet())["tiny/fp16/sm89"]
    assert (unit.buildable.state, unit.buildable.needs) == ("extra", "plansmith[rtx]")
    assert unit.inputs["compiler_version"] == ""
    assert unit.agrees_with(with_it.inputs) and unit.key != with_it.key


def test_without_the_kernel_language(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = by_name(make_fleet())["tiny/fp16/sm89"]

    def absent() -> str:
        raise UnsupportedError("there is none")

    monkeypatch.setattr(target_facts, "triton_version", absent)
    unit = by_name(make_fleet())["tiny/fp16/sm89"]
    assert unit.unknown == {"kernels.key", "kernels.triton"}
    assert unit.buildable.state == "here"
    assert unit.agrees_with(with_it.inputs)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "  fp16:",
            "  bf16:\n  int8-64: {precision: int8, group_size: 64}",
            ("int8-64/sm89", "one scale an output"),
        ),
        ("  fp16:", "  f: {precision: fp16, kv_cache_dtype: float32}", ("f/sm89", "float KV pools of sm89")),
    ],
)
def test_what_a_target_refuses(make_fleet: MakeFleet, old: str, new: str, words: tuple[str, str]) -> None:
    units = by_name(make_fleet(**{old: new}))
    refused = units[f"tiny/{words[0]}"]
    assert refused.buildable.state == "refused"
    assert words[1] in refused.buildable.why and "--" not in refused.buildable.why
    assert units[f"tiny/{words[0].split('/')[0]}/cpu"].buildable.state == "here"


@pytest.mark.parametrize(
    ("changes", "line", "words"),
    [
        ({"max_num_tokens: 64": "max_num_tokens: 3"}, 3, ("max_num_tokens is 3", "max_batch_size is 4")),
        (
            {"  l4:": "  l4: {limits: {max_batch_size: 65}}"},
            3,
            ("tiny-int8-l4: max_num_tokens is 64 but max_batch_size is 65", "max_batch_size is of", ":11"),
        ),
        (
            {"max_seq_len: 128": "max_seq_len: 128, max_input_len: 200"},
            3,
            ("max_input_len is 200", "1 and 128"),
        ),
        (
            {"  l4:": "  l4: {limits: {max_seq_len: 5000}}"},
            11,
            ("max_seq_len is 5000", "max_position_embeddings"),
        ),
        ({"  fp16:": "  fp16: {limits: {max_beam_width: 5}}"}, 8, ("max_beam_width is 5", "1 and 4")),
        ({"draft: int4": "draft: fp16"}, 7, ("draft fp16 is no smaller",)),
        ({"draft: int4": "draft: in4"}, 7, ("draft 'in4' is not known",)),
        ({"  fp16:": "  fp16: {group_size: 64}"}, 8, ("group_size is for precision int8 and int4",)),
        ({"  fp16:": "  fp16: {kv_cache_dtype: fp8}"}, 8, ("kv_cache_dtype fp8 needs calibrated scales",)),
        (
            {"  fp16:": "  fp8:"},
            8,
            ("precision fp8 needs calibrated scales", "--recipe fp8 -o OUT", "models.tiny.quantized.fp8"),
        ),
        (
            {"max_batch_size: 4, max_num_tokens: 64": "max_batch_size: 1, max_num_tokens: 1"},
            3,
            ("a step that verifies a draft's tokens holds at least 2",),
        ),
    ],
)
def test_errors_have_their_line(
    make_fleet: MakeFleet, changes: dict[str, str], line: int, words: tuple[str, ...]
) -> None:
    fleet = make_fleet(**changes)
    with pytest.raises(InvalidArgumentError) as error:
        units_of(fleet)
    text = str(error.value)
    assert f"plansmith.yaml:{line}: tiny-" in text, text
    for word in words:
        assert word in text, text


def test_a_damaged_checkpoint_names_its_line(
    make_fleet: MakeFleet, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "copy")
    (copy / "config.json").write_text("{")
    with pytest.raises(Error, match=r"plansmith.yaml:5: .*config.json: is not valid JSON"):
        units_of(make_fleet(CHECKPOINT=str(copy)))


def test_a_missing_tokenizer_names_the_field(
    make_fleet: MakeFleet, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    fleet = make_fleet(**{"CHECKPOINT}": f"CHECKPOINT, tokenizer: {tmp_path}}}"})
    with pytest.raises(
        CheckpointError, match=r"plansmith.yaml:5: .*no tokenizer.json; give tokenizer a directory"
    ):
        units_of(fleet)


def test_auto_is_one_precision_for_all_targets(make_fleet: MakeFleet) -> None:
    """A T4 has no bfloat16, so no plan of that engine has it."""
    text = {"  fp16:": "  auto:", "skus:": "skus:\n  t4:"}
    units = [unit for unit in units_of(make_fleet(**text)) if "auto" in unit.name]
    assert len(units) == 3
    assert len({unit.recipe.name for unit in units}) == 1


def test_weight_streaming_is_for_gpus(make_fleet: MakeFleet) -> None:
    units = by_name(make_fleet(**{"  fp16:": "  fp16: {weight_streaming: true}"}))
    assert units["tiny/fp16/sm89"].inputs["weight_streaming"] == "true"
    assert units["tiny/fp16/cpu"].inputs["weight_streaming"] == "false"
    assert units["tiny/fp16/sm89"].plan.weight_streaming


def test_the_plan_wants_a_tokenizer_that_opens(
    make_fleet: MakeFleet, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "copy")
    (copy / "chat_template.jinja").write_text("{% for %}")
    (unit,) = units_of(make_fleet(CHECKPOINT=str(copy)), only=["tiny/fp16/cpu"])
    with pytest.raises(CheckpointError, match="chat_template"):
        _ = unit.plan


def test_members_and_skus_agree(make_fleet: MakeFleet) -> None:
    for unit in units_of(make_fleet()):
        assert unit.members == tuple(f"{unit.name.rpartition('/')[0]}/{sku.name}" for sku in unit.skus)
        assert all(sku.target == unit.target for sku in unit.skus)
        assert dataclasses.replace(unit).key == unit.key


def test_a_recipe_with_a_checkpoint_of_its_own(make_fleet: MakeFleet, tmp_path: Path) -> None:
    from tiny_quantized import make_modelopt

    make_modelopt("fp8", tmp_path / "quantized")
    fleet = make_fleet(
        **{
            "CHECKPOINT}": "CHECKPOINT, quantized: {fp8: quantized}}",
            "  fp16:": "  fp8: {gate: kl<=0.5}",
            "skus:": "skus:\n  a100-80g:",
        }
    )
    units = by_name(fleet)
    fp8, int8 = units["tiny/fp8/sm89"], units["tiny/int8/sm89"]
    assert fp8.checkpoint.path == tmp_path / "quantized"
    assert fp8.recipe.quantization is not None and fp8.recipe.name == "fp8"
    assert fp8.fingerprint != int8.fingerprint
    assert fp8.gate_inputs["original"] == int8.fingerprint
    assert fp8.buildable.state == "here"
    # An A100 computes no FP8; the other targets are built all the same.
    assert units["tiny/fp8/sm80"].buildable.state == "refused"


def test_a_gguf_file(make_fleet: MakeFleet, tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    from tiny_gguf import write_gguf

    path = write_gguf(tiny_checkpoint("llama"), tmp_path / "tiny.gguf")
    units = units_of(make_fleet(CHECKPOINT=str(path)))
    assert {unit.fingerprint for unit in units} == {open_checkpoint(path).fingerprint()}
    assert units[0].plan.checkpoint.path == path
