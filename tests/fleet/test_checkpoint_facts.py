"""Fleets whose checkpoints are not here: planned as with them, and refused where something has to be read of them."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.fleet import checkpoint_facts, facts_store, opener
from plansmith.fleet.absent_checkpoint import missing_weights
from plansmith.fleet.checkpoint_facts import CheckpointFacts, facts_of_checkpoint, read_facts
from plansmith.fleet.facts_store import facts_name, note_facts
from plansmith.fleet.fleet_file import Source, read_fleet
from plansmith.fleet.plan import plan_fleet
from plansmith.fleet.share import collect_fleet, pull_fleet, push_fleet
from plansmith.fleet.status import status_of
from plansmith.fleet.store import (
    LocalStore,
    Record,
    Ref,
    RemoteStore,
    load_private,
    load_public,
    make_key,
    open_store,
)
from plansmith.fleet.store.store import Store
from plansmith.fleet.units import Unit, units_of
from plansmith.runtime.errors import CheckpointError, EngineFileError
from tiny_fleets import QuickRtx, TinyFleet, engines, statuses
from tiny_models import FAMILIES, make_tiny

MakeFleet = Callable[..., TinyFleet]
GATED = '{int8: {gate: "kl<=5", draft: int4}, fp16: }'


def source_of(path: Path, tokenizer: Path | None = None) -> Source:
    return Source(path, tokenizer, None, "plansmith.yaml:5")


def pin(fleet: TinyFleet, model: str = "tiny", **fields: str) -> str:
    """Pin a model of a fleet by its revision, which is returned; fields : more of the model's."""
    tokenizer = fields.get("tokenizer")
    folder = fleet.folder / fields.get("checkpoint", model)
    held = open_checkpoint(folder, None, fleet.folder / tokenizer if tokenizer else None).fingerprint()
    told = ", ".join(f"{name}: {value}" for name, value in {"checkpoint": model, **fields}.items())
    fleet.edit(f"{model}: {model}", f"{model}: {{{told}, revision: '{held}'}}")
    return held


def planned(fleet: TinyFleet, *stores: Store) -> list[Unit]:
    """Return a fleet's units as the commands have them."""
    return units_of(fleet.fleet, hashes=fleet.hashes(), open_stores=lambda: stores or [fleet.store])


def told(units: list[Unit]) -> list[Any]:
    """Return everything that is said of units, but where their checkpoints are."""
    fields = (
        "name",
        "members",
        "key",
        "inputs",
        "gate_inputs",
        "fingerprint",
        "limits",
        "recipe",
        "draft",
        "unknown",
        "buildable",
        "weight_bytes",
        "peak_bytes",
    )
    return [{name: getattr(unit, name) for name in fields} for unit in units]


def plans(fleet: TinyFleet, units: list[Unit]) -> list[Any]:
    """Return the steps of a plan, and the status, as JSON."""
    steps = [step.to_json() for step in plan_fleet(fleet.fleet, units, fleet.store)]
    for step in steps:
        del step["checkpoint"]["missing_weights"]
    return [*steps, status_of(fleet.fleet, units, fleet.store).to_json()]


def note(fleet: TinyFleet) -> None:
    """Note in the fleet's store what its checkpoints tell."""
    note_facts(fleet.fleet, fleet.units(), fleet.store)


def record_of(store: LocalStore, fleet: str = "chat") -> Record:
    """Return the only record of a checkpoint that a fleet has."""
    (ref,) = store.refs(facts_name(fleet)).values()
    found = store.record(ref.key)
    assert found is not None
    return found


def leave_pointers(folder: Path) -> None:
    """Replace every file as Git LFS does that did not fetch it."""
    for path in folder.iterdir():
        data = path.read_bytes()
        oid = hashlib.sha256(data).hexdigest()
        path.write_text(
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(data)}\n",
            encoding="ascii",
        )


# What is left of a checkpoint: name -> what takes the rest away.
PARTS: dict[str, Callable[[Path], None]] = {
    "nothing": shutil.rmtree,
    "an empty folder": lambda path: [one.unlink() for one in path.iterdir()] and None,
    "config.json": lambda path: (
        [one.unlink() for one in path.iterdir() if one.name != "config.json"] and None
    ),
    "all but the weights": lambda path: [one.unlink() for one in path.glob("*.safetensors")] and None,
    "a shard less": lambda path: sorted(path.glob("*.safetensors"))[1].unlink(),
    "tokenizer.json": lambda path: (
        [one.unlink() for one in path.iterdir() if one.name != "tokenizer.json"] and None
    ),
    "pointers": leave_pointers,
}


