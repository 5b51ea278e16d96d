"""manifest.json is read strictly: whatever is done to it, an EngineFileError or the same manifest comes out."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plansmith.builder.graph import contract
from plansmith.builder.targets.registry import target_names
from plansmith.runtime import manifest as m
from plansmith.runtime import manifest_entries as e
from plansmith.runtime.errors import EngineFileError

PLAN = b"PSMPLAN\0" + bytes(range(256)) * 4
TOKENIZER = b'{"model": {}}'


def entry_of(root: pathlib.Path, name: str, data: bytes) -> e.FileEntry:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return e.FileEntry(path=name, size=len(data), sha256=m.hash_file(path))


def sample(root: pathlib.Path) -> m.Manifest:
    """Write a small engine directory and return its manifest."""
    tokenizer = (entry_of(root, "tokenizer/tokenizer.json", TOKENIZER),)
    target = e.TargetEntry(
        compiler="plansmith-cpu",
        compiler_version="1",
        sm=(),
        token_layout="packed",
        compute_dtype="float32",
        kv_dtype="float32",
        activation_quantization="none",
        row_alignment="none",
        profiles=(),
        inputs=(e.TensorEntry(name="input_ids", dtype="int32", dims=("T",)),),
        files=(entry_of(root, "targets/cpu/model.plan", PLAN),),
        flags=(),
        key="0" * 64,
        seconds=1.5,
        provenance=e.ProvenanceEntry(
            created="2026-01-30T12:00:00Z",
            plansmith_version="0.0.9",
            host=e.HostEntry(
                os="Linux", machine="aarch64", cpu="other", cpus=4, memory_bytes=1 << 33, python="3.12"
            ),
            platform="linux-aarch64",
            gpus=(),
            tools=("python 3.12.1", "numpy 2.4.6"),
            inputs={"limits.max_batch_size": "4", "kernel_compiler": ""},
        ),
    )
    manifest = m.Manifest(
        schema_version=m.SCHEMA_VERSION,
        plansmith_version="0.1.0",
        created="2026-01-31T12:00:00Z",
        host=e.HostEntry(
            os="Linux", machine="x86_64", cpu="cpu", cpus=2, memory_bytes=1 << 34, python="3.11"
        ),
        model=e.ModelEntry(
            family="llama",
            architecture="LlamaForCausalLM",
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            max_position_embeddings=128,
            windows=(0, 16),
            num_parameters=12345,
            dtype="bfloat16",
            bos_token_id=None,
            eos_token_ids=(2,),
            pad_token_id=0,
        ),
        precision="int8",
        limits=e.LimitsEntry(
            max_batch_size=4,
            max_num_tokens=64,
            max_input_len=64,
            max_seq_len=128,
            max_beam_width=1,
            tokens_per_block=8,
            kv_cache_type="paged",
        ),
        tokenizer=e.TokenizerEntry(files=tokenizer, sha256=m.hash_entries(tokenizer)),
        graph_contract=e.GraphContractEntry(
            version=m.GRAPH_CONTRACT_VERSION,
            inputs=("input_ids",),
            outputs=("logits",),
            pool_inputs=("k_pool.{layer}",),
            pool_outputs=("k_pool_out.{layer}",),
        ),
        checkpoint=e.CheckpointEntry(path="/models/tiny", fingerprint="f" * 64),
        targets={"cpu": target},
        root=root,
    )
    (root / m.MANIFEST_NAME).write_text(manifest.to_text())
    return manifest


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    sample(tmp_path)
    return tmp_path


def edit(root: pathlib.Path, change: Any) -> None:
    """Change the manifest's content as a careful editor would: with a matching checksum."""
    content = json.loads((root / m.MANIFEST_NAME).read_text())
    change(content)
    content["checksum"] = m.checksum(content)
    (root / m.MANIFEST_NAME).write_text(json.dumps(content))


