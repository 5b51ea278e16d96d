"""plansmith.yaml: what a file says, and a sentence with its line for everything that it cannot say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from plansmith.builder.limits import Limits
from plansmith.builder.precision import GROUP_SIZES
from plansmith.builder.targets.registry import KV_CACHE_DTYPES
from plansmith.calibration.gate import METRICS, SCOPES, Gate
from plansmith.fleet.fleet_file import Fleet, read_fleet
from plansmith.fleet.schema_check import schema
from plansmith.runtime.errors import Error, InvalidArgumentError

FULL = f"""\
version: 1
name: chat
store: s3://bucket/engines
output: out
trust: ['ed25519:AAAA']
limits: {{max_batch_size: 32, max_seq_len: 2048}}
models:
  smol:
    checkpoint: checkpoints/smollm2
    revision: {"a" * 64}
    tokenizer: tok
    quantized:
      fp8: {{checkpoint: checkpoints/smollm2-fp8, revision: {"b" * 64}}}
    limits: {{max_seq_len: 1024}}
  plain: /somewhere/else
recipes:
  int8: {{precision: int8, group_size: 64, draft: int4, kv_cache_dtype: float16, gate: "kl<=0.05, top1@long >= 95%"}}
  fp8:
skus:
  cpu:
  l4:
  l40s: {{limits: {{max_batch_size: 64}}}}
  a100-80g:
  h100: {{runner: [self-hosted, h100]}}
  rtx4090: {{compiler: tensorrt}}
  edge: {{target: rtx}}
  sm86:
engines:
  - {{model: smol, recipe: int8, skus: [cpu, l4]}}
  - {{model: [smol, plain], recipe: fp8}}
runners: {{default: ubuntu-latest, sm89: [self-hosted, l4]}}
"""


def read(tmp_path: Path, text: str) -> Fleet:
    (tmp_path / "plansmith.yaml").write_text(text)
    return read_fleet(tmp_path)


def test_a_full_file(tmp_path: Path) -> None:
    fleet = read(tmp_path, FULL)
    assert (fleet.name, fleet.store) == ("chat", "s3://bucket/engines")
    assert fleet.output == tmp_path / "out"
    assert fleet.trust == ("ed25519:AAAA",)
    smol = fleet.models["smol"]
    assert smol.source.path == tmp_path / "checkpoints/smollm2"
    assert smol.source.tokenizer == tmp_path / "tok"
    assert smol.source.revision == "a" * 64
    assert smol.source_for("int8") is smol.source
    assert smol.source_for("fp8").path == tmp_path / "checkpoints/smollm2-fp8"
    assert (smol.source_for("fp8").revision, smol.source_for("fp8").tokenizer) == ("b" * 64, tmp_path / "tok")
    assert smol.limits["max_seq_len"].value == 1024
    assert smol.limits["max_seq_len"].where.endswith("plansmith.yaml:14")
    assert fleet.models["plain"].source.path == Path("/somewhere/else")
    int8, fp8 = fleet.recipes["int8"], fleet.recipes["fp8"]
    assert (int8.precision, int8.group_size, int8.draft, int8.kv_cache_dtype) == (
        "int8",
        64,
        "int4",
        "float16",
    )
    assert (int8.gate, int8.weight_streaming) == ("kl<=0.05, top1@long >= 95%", False)
    assert (fp8.precision, fp8.draft, fp8.kv_cache_dtype) == ("fp8", None, "auto")
    targets = {name: sku.target.name for name, sku in fleet.skus.items()}
    assert targets == {
        "cpu": "cpu",
        "l4": "sm89",
        "l40s": "sm89",
        "a100-80g": "sm80",
        "h100": "sm90",
        "rtx4090": "sm89-tensorrt",
        "edge": "rtx",
        "sm86": "sm86",
    }
    assert fleet.skus["l40s"].has_limits and not fleet.skus["l4"].has_limits
    assert fleet.skus["l4"].gpu is not None and fleet.skus["cpu"].gpu is None
    assert fleet.skus["h100"].runner == ("self-hosted", "h100")
    assert fleet.runners == {"default": ("ubuntu-latest",), "sm89": ("self-hosted", "l4")}
    assert [one.skus for one in fleet.engines] == [("cpu", "l4"), tuple(fleet.skus)]
    assert fleet.engines[1].models == ("smol", "plain")


def test_the_least(tmp_path: Path) -> None:
    fleet = read(tmp_path, "version: 1\nname: a\nmodels: {m: c}\nrecipes: [int8, fp16]\nskus: [cpu, l4]\n")
    assert fleet.store == str(tmp_path / ".plansmith/store")
    assert fleet.output == tmp_path / "engines"
    assert list(fleet.recipes) == ["int8", "fp16"]
    assert fleet.recipes["fp16"].precision == "fp16"
    (choice,) = fleet.engines
    assert (choice.models, choice.recipes, choice.skus) == (("m",), ("int8", "fp16"), ("cpu", "l4"))


def test_paths_are_of_the_files_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    monkeypatch.setenv("HOME", "/home/somebody")
    text = "version: 1\nname: a\nstore: ../shared\nmodels: {m: ~/models/c}\nrecipes: [int8]\nskus: [cpu]\n"
    (tmp_path / "deep" / "f.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    fleet = read_fleet("deep/f.yaml")
    assert fleet.store == str(tmp_path / "deep/../shared")
    assert fleet.models["m"].source.path == Path("/home/somebody/models/c")


def test_a_place_for_anchors(tmp_path: Path) -> None:
    text = BASE.replace("models:", "x-gpu: &gpu {limits: {max_batch_size: 64}}\nmodels:").replace(
        "  l4:", "  l4: *gpu"
    )
    fleet = read(tmp_path, text)
    given = fleet.skus["l4"].limits["max_batch_size"]
    assert (given.value, given.where.rpartition(":")[2]) == (64, "3")  # the line that brought it
    with pytest.raises(InvalidArgumentError, match="the file has 'y-gpu', which is not known"):
        read(tmp_path, text.replace("version: 1", "version: 1\ny-gpu: 1"))


BASE = """\
version: 1
name: chat
models:
  smol:
    checkpoint: c