@pytest.fixture
def sharded(tmp_path: Path) -> TinyFleet:
    """Return a pinned fleet over a checkpoint of several files, with a gate, a draft and a GPU."""
    checkpoint = make_tiny("llama", tmp_path / "made", max_shard_size="100KB")
    assert len(list(checkpoint.glob("*.safetensors"))) > 2
    fleet = TinyFleet(tmp_path / "fleet", {"tiny": checkpoint}, GATED, "[cpu, l4, sm80]")
    pin(fleet)
    return fleet


@pytest.mark.parametrize("part", list(PARTS))
def test_without_weights_as_with_them(sharded: TinyFleet, quick_rtx: QuickRtx, part: str) -> None:
    """Plan a fleet half of which is built, with its checkpoint and without."""
    sharded.build("*/fp16/*")
    sharded.edit("max_batch_size: 4", "max_batch_size: 8")
    sharded.build("*/fp16/cpu")
    with_weights = planned(sharded)
    assert not any(unit.missing_weights for unit in with_weights)
    PARTS[part](sharded.folder / "tiny")
    without = planned(sharded)
    assert all(unit.missing_weights for unit in without)
    assert told(without) == told(with_weights)
    assert plans(sharded, without) == plans(sharded, with_weights)


def test_what_is_missing(sharded: TinyFleet) -> None:
    folder = sharded.folder / "tiny"
    assert missing_weights(folder) == ""
    first, second, *_ = sorted(path.name for path in folder.glob("*.safetensors"))
    (folder / first).unlink()
    assert missing_weights(folder) == f"{first} is missing"
    (folder / second).unlink()
    (folder / second).mkdir()
    assert missing_weights(folder) == f"{first} is missing, and 1 more"
    (folder / "model.safetensors.index.json").write_text("{}")
    assert missing_weights(folder) == ""  # the reader says what is wrong with it
    (folder / "model.safetensors.index.json").unlink()
    assert missing_weights(folder) == "it has no weights"
    assert missing_weights(folder / "no.gguf") == "it does not exist"


def test_weights_that_are_here_ask_no_store(sharded: TinyFleet) -> None:
    def refuse() -> list[Store]:
        raise AssertionError("nobody asked for it")

    assert units_of(sharded.fleet, hashes=sharded.hashes(), open_stores=refuse)


def test_other_kinds(tmp_path: Path, tiny_checkpoint: Callable[[str], Path]) -> None:
    """GGUF, TensorRT-LLM with a tokenizer elsewhere, and what ModelOpt quantized."""
    from tiny_gguf import write_gguf
    from tiny_quantized import make_modelopt
    from tiny_trtllm import write_trtllm

    llama = tiny_checkpoint("llama")
    fleet = TinyFleet(tmp_path / "fleet", {"tiny": llama}, "{auto: {kv_cache_dtype: auto}}", "[cpu, sm89]")
    text = fleet.file.read_text()
    write_gguf(llama, fleet.folder / "tiny.gguf")
    write_trtllm(llama, fleet.folder / "trt", tp_size=2)
    make_modelopt("fp8", fleet.folder / "fp8")
    for fields, gone in (
        ({"checkpoint": "tiny.gguf"}, "tiny.gguf"),
        ({"checkpoint": "trt", "tokenizer": "tiny"}, "trt"),
        ({"checkpoint": "trt", "tokenizer": "tiny/tokenizer.json"}, "trt/rank1.safetensors"),
        ({"checkpoint": "fp8"}, "fp8"),
        ({"checkpoint": "fp8"}, "fp8/model.safetensors"),
    ):
        fleet.file.write_text(text)
        pin(fleet, **fields)
        before = told(fleet.units())
        note(fleet)
        path = fleet.folder / gone
        path.rename(fleet.folder / "away")
        assert told(planned(fleet)) == before, fields
        (fleet.folder / "away").rename(path)


def test_the_ids_of_a_tensorrt_llm_checkpoint(tmp_path: Path, tiny_checkpoint: Callable[[str], Path]) -> None:
    """They are the tokenizer's, so another tokenizer makes another spec, which its weights' reader alone can tell."""
    from tiny_trtllm import write_trtllm

    fleet = TinyFleet(tmp_path / "fleet", {"tiny": tiny_checkpoint("llama")})
    write_trtllm(tiny_checkpoint("llama"), fleet.folder / "trt")
    pin(fleet, checkpoint="trt", tokenizer="tiny")
    note(fleet)
    shutil.rmtree(fleet.folder / "trt")
    assert planned(fleet)
    path = fleet.folder / "tiny/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 7}))
    with pytest.raises(
        CheckpointError, match=r"tiny/config.json is not what it was .* ids of its special tokens"
    ):
        planned(fleet)


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family: str, tiny_checkpoint: Callable[[str], Path]) -> None:
    path = tiny_checkpoint(family)
    checkpoint = open_checkpoint(path, 100)
    facts = facts_of_checkpoint(checkpoint, source_of(path))
    inputs = facts.inputs(checkpoint.fingerprint())
    key = checkpoint_facts.inputs_key(inputs)
    record = Record(key, "checkpoint", inputs, (), json.loads(json.dumps(facts.content())), {})
    assert read_facts(record, checkpoint.fingerprint()) == facts
    assert facts.spec == checkpoint.spec
    assert facts.depends_on_length == ("longrope" in family)