def test_round_trip(tmp_path: pathlib.Path) -> None:
    manifest = sample(tmp_path)
    loaded = m.load_manifest(tmp_path)
    assert loaded == manifest
    assert loaded.root == tmp_path
    assert loaded.to_text() == manifest.to_text()
    loaded.check_files(hashes=True)
    assert loaded.plan_path("cpu").read_bytes() == PLAN


def test_every_target_that_can_be_built_can_be_read(root: pathlib.Path) -> None:
    manifest = m.load_manifest(root)
    targets = dict.fromkeys(m.BUILDABLE, manifest.targets["cpu"])
    draft = e.DraftEntry("int4", targets)
    (root / m.MANIFEST_NAME).write_text(dataclasses.replace(manifest, targets=targets, draft=draft).to_text())
    loaded = m.load_manifest(root)
    assert list(loaded.targets) == list(m.BUILDABLE) and "sm89-tensorrt" in loaded.targets
    assert loaded.targets == targets and loaded.draft == draft


def test_a_manifest_from_before_has_no_provenance(root: pathlib.Path) -> None:
    edit(root, lambda content: content["targets"]["cpu"].pop("provenance"))
    text = (root / m.MANIFEST_NAME).read_text()
    loaded = m.load_manifest(root)
    assert loaded.targets["cpu"].provenance is None
    assert "provenance" not in loaded.to_text() and json.loads(loaded.to_text()) == json.loads(text)


def test_tools_of_a_plan(root: pathlib.Path) -> None:
    own = m.load_manifest(root).targets["cpu"].provenance
    assert own is not None
    assert own.tool_version("numpy") == "2.4.6"
    assert own.tool_version("nump") is None


def test_contract_version_is_the_builders() -> None:
    assert m.GRAPH_CONTRACT_VERSION == contract.VERSION


def test_kv_bytes(root: pathlib.Path) -> None:
    model = m.load_manifest(root).model
    assert model.kv_bytes_per_token("float32") == 2 * 2 * 2 * 8 * 4
    assert model.kv_bytes_per_token("float16") == 2 * 2 * 2 * 8 * 2


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no manifest.json"),
        ({"model.safetensors": b""}, "a checkpoint; build the engine first: plansmith build"),
        ({"rank0.engine": b"", "config.json": b"{}"}, "TensorRT-LLM engine"),
    ],
)
def test_not_an_engine(tmp_path: pathlib.Path, files: dict[str, bytes], words: str) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(EngineFileError, match=words):
        m.load_manifest(tmp_path)


def test_absent_and_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(EngineFileError, match="does not exist"):
        m.load_manifest(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(EngineFileError, match="is a file"):
        m.load_manifest(tmp_path / "file")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100000, "not valid JSON"),
        (b'{"a": ' + b"1" * 10000 + b"}", "not valid JSON"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b"[]", "a JSON object"),
        (b"{}", "no schema_version"),
        (b'{"schema_version": true}', "no schema_version"),
        (
            b'{"schema_version": 99, "plansmith_version": "9.0"}',
            "written by plansmith 9.0.*upgrade plansmith",
        ),
        (b'{"schema_version": 0}', "build the engine again with: plansmith build"),
    ],
)
def test_other_content(root: pathlib.Path, data: bytes, words: str) -> None:
    (root / m.MANIFEST_NAME).write_bytes(data)
    with pytest.raises(EngineFileError, match=words):
        m.load_manifest(root)