recipes:
  int8:
skus:
  cpu:
  l4:
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("version: 1", "version: 2", 1, ("version is 2", "wanted 1")),
        ("version: 1", "versoin: 1", 1, ("'versoin'", "did you mean version?")),
        ("name: chat", "name: Chat", 2, ("name is 'Chat'", "lower-case")),
        ("name: chat", "name: 8", 2, ("name is 8", "put it in quotes")),
        ("name: chat", "name: ''", 2, ("name is ''", "lower-case")),
        ("name: chat", 'name: "chat\\n"', 2, ("lower-case",)),
        ("name: chat", "name: ../up", 2, ("lower-case",)),
        ("name: chat\n", "", 1, ("the file has no name; add it",)),
        ("name: chat", "name: chat\nstores: x", 3, ("'stores'", "did you mean store?")),
        ("name: chat", "name: chat\nstore: 5", 3, ("store is 5",)),
        ("name: chat", "name: chat\ntrust: ed25519:x", 3, ("trust is 'ed25519:x'", "a list of keys")),
        ("name: chat", "name: chat\ntrust: [rsa]", 3, ("trust[0] is 'rsa'", "ed25519:")),
        ("checkpoint: c", "checkpoint: [c]", 5, ("models.smol.checkpoint is a list",)),
        (
            "checkpoint: c",
            "chekpoint: c",
            5,
            ("'chekpoint'", "did you mean checkpoint?", "1 more line is wrong"),
        ),
        ("    checkpoint: c", "    tokenizer: c", 4, ("models.smol has no checkpoint",)),
        ("checkpoint: c", "checkpoint: c\n    revision: abc", 6, ("revision is 'abc'", "64 hexadecimal")),
        ("checkpoint: c", "checkpoint: c\n    revision: 12", 6, ("revision is 12", "put it in quotes")),
        ("checkpoint: c", "checkpoint: c\n    limits: {max_batch: 2}", 6, ("did you mean max_batch_size?",)),
        ("checkpoint: c", "checkpoint: c\n    limits: {max_batch_size: x}", 6, ("is 'x'", "whole number")),
        ("checkpoint: c", "checkpoint: c\n    limits: {max_batch_size: 2.5}", 6, ("is 2.5", "whole number")),
        (
            "checkpoint: c",
            "checkpoint: c\n    limits: {max_batch_size: true}",
            6,
            ("is true", "whole number"),
        ),
        ("checkpoint: c", "checkpoint: c\n    limits: {max_batch_size: 0}", 6, ("is 0", "from 1 on")),
        ("checkpoint: c", "checkpoint: c\n    limits: {tokens_per_block: 7}", 6, ("is 7", "8, 16, 32")),
        ("checkpoint: c", "checkpoint: c\n    quantized: {fp9: d}", 6, ("'fp9'", "no recipe of the fleet")),
        ("  smol:\n", "  Smol:\n", 4, ("models has the name 'Smol'", "lower-case")),
        ("models:\n  smol:\n    checkpoint: c\n", "models: {}\n", 3, ("models is empty",)),
        (
            "models:\n  smol:\n    checkpoint: c\n",
            "models:\n",
            3,
            ("models is nothing", "a mapping of names"),
        ),
        ("models:\n  smol:\n    checkpoint: c\n", "models: [c]\n", 3, ("models is a list",)),
        ("  int8:\n", "  int9:\n", 7, ("recipes.int9 has no precision", "did you mean int8?")),
        ("  int8:\n", "  q: {precision: int5}\n", 7, ("recipes.q.precision is 'int5'", "did you mean int")),
        ("  int8:\n", "  int8: {group_size: 7}\n", 7, ("group_size is 7", "32, 64 or 128")),
        ("  int8:\n", "  int8: {kv_cache_dtype: fp9}\n", 7, ("kv_cache_dtype is 'fp9'", "float16")),
        ("  int8:\n", "  int8: {weight_streaming: 1}\n", 7, ("weight_streaming is 1", "true or false")),
        ("  int8:\n", "  int8: {gate: kl<0.1 top1>0.5}\n", 7, ("gate is", "kl_p99")),
        ("  int8:\n", "  int8: {gate: speed<=1}\n", 7, ("gate is 'speed<=1'",)),
        ("  int8:\n", "  int8: int8\n", 7, ("recipes.int8 is 'int8'", "a mapping such as")),
        ("  l4:\n", "  l5:\n", 10, ("no GPU and no target is called 'l5'", "did you mean l4")),
        ("  l4:\n", "  a100:\n", 10, ("'a100' may be", "a100-40g")),
        ("  l4:\n", "  sm88:\n", 10, ("cannot build for sm88",)),
        ("  l4:\n", "  l4: {target: sm80}\n", 10, ("l4 is sm89", "sm80")),
        ("  l4:\n", "  x: {target: sm8}\n", 10, ("target 'sm8'",)),
        ("  l4:\n", "  x: {target: 'cpu,sm80'}\n", 10, ("wanted one",)),
        ("  l4:\n", "  l4: {compiler: gcc}\n", 10, ("compiler is 'gcc'", "rtx or tensorrt")),
        ("  l4:\n", "  h100: {compiler: rtx}\n", 10, ("rtx has no sm90",)),
        ("  l4:\n", "  t4: {compiler: tensorrt}\n", 10, ("tensorrt has no sm75",)),
        ("  cpu:\n", "  cpu: {compiler: rtx}\n", 9, ("cpu has a compiler of its own",)),
        ("  l4:\n", "  l4: {runner: []}\n", 10, ("runner is empty",)),
        ("skus:\n", "store: s3:/bucket/x\nskus:\n", 8, ("s3:/bucket/x", "did you mean s3://bucket/x?")),
        (
            "skus:\n",
            "runners: {sm95: x}\nskus:\n",
            8,
            ("'sm95', which is no target", "There are default, cpu, sm75"),
        ),
        ("skus:\n", "runners: {defualt: x}\nskus:\n", 8, ("did you mean default?",)),
        (
            "skus:\n",
            "runners:\n  l4: [self-hosted, l4]\nskus:\n",
            9,
            ("'l4', which is an SKU of the fleet", "call it sm89, or give its labels as skus.l4.runner"),
        ),
        ("skus:\n  cpu:\n  l4:\n", "skus: [cpu, l4, cpu]\n", 8, ("an item twice",)),
        ("skus:\n  cpu:\n  l4:\n", "skus: [cpu,\n  l5]\n", 9, ("'l5'",)),
        ("skus:\n", "engines: []\nskus:\n", 8, ("engines is empty",)),
        ("skus:\n", "engines: [{model: smal, recipe: int8}]\nskus:\n", 8, ("'smal'", "did you mean smol?")),
        ("skus:\n", "engines: [{model: smol, recipe: int4}]\nskus:\n", 8, ("no recipe of the fleet",)),
        (
            "skus:\n",
            "engines:\n  - {model: smol, recipe: int8, skus: [cpu,\n    l44]}\nskus:\n",
            10,
            ("engines[0].skus has 'l44', which is no SKU of the fleet; did you mean l4?",),
        ),
        ("skus:\n", "engines: [{recipe: int8}]\nskus:\n", 8, ("engines[0] has no model",)),
        (
            "skus:\n",
            "engines: [{model: [smol, b], recipe: int8, name: x}]\nskus:\n",
            8,
            ("'b', which is no model",),
        ),
    ],
)
def test_errors_have_their_line(
    tmp_path: Path, old: str, new: str, line: int, words: tuple[str, ...]
) -> None:
    assert BASE.count(old) == 1
    with pytest.raises(Error) as error:
        read(tmp_path, BASE.replace(old, new))
    text = str(error.value)
    assert f"plansmith.yaml:{line}: " in text, text
    for word in words:
        assert word in text, text
    assert "--" not in text  # there are no options here