def test_no_revision(sharded: TinyFleet) -> None:
    note(sharded)
    sharded.edit(f", revision: '{sharded.units()[0].fingerprint}'", "")
    shutil.rmtree(sharded.folder / "tiny")
    with pytest.raises(CheckpointError) as error:
        planned(sharded)
    assert "plansmith.yaml:4: " in str(error.value) and "does not exist; give a" in str(error.value)
    assert "with its revision in the file, what a store knows of it is enough to plan" in str(error.value)


def test_pointers_without_a_revision(tiny_fleet: MakeFleet) -> None:
    fleet = tiny_fleet()
    leave_pointers(fleet.folder / "tiny")
    with pytest.raises(CheckpointError, match=r"plansmith.yaml:4: .*Git LFS; run `git lfs pull`"):
        planned(fleet)


def test_never_recorded(sharded: TinyFleet) -> None:
    held = sharded.units()[0].fingerprint
    shutil.rmtree(sharded.folder / "tiny")
    with pytest.raises(CheckpointError) as error:
        planned(sharded)
    text = str(error.value)
    assert (
        "plansmith.yaml:4: the weights of " in text and str(sharded.folder / "tiny") in text and held in text
    )
    assert (
        "no store of the fleet knows tiny at it; fetch the checkpoint, or run `plansmith fleet build` or "
        "`plansmith fleet push` once where it is" in text
    )
    with pytest.raises(CheckpointError, match="fetch the checkpoint"):
        sharded.units()  # which asks no store


def test_another_revision(sharded: TinyFleet) -> None:
    note(sharded)
    held = sharded.units()[0].fingerprint
    shutil.rmtree(sharded.folder / "tiny")
    sharded.edit(held, "0" * 64)
    with pytest.raises(
        CheckpointError, match=f"its revision is {'0' * 64}, and no store of the fleet knows tiny"
    ):
        planned(sharded)


def test_weights_of_another_revision(sharded: TinyFleet) -> None:
    """Where they are here, they are what counts."""
    note(sharded)
    (sharded.folder / "tiny/generation_config.json").write_text('{"eos_token_id": 5}')
    with pytest.raises(CheckpointError, match="has the fingerprint"):
        planned(sharded)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "hf_quant_config.json"])
def test_a_config_of_another_revision(sharded: TinyFleet, name: str) -> None:
    """The revision covers it, so it is told without the weights too, be it changed or new."""
    note(sharded)
    for path in (sharded.folder / "tiny").glob("*.safetensors"):
        path.unlink()
    path = sharded.folder / "tiny" / name
    path.write_text(
        json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), "use_cache": False})
    )
    with pytest.raises(CheckpointError, match=rf"plansmith.yaml:4: .*/{name} is not that of revision"):
        planned(sharded)


def test_a_tokenizer_beside_no_weights(sharded: TinyFleet, quick_rtx: QuickRtx) -> None:
    """It is no part of the revision: its files that are here count, and the others are what they were."""
    sharded.build("*/fp16/*")
    folder = sharded.folder / "tiny"
    for path in folder.iterdir():
        if path.name not in ("tokenizer_config.json", "config.json"):
            path.unlink()
    assert all(
        step.action == "keep" for step in plan_fleet(sharded.fleet, planned(sharded), sharded.store)[3:]
    )
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": 77}))
    steps = plan_fleet(sharded.fleet, planned(sharded), sharded.store)
    assert {step.why for step in steps[3:]} == {("tokenizer: its files changed",)}
    path.unlink()
    (folder / "special_tokens_map.json").write_text("{}")
    steps = plan_fleet(sharded.fleet, planned(sharded), sharded.store)
    assert {step.why for step in steps[3:]} == {("tokenizer: its files changed",)}