def set_at(path: str, value: Any) -> Any:
    def change(content: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        place: Any = content
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place[part]
        place[last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("surprise", 1, "'surprise' that this plansmith does not know"),
        ("model/surprise", 1, "model has a field 'surprise'"),
        ("limits/max_batch_size", 0, "limits.max_batch_size is 0, it must be an integer from 1"),
        ("limits/max_batch_size", True, "limits.max_batch_size is True"),
        ("limits/max_batch_size", 2.0, "limits.max_batch_size is 2.0"),
        ("limits/kv_cache_type", "continuous", "must be 'paged'"),
        ("limits/max_input_len", 4096, "contradicts itself"),
        ("limits/max_seq_len", 4096, "must not exceed model.max_position_embeddings"),
        ("model/windows", [0], "one number a layer"),
        ("model/num_kv_heads", 3, "multiple of"),
        ("created", "yesterday", "a UTC time"),
        ("host/cpu", "a\nb", "printable"),
        ("precision", "", "printable"),
        ("tokenizer/sha256", "0" * 64, "hash of tokenizer.files"),
        ("graph_contract/version", 2, "graph contract 2, this runtime drives 1"),
        ("targets/cpu/token_layout", "ragged", "'packed' or 'rectangular'"),
        ("targets/cpu/seconds", -1, "at least 0"),
        ("targets/cpu/files", [], "every target must have a file"),
        ("targets/cpu/files/0/path", "../../etc/passwd", "a relative path inside"),
        ("targets/cpu/files/0/path", "/etc/passwd", "a relative path inside"),
        ("targets/cpu/files/0/path", "targets/./x", "a relative path inside"),
        ("targets/cpu/files/0/path", "a\u0000b", "a relative path inside"),
        ("targets/CPU X", {}, "lower-case letters"),
        ("targets/-cpu", {}, "lower-case letters"),
        ("targets/cpu/provenance", None, "provenance is None, it must be an object"),
        ("targets/cpu/provenance/created", "now", "a UTC time"),
        ("targets/cpu/provenance/host/cpus", 0, r"provenance\.host\.cpus is 0"),
        ("targets/cpu/provenance/platform", "", "printable"),
        ("targets/cpu/provenance/tools", {"numpy": "2"}, "a list"),
        ("targets/cpu/provenance/tools", ["a\n1"], "printable"),
        ("targets/cpu/provenance/gpus", [1], "printable"),
        ("targets/cpu/provenance/inputs", ["a"], "inputs is \\['a'\\], it must be an object"),
        ("targets/cpu/provenance/inputs/key", 1, r"inputs\.key is 1, it must be a text"),
        ("targets/cpu/provenance/inputs/key", "a\tb", "printable"),
        ("targets/cpu/provenance/inputs/key", "a" * ((1 << 16) + 1), "up to 65536"),
        ("targets/cpu/provenance/inputs/a b", "", "a name in .*inputs is 'a b'"),
        ("targets/cpu/provenance/surprise", 1, "has a field 'surprise'"),
    ],
)
def test_each_rule(root: pathlib.Path, path: str, value: Any, words: str) -> None:
    edit(root, set_at(path, value))
    with pytest.raises(EngineFileError, match=words):
        m.load_manifest(root)


def test_missing_field(root: pathlib.Path) -> None:
    edit(root, lambda content: content["targets"]["cpu"].pop("key"))
    with pytest.raises(EngineFileError, match=r"targets\.cpu lacks the field 'key'"):
        m.load_manifest(root)


def test_plausible_edit_is_found(root: pathlib.Path) -> None:
    text = (root / m.MANIFEST_NAME).read_text().replace('"max_batch_size": 4', '"max_batch_size": 8')
    (root / m.MANIFEST_NAME).write_text(text)
    with pytest.raises(EngineFileError, match="changed after the build"):
        m.load_manifest(root)


def test_missing_target_names_the_command(root: pathlib.Path) -> None:
    with pytest.raises(
        EngineFileError, match=r"no target 'sm89', only cpu; .*plansmith build /models/tiny .*sm89"
    ):
        m.load_manifest(root).target("sm89")
    with pytest.raises(
        EngineFileError, match=r"no target 'sm70', only cpu; this version cannot build that one"
    ):
        m.load_manifest(root).target("sm70")


def test_targets_that_are_suggested_can_be_built() -> None:
    assert list(m.BUILDABLE) == target_names()