@pytest.mark.parametrize("field", ["store", "output"])
def test_the_home_directory_of_nobody(tmp_path: Path, field: str) -> None:
    with pytest.raises(InvalidArgumentError, match="user that is not known here"):
        read(tmp_path, BASE.replace("skus:\n", f"{field}: ~nobody-of-that-name/x\nskus:\n"))


def test_one_name_for_several_engines(tmp_path: Path) -> None:
    text = BASE.replace("  int8:\n", "  int8:\n  fp16:\n")
    with pytest.raises(InvalidArgumentError, match=r"yaml:9: engines\[0\] has one name for several"):
        read(
            tmp_path,
            text.replace("skus:\n", "engines: [{model: smol, recipe: [int8, fp16], name: x}]\nskus:\n"),
        )


@pytest.mark.parametrize("text", ["[1, 2]\n", "word\n", "5\n"])
def test_what_is_no_mapping(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"yaml:1: the file is .*, wanted a mapping with version"):
        read(tmp_path, text)


def test_a_missing_file_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"plansmith.yaml is missing; write one, or name yours"):
        read_fleet(tmp_path)


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    assert schema()["$schema"].endswith("2020-12/schema")


def test_the_schema_has_what_the_builder_takes() -> None:
    defs = schema()["$defs"]
    assert set(defs["limits"]["properties"]) == set(Limits.__dataclass_fields__) - {"kv_cache_type"}
    recipe = defs["recipe"]["properties"]
    assert tuple(recipe["kv_cache_dtype"]["enum"]) == KV_CACHE_DTYPES
    assert sorted(recipe["group_size"]["enum"]) == sorted(GROUP_SIZES)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("scope", ["", *(f"@{one}" for one in SCOPES), "@wide"])
@pytest.mark.parametrize("rest", ["<=0.05", " >= 95%", "<.5", ">1e-3", "=1", "<=x", "<=1,", ""])
def test_gates_are_those_of_the_evaluation(metric: str, scope: str, rest: str) -> None:
    text = f"{metric}{scope}{rest}"
    try:
        Gate.parse(text)
        good = True
    except InvalidArgumentError:
        good = False
    pattern = schema()["$defs"]["recipe"]["properties"]["gate"]["pattern"]
    for tried in (text, f"top1>=0.9 , {text}"):
        if not tried.endswith(","):  # which the evaluation forgives
            assert bool(re.search(pattern, tried)) == good


def test_the_schema_describes_every_field() -> None:
    def check(where: str, node: object) -> None:
        if isinstance(node, dict):
            for name, one in node.get("properties", {}).items():
                described = "description" in one or "$ref" in one
                assert described, f"{where}.{name}"
            for name, one in node.items():
                check(f"{where}.{name}", one)

    check("", json.loads(json.dumps(schema())))