def test_a_tokenizer_of_its_own(tmp_path: Path, tiny_checkpoint: Callable[[str], Path]) -> None:
    """Both folders have a generation_config.json; the model's goes before the tokenizer's, here or not."""
    fleet = TinyFleet(tmp_path / "fleet", {"tiny": tiny_checkpoint("llama")})
    shutil.copytree(tiny_checkpoint("llama"), fleet.folder / "words")
    (fleet.folder / "words/generation_config.json").write_text('{"eos_token_id": 9}')
    pin(fleet, tokenizer="words")
    before = told(fleet.units())
    note(fleet)
    shutil.rmtree(fleet.folder / "tiny")
    assert told(planned(fleet)) == before
    (fleet.folder / "words/tokenizer_config.json").unlink()
    (fleet.folder / "words/tokenizer_config.json").mkdir()  # no file, so it is not here
    assert told(planned(fleet)) == before
    (fleet.folder / "words/chat_template.jinja").write_text("{{ 1 }}")
    assert told(planned(fleet)) != before


def test_the_last_tokenizer_counts(sharded: TinyFleet, quick_rtx: QuickRtx) -> None:
    """Whoever builds with another one says so, there and back."""
    path = sharded.folder / "tiny/tokenizer_config.json"
    old = path.read_text()
    new = json.dumps({**json.loads(old), "model_max_length": 77})
    for text in (old, new, old):
        path.write_text(text)
        sharded.build("*/fp16/cpu")
        before = told(sharded.units())
        (sharded.folder / "tiny").rename(sharded.folder / "away")
        assert told(planned(sharded)) == before
        (sharded.folder / "away").rename(sharded.folder / "tiny")