def test_file_missing_truncated_flipped(root: pathlib.Path) -> None:
    manifest = m.load_manifest(root)
    plan = manifest.plan_path("cpu")
    flipped = bytearray(PLAN)
    flipped[100] ^= 1
    plan.write_bytes(bytes(flipped))
    manifest.check_files()
    with pytest.raises(EngineFileError, match="changed after the build"):
        manifest.check_files(hashes=True)
    plan.write_bytes(PLAN[:-1])
    with pytest.raises(EngineFileError, match="was cut short or replaced"):
        manifest.check_files()
    plan.unlink()
    with pytest.raises(EngineFileError, match=r"model\.plan is missing.*--target cpu .*--force"):
        manifest.check_files()
    manifest.check_files(targets=[])


def test_other_tokenizer_is_found_without_asking(root: pathlib.Path) -> None:
    manifest = m.load_manifest(root)
    (root / "tokenizer/tokenizer.json").write_bytes(TOKENIZER.replace(b"model", b"mode1"))
    with pytest.raises(EngineFileError, match=r"tokenizer file .*tokenizer\.json has sha256"):
        manifest.check_files()


def test_symbolic_link_out_of_the_directory(
    root: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "model.plan"
    outside.write_bytes(PLAN)
    plan = root / "targets/cpu/model.plan"
    plan.unlink()
    plan.symlink_to(outside)
    with pytest.raises(EngineFileError, match="leads outside the engine directory"):
        m.load_manifest(root).check_files()
    plan.unlink()
    plan.symlink_to(plan)
    with pytest.raises(EngineFileError, match=r"model\.plan is a loop of links"):
        m.load_manifest(root).check_files()


def make_fifo(path: pathlib.Path) -> None:
    os.mkfifo(path)  # opening it would wait for a writer for ever


@pytest.mark.parametrize(
    ("make", "words"),
    [(pathlib.Path.mkdir, "is a directory, not a file"), (make_fifo, "is a FIFO, not a file")],
)
@pytest.mark.parametrize("name", [m.MANIFEST_NAME, "targets/cpu/model.plan", "tokenizer/tokenizer.json"])
def test_what_is_no_file_is_called_by_what_it_is(
    root: pathlib.Path, name: str, make: Callable[[pathlib.Path], None], words: str
) -> None:
    (root / name).unlink()
    make(root / name)
    with pytest.raises(EngineFileError, match=words) as error:
        m.load_manifest(root).check_files()
    assert str(root / name) in str(error.value) and "missing" not in str(error.value)


SAMPLE_ROOT = pathlib.Path("/engine")
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4)
    ),
    max_leaves=8,
)


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All paths into a JSON value."""
    found = [here]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        found += places(child, (*here, key))
    return found


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> m.Manifest:
    return sample(tmp_path_factory.mktemp("engine"))


def same_or_refused(data: bytes, good: m.Manifest) -> None:
    try:
        assert m.parse_manifest(data, SAMPLE_ROOT) == good
    except EngineFileError as error:
        assert len(str(error)) < 1000


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_json(good: m.Manifest, data: st.DataObject) -> None:
    content = copy.deepcopy(json.loads(good.to_text()))
    for _ in range(data.draw(st.integers(1, 3))):
        *parents, last = data.draw(st.sampled_from([place for place in places(content) if place]))
        holder: Any = content
        for key in parents:
            holder = holder[key]
        if data.draw(st.booleans()):
            del holder[last]
        else:
            holder[last] = data.draw(json_values)
    if data.draw(st.booleans()):
        try:
            content["checksum"] = m.checksum(content)
            m.parse_manifest(json.dumps(content).encode(), SAMPLE_ROOT)  # may pass: the checksum agrees
        except EngineFileError:
            pass
    else:
        same_or_refused(json.dumps(content).encode("utf-8", "surrogatepass"), good)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 1 << 20), value=st.integers(0, 255), cut=st.booleans())
def test_flipped_or_cut_bytes(good: m.Manifest, position: int, value: int, cut: bool) -> None:
    data = bytearray(good.to_text().encode())
    position %= len(data)
    if cut:
        del data[position:]
    else:
        data[position] = value
    same_or_refused(bytes(data), good)