def test_another_version_of_the_reader(sharded: TinyFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would read is not known; a machine that has the checkpoint tells it once, beside what was there."""
    note(sharded)
    for module in (checkpoint_facts, facts_store):
        monkeypatch.setattr(module, "reader_digest", lambda: "f" * 64)
    (sharded.folder / "tiny").rename(sharded.folder / "away")
    with pytest.raises(
        CheckpointError, match="only as another version of plansmith reads checkpoints; fetch"
    ):
        planned(sharded)
    (sharded.folder / "away").rename(sharded.folder / "tiny")
    note(sharded)
    shutil.rmtree(sharded.folder / "tiny")
    assert planned(sharded)
    monkeypatch.undo()
    assert planned(sharded)
    assert len(sharded.store.refs(facts_name("chat"))) == 2


def test_the_readers_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest is over what reads checkpoints, and nothing that is changed more often."""
    builder = Path(checkpoint_facts.spec_module.__file__).parent
    copied = tmp_path / "builder"
    shutil.copytree(builder, copied, ignore=shutil.ignore_patterns("__pycache__", "targets", "graph"))
    monkeypatch.setattr(checkpoint_facts.spec_module, "__file__", str(copied / "spec.py"))
    digest = checkpoint_facts.reader_digest.__wrapped__
    first = digest()
    assert first == checkpoint_facts.reader_digest()
    for name, is_read in (("limits.py", False), ("spec.py", True), ("checkpoint/families/llama.py", True)):
        path = copied / name
        text = path.read_text()
        path.write_text(f"{text}\n# changed\n")
        assert (digest() != first) == is_read, name
        path.write_text(text)


def test_longrope(tmp_path: Path, tiny_checkpoint: Callable[[str], Path]) -> None:
    """Its spec is that of one max_seq_len; for another one the checkpoint is needed."""
    fleet = TinyFleet(tmp_path / "fleet", {"tiny": tiny_checkpoint("phi3_longrope")})
    pin(fleet)
    keys = {}
    for length in (128, 48):
        fleet.edit("max_seq_len: 128", f"max_seq_len: {length}")
        keys[length] = told(fleet.units())
        note(fleet)
    assert len(fleet.store.refs(facts_name("chat"))) == 2
    shutil.rmtree(fleet.folder / "tiny")
    assert told(planned(fleet)) == keys[48]
    fleet.edit("max_seq_len: 48", "max_seq_len: 128")
    assert told(planned(fleet)) == keys[128]
    fleet.edit("max_seq_len: 128", "max_seq_len: 100")
    with pytest.raises(
        CheckpointError, match="knows tiny at it for max_seq_len 48, 128 only, on which its LongRoPE"
    ):
        planned(fleet)


def test_a_new_recipe_needs_no_weights(sharded: TinyFleet) -> None:
    note(sharded)
    shutil.rmtree(sharded.folder / "tiny")
    sharded.edit("fp16: }", "fp16: , fp32: , more: {precision: int4, limits: {max_seq_len: 64}}}")
    assert len(planned(sharded)) == 12


def test_an_original_that_is_not_here(tmp_path: Path, tiny_checkpoint: Callable[[str], Path]) -> None:
    """Of what a gate compares with, the revision is all that a plan asks for; no store has to know it."""
    from tiny_quantized import make_modelopt

    fleet = TinyFleet(tmp_path / "fleet", {"tiny": tiny_checkpoint("llama")}, "{fp8: {gate: kl<=5}}")
    make_modelopt("fp8", fleet.folder / "fp8")
    pin(fleet, quantized="{fp8: fp8}")
    before = told(fleet.units())
    shutil.rmtree(fleet.folder / "tiny")
    units = planned(fleet)
    assert told(units) == before and not units[0].missing_weights
    report = fleet.build()
    assert statuses(report) == {"tiny/fp8/cpu": "built"}
    assert (
        "the weights of" in report.failures["tiny-fp8"]
        and "fetch the checkpoint" in report.failures["tiny-fp8"]
    )
    assert report.failures["tiny-fp8"].count(str(fleet.folder / "tiny")) == 1


# Builds.


def build(fleet: TinyFleet, *only: str) -> Any:
    """Build as the command does where checkpoints are not here."""
    from plansmith.fleet.budget import Budget
    from plansmith.fleet.build import BuildOptions, build_fleet

    units = units_of(fleet.fleet, only=only, hashes=fleet.hashes(), open_stores=lambda: [fleet.store])
    return build_fleet(
        fleet.fleet, units, fleet.store, BuildOptions(Budget(64 << 30, 2), hashes=fleet.hashes())
    )


def test_what_the_store_has_needs_no_weights(sharded: TinyFleet, quick_rtx: QuickRtx) -> None:
    sharded.build("*/fp16/*")
    shutil.rmtree(sharded.folder / "tiny")
    shutil.rmtree(sharded.folder / "engines")
    compiled = len(quick_rtx.compiled)
    report = build(sharded, "*/fp16/*")
    assert set(statuses(report).values()) == {"kept"} and report.failures == {}
    assert engines(report) == {"tiny-fp16": "assembled"}
    assert len(quick_rtx.compiled) == compiled


def test_what_has_to_be_compiled_says_what_to_fetch(sharded: TinyFleet, quick_rtx: QuickRtx) -> None:
    sharded.build("*/fp16/cpu")
    held = sharded.units()[0].fingerprint
    for path in (sharded.folder / "tiny").glob("*.safetensors"):
        path.unlink()
    report = build(sharded, "*/fp16/*")
    assert statuses(report) == {
        "tiny/fp16/cpu": "kept",
        "tiny/fp16/sm89": "failed",
        "tiny/fp16/sm80": "failed",
    }
    why = report.failures["tiny/fp16/sm89"]
    assert "plansmith.yaml:4: the weights of" in why and str(sharded.folder / "tiny") in why
    assert f"fetch the checkpoint of revision {held} first" in why
    assert quick_rtx.compiled == []
    assert sharded.problems() == []


def test_a_gate_says_what_to_fetch(sharded: TinyFleet, quick_rtx: QuickRtx) -> None:
    """A verdict on weights that are not there is none: it would be kept, and the gate never measured."""
    sharded.build("*/int8/*", assemble=False)
    for key in list(sharded.store.records()):
        found = sharded.store.record(key)
        if found is not None and found.kind == "gate":
            (sharded.store.root / f"records/{key}.json").unlink()
    shutil.rmtree(sharded.folder / "tiny")
    report = build(sharded, "*/int8/*")
    assert set(statuses(report).values()) == {"kept"}
    assert "fetch the checkpoint of revision" in report.failures["tiny-int8"]
    assert not [
        key for key in sharded.store.records() if (one := sharded.store.record(key)) and one.kind == "gate"
    ]


def test_a_build_notes_what_is_pinned_alone(tiny_fleet: MakeFleet) -> None:
    fleet = tiny_fleet()
    fleet.build()
    assert len(list(fleet.store.records())) == 1 and fleet.store.refs(facts_name("chat")) == {}
    pin(fleet)
    fleet.build()  # compiles nothing
    assert record_of(fleet.store).kind == "checkpoint"
    (name,) = fleet.store.refs(facts_name("chat"))
    assert name.startswith(f"tiny/{fleet.units()[0].fingerprint}/") and name.endswith("/any")
    assert len(list(fleet.store.records())) == 2 and fleet.problems() == []
    times = fleet.records(), fleet.store.refs(facts_name("chat"))
    fleet.build()
    assert (fleet.records(), fleet.store.refs(facts_name("chat"))) == times


def test_what_changed_meanwhile_is_not_noted(sharded: TinyFleet) -> None:
    """The facts of a tokenizer are those of the units that were asked for, or nobody's."""
    units = sharded.units()
    path = sharded.folder / "tiny/tokenizer_config.json"
    text = path.read_text()
    path.write_text(json.dumps({**json.loads(text), "model_max_length": 77}))
    note_facts(sharded.fleet, units, sharded.store)
    path.unlink()
    note_facts(sharded.fleet, units, sharded.store)
    assert list(sharded.store.records()) == []
    path.write_text(text)
    note_facts(sharded.fleet, units, sharded.store)
    assert record_of(sharded.store).kind == "checkpoint"


# What cannot be trusted.


def altered(record: Record, **changes: Any) -> Record:
    """Return a record of a spec with other fields, under the key that it has then."""
    content = json.loads(json.dumps(dict(record.content)))
    content["spec"] |= changes
    inputs = {**record.inputs, "content": checkpoint_facts._digest(content)}
    return Record(checkpoint_facts.inputs_key(inputs), record.kind, inputs, (), content, {})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 10**9}, "layers, num_layers is 1000000000"),
        ({"hidden_size": 0}, "spec.hidden_size is 0, wanted is at least 1"),
        ({"vocab_size": "320"}, "spec.vocab_size is '320', wanted is a whole number"),
        ({"ropes": []}, "rope_idx 0 and 0 ropes"),
        (
            {"ropes": [{"inv_freq": [1.0], "rotary_dim": 16, "mscale": 1.0, "kind": "x"}]},
            "1 frequencies for rotary_dim",
        ),
        ({"surprise": 1}, "spec has a field 'surprise'"),
    ],
)
def test_facts_that_cannot_be(sharded: TinyFleet, changes: dict[str, Any], words: str) -> None:
    note(sharded)
    store = sharded.store
    bad = store.put_record(altered(record_of(store), **changes))
    (name,) = store.refs(facts_name("chat"))
    store.set_ref(facts_name("chat"), name, Ref.now(bad.key))
    shutil.rmtree(sharded.folder / "tiny")
    with pytest.raises(CheckpointError) as error:
        planned(sharded)
    assert words in str(error.value) and "Or fetch the checkpoint" in str(error.value)


def test_records_of_something_else(sharded: TinyFleet) -> None:
    """A ref that leads to another record than its name says."""
    sharded.build("*/fp16/cpu")
    good = record_of(sharded.store)
    fingerprint = good.inputs["checkpoint"]
    (unit,) = (
        one for one in map(sharded.store.record, list(sharded.store.records())) if one and one.kind == "unit"
    )
    for record, words in (
        (unit, "is none of a checkpoint"),
        (dataclasses.replace(good, inputs={**good.inputs, "kind": "unit"}), "is none of a checkpoint"),
        (
            dataclasses.replace(good, content={**good.content, "kind": "x"}),
            "has another content than its key says",
        ),
        (rekeyed(good, checkpoint="0" * 64), "is of the checkpoint '0000"),
        (rekeyed(good, reader="1"), "is of the reader '1'"),
    ):
        with pytest.raises(EngineFileError, match=words):
            read_facts(record, fingerprint)
    assert isinstance(read_facts(good, fingerprint), CheckpointFacts)


def rekeyed(record: Record, **changes: str) -> Record:
    inputs = {**record.inputs, **changes}
    return dataclasses.replace(record, key=checkpoint_facts.inputs_key(inputs), inputs=inputs)


def test_a_hash_that_is_none(sharded: TinyFleet) -> None:
    note(sharded)
    good = record_of(sharded.store)
    content = json.loads(json.dumps(dict(good.content)))
    content["tokenizer"][0]["sha256"] = "x"
    bad = rekeyed(dataclasses.replace(good, content=content), content=checkpoint_facts._digest(content))
    with pytest.raises(EngineFileError, match=r"has 'x' for 'tokenizer/.*wanted is a sha256"):
        read_facts(bad, good.inputs["checkpoint"])


def test_a_record_that_is_lost(sharded: TinyFleet) -> None:
    note(sharded)
    (sharded.store.root / f"records/{record_of(sharded.store).key}.json").unlink()
    (sharded.folder / "tiny").rename(sharded.folder / "away")
    with pytest.raises(CheckpointError, match="the store has lost the record of tiny at it; fetch"):
        planned(sharded)
    (sharded.folder / "away").rename(sharded.folder / "tiny")
    note(sharded)  # puts it right
    shutil.rmtree(sharded.folder / "tiny")
    assert planned(sharded)


def test_every_byte_of_a_record(sharded: TinyFleet, tmp_path: Path) -> None:
    """Altered under a signature, it is refused by its name; the plan never comes out another."""
    public = load_public(make_key(tmp_path / "key.pem"))
    signing = open_store(sharded.fleet.store, key=load_private(tmp_path / "key.pem"))
    note_facts(sharded.fleet, sharded.units(), signing)
    trusting = LocalStore(signing.root, trust=[public])
    path = signing.root / f"records/{record_of(signing).key}.json"
    before = told(sharded.units())
    shutil.rmtree(sharded.folder / "tiny")
    assert told(planned(sharded, trusting)) == before
    whole, refused = path.read_bytes(), 0
    for place in range(10, len(whole), len(whole) // 25):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            found = told(planned(sharded, trusting))
        except CheckpointError as error:
            assert "what a store knows of it cannot be used: " in str(error) and path.name[:64] in str(error)
            refused += 1
        else:
            assert found == before  # a byte that says nothing, as of a signature's name
    assert refused > 20


def test_unsigned_facts(sharded: TinyFleet, tmp_path: Path) -> None:
    note(sharded)
    shutil.rmtree(sharded.folder / "tiny")
    trusting = LocalStore(sharded.store.root, trust=[load_public(make_key(tmp_path / "key.pem"))])
    with pytest.raises(CheckpointError, match="is not signed"):
        planned(sharded, trusting)


def test_who_has_no_key_leaves_it_to_others(sharded: TinyFleet, tmp_path: Path) -> None:
    """A build that compiles nothing goes on without a key; what nobody would believe is not put anywhere."""
    public = load_public(make_key(tmp_path / "key.pem"))
    trusting = open_store(sharded.fleet.store, trust=[public])
    note_facts(sharded.fleet, sharded.units(), trusting)
    assert list(trusting.records()) == [] and trusting.refs(facts_name("chat")) == {}
    remote = RemoteStore(f"file://{tmp_path}/remote", trust=[public])
    note_facts(sharded.fleet, sharded.units(), sharded.store, remote)
    assert list(remote.records()) == [] and len(sharded.store.refs(facts_name("chat"))) == 1
    signing = open_store(sharded.fleet.store, key=load_private(tmp_path / "key.pem"))
    note_facts(sharded.fleet, sharded.units(), signing, remote)
    assert len(remote.refs(facts_name("chat"))) == 1 and record_of(remote).signers  # type: ignore[arg-type]


def test_who_may_not_say_which_tokenizer_is_the_last(sharded: TinyFleet, tmp_path: Path) -> None:
    """Both records are genuine; a ref that leads to the old one again needs a trusted key too."""
    public = load_public(make_key(tmp_path / "key.pem"))
    signing = open_store(sharded.fleet.store, key=load_private(tmp_path / "key.pem"))
    trusting = LocalStore(signing.root, trust=[public])
    note_facts(sharded.fleet, sharded.units(), signing)
    ((name, old),) = signing.refs(facts_name("chat")).items()
    path = sharded.folder / "tiny/tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": 77}))
    after = told(sharded.units())
    note_facts(sharded.fleet, sharded.units(), signing)
    shutil.rmtree(sharded.folder / "tiny")
    assert told(planned(sharded, trusting)) == after
    LocalStore(signing.root).set_ref(facts_name("chat"), name, Ref.now(old.key))
    with pytest.raises(CheckpointError, match="is not signed"):
        planned(sharded, trusting)


def test_of_two_stores_the_last_counts(sharded: TinyFleet, remote: RemoteStore) -> None:
    """What this machine noted once is older than what another has pushed since; and one that is damaged is none."""
    note_facts(sharded.fleet, sharded.units(), sharded.store, remote)
    store, name = sharded.store, facts_name("chat")
    ((member, old),) = store.refs(name).items()
    store.set_ref(name, member, Ref(old.key, "2026-01-31T12:00:00Z"))
    path = sharded.folder / "tiny/tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": 77}))
    after = told(sharded.units())
    other = open_store(sharded.folder / "other")
    note_facts(sharded.fleet, sharded.units(), other, remote)
    shutil.rmtree(sharded.folder / "tiny")
    assert told(planned(sharded, store, remote)) == after
    assert told(planned(sharded, store)) != after
    (other.root / f"records/{record_of(other).key}.json").write_text("{}")
    assert told(planned(sharded, other, remote)) == after
    with pytest.raises(CheckpointError, match="cannot be used"):
        planned(sharded, other)


# Between machines.


@pytest.fixture
def remote(tmp_path: Path) -> RemoteStore:
    return RemoteStore(f"file://{tmp_path}/remote")


def test_pushed_and_pulled(
    sharded: TinyFleet, remote: RemoteStore, tmp_path: Path, quick_rtx: QuickRtx
) -> None:
    sharded.build("*/fp16/*", remote=remote, push=True)
    before = told(sharded.units())
    shutil.rmtree(sharded.folder / "tiny")
    assert told(planned(sharded, remote)) == before
    other = open_store(tmp_path / "other")
    moved = dataclasses.replace(sharded.fleet, output=tmp_path / "engines")
    pulled = pull_fleet(moved, ["*/fp16/*"], other, remote)
    assert [one.status for one in pulled.engines] == ["assembled"]
    assert told(planned(sharded, other)) == before
    # Who has no weights hands on what it knows of them, and takes nothing newer back.
    third = RemoteStore(f"file://{tmp_path}/third")
    push_fleet(sharded.fleet, planned(sharded, other), other, third)
    assert told(planned(sharded, third)) == before


def test_a_push_of_nothing_else(sharded: TinyFleet, remote: RemoteStore) -> None:
    """Errors say to run it: nothing has to be built for it."""
    sent, absent = push_fleet(sharded.fleet, sharded.units(), sharded.store, remote)
    assert sent.records == 1 and len(absent) == 6
    assert push_fleet(sharded.fleet, sharded.units(), sharded.store, remote)[0].records == 0
    before = told(sharded.units())
    shutil.rmtree(sharded.folder / "tiny")
    assert told(planned(sharded, remote)) == before


def test_damaged_facts_stop_no_pull(
    sharded: TinyFleet, remote: RemoteStore, tmp_path: Path, quick_rtx: QuickRtx
) -> None:
    """A machine that serves needs none."""
    sharded.build("*/fp16/*", remote=remote, push=True)
    key = record_of(sharded.store).key
    (tmp_path / f"remote/records/{key}.json").write_text("{}")
    other = open_store(tmp_path / "other")
    moved = dataclasses.replace(sharded.fleet, output=tmp_path / "engines")
    assert [one.status for one in pull_fleet(moved, ["*/fp16/*"], other, remote).engines] == ["assembled"]
    assert other.record(key) is None and other.refs(facts_name("chat")) == {}
    push_fleet(sharded.fleet, sharded.units(), sharded.store, remote)  # puts it right
    pull_fleet(moved, ["*/fp16/*"], other, remote)
    assert other.record(key) is not None


def test_branches_do_not_take_each_others_away(sharded: TinyFleet) -> None:
    """Another branch pins another revision and builds it into the same store."""
    note(sharded)
    before, text = told(sharded.units()), sharded.file.read_text()
    held = sharded.units()[0].fingerprint
    shutil.copytree(sharded.folder / "tiny", sharded.folder / "old")
    (sharded.folder / "tiny/generation_config.json").write_text('{"eos_token_id": 5}')
    other = open_checkpoint(sharded.folder / "tiny").fingerprint()
    sharded.edit(held, other)
    after = told(sharded.units())
    note(sharded)
    for name in ("tiny", "old"):
        shutil.rmtree(sharded.folder / name)
    assert told(planned(sharded)) == after
    sharded.file.write_text(text)
    assert told(planned(sharded)) == before


def test_a_collection(sharded: TinyFleet, quick_rtx: QuickRtx) -> None:
    """It keeps what the file pins, and what another branch may; the rest goes in the end."""
    sharded.build("*/fp16/cpu")
    store, name = sharded.store, facts_name("chat")
    (current,) = store.refs(name)
    held = sharded.units()[0].fingerprint
    key = store.refs(name)[current].key
    others = [
        current.replace(held, "0" * 64),
        f"gone/{current.partition('/')[2]}",
        f"tiny/{held}/{'0' * 64}/any",
    ]
    long_ago = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=40)
    for one in others:
        store.set_ref(name, one, Ref(key, long_ago.strftime("%Y-%m-%dT%H:%M:%SZ")))
    store.set_ref(name, others[0], Ref.now(key))
    assert collect_fleet(sharded.fleet, store, keep_days=30, dry_run=True)[0] == []
    assert set(store.refs(name)) == {current, *others}
    forgotten, _ = collect_fleet(sharded.fleet, store, keep_days=30)
    assert forgotten == []  # no members
    assert set(store.refs(name)) == {current, others[0]}
    collect_fleet(sharded.fleet, store, keep_days=0)
    assert set(store.refs(name)) == {current}
    shutil.rmtree(sharded.folder / "tiny")
    assert planned(sharded)
    # Once nothing is pinned, nothing asks for it.
    sharded.file.write_text(sharded.file.read_text().replace(held, "1" * 64))
    collect_fleet(sharded.fleet, store, keep_days=0)
    assert store.refs(name) == {} and not store.has_record(key)


def test_a_pinned_model_among_others(tiny_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is not here is asked of the store."""
    fleet = tiny_fleet({"a": "llama", "b": "qwen3"})
    pin(fleet, "b")
    note(fleet)
    before = told(fleet.units())
    shutil.rmtree(fleet.folder / "b")
    opened: list[Path] = []

    def counted(path: Path, *arguments: Any) -> Any:
        opened.append(path)
        return open_checkpoint(path, *arguments)

    monkeypatch.setattr(opener, "open_checkpoint", counted)
    units = planned(fleet)
    assert told(units) == before
    assert [bool(unit.missing_weights) for unit in units] == [False, True]
    assert read_fleet(fleet.file).models["b"].source.revision is not None
    assert opened == [fleet.folder / "a", fleet.folder / "b"]
