"""kernels.json is read strictly: whatever is done to a folder, an EngineFileError or the same kernels come out."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pathlib
import random
from collections.abc import Callable
from typing import Any

import pytest
from plansmith.runtime.errors import EngineFileError, UnsupportedError
from plansmith.runtime.executors import kernel_bundle as kb

SMS = (75, 80, 86, 90, 120)


def content_of(root: pathlib.Path) -> dict[str, Any]:
    """Write the cubins of two kernels and return a kernels.json that is right."""
    kernels = []
    for name in ("draw", "scan"):
        cubins = []
        for sm in SMS:
            data = f"{name} for {sm}".encode()
            file = f"{name}.sm{sm}.cubin"
            (root / file).write_bytes(data)
            digest = hashlib.sha256(data).hexdigest()
            cubins.append(
                {"sm": sm, "file": file, "size": len(data), "sha256": digest, "shared_bytes": sm * 16}
            )
        kernels.append(
            {
                "name": name,
                "symbol": f"{name}_kernel",
                "arguments": [
                    {"name": "logits", "type": "*fp32:16"},
                    {"name": "rows", "type": "*i32"},
                    {"name": "vocab_size", "type": "i32:16"},
                    {"name": "scale", "type": "fp32"},
                ],
                "num_warps": 4,
                "constants": {"BLOCK": 2048, "CAP": 1.5, "KIND": "top", "WIDE": True, "LOW": None},
                "cubins": cubins,
            }
        )
    return {"schema_version": 1, "triton_version": "3.9.0", "key": "0" * 64, "kernels": kernels}


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    write(tmp_path, content_of(tmp_path))
    return tmp_path


def write(root: pathlib.Path, content: Any) -> None:
    (root / kb.BUNDLE_NAME).write_text(json.dumps(content))


def edit(root: pathlib.Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((root / kb.BUNDLE_NAME).read_text())
    change(content)
    write(root, content)


def test_a_kernel_has_all_that_a_launch_takes(root: pathlib.Path) -> None:
    bundle = kb.load(root, 86)
    kernel = bundle.kernel("draw")
    assert kernel.cubin == b"draw for 86" and kernel.sm == 86 and kernel.symbol == "draw_kernel"
    assert (kernel.num_warps, kernel.shared_bytes) == (4, 86 * 16)
    assert [argument.is_pointer for argument in kernel.arguments] == [True, True, False, False]
    assert [argument.multiple_of for argument in kernel.arguments] == [16, 1, 16, 1]
    assert kernel.constants == {"BLOCK": 2048, "CAP": 1.5, "KIND": "top", "WIDE": True, "LOW": None}
    assert bundle.entry.sms() == SMS and set(bundle.kernels) == {"draw", "scan"}
    with pytest.raises(EngineFileError, match=r"no kernel 'bound', only draw, scan: another version"):
        bundle.kernel("bound")


@pytest.mark.parametrize(
    ("gpu", "cubin"), [(75, 75), (80, 80), (86, 86), (87, 86), (89, 86), (90, 90), (120, 120)]
)
def test_a_gpu_takes_its_own_cubin_or_an_earlier_one_of_its_kind(
    root: pathlib.Path, gpu: int, cubin: int
) -> None:
    assert kb.load(root, gpu).kernel("scan").sm == cubin


@pytest.mark.parametrize("gpu", [61, 70, 72, 100, 103, 121])
def test_a_gpu_that_no_cubin_runs_on(root: pathlib.Path, gpu: int) -> None:
    words = f"compiled for sm75, sm80, sm86, sm90, sm120, this GPU is sm{gpu}; build a target for it"
    with pytest.raises(UnsupportedError, match=words):
        kb.load(root, gpu)


def test_where_cubins_run() -> None:
    assert kb.runs_on(80, 89) and not kb.runs_on(89, 86) and not kb.runs_on(75, 80)
    assert [kb.runs_on(100, gpu) for gpu in (100, 103, 120)] == [True, False, False]
    assert kb.runs_on(120, 120) and not kb.runs_on(120, 121)


def kernel(n: int = 0) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda content: content["kernels"][n]


RULES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda c: c.update(schema_version=2), "schema version 2, this plansmith reads 1; upgrade"),
    (lambda c: c.update(schema_version=0), "schema_version is 0, it must be an integer from 1 to 1"),
    (lambda c: c.update(schema_version=True), "schema_version is True"),
    (lambda c: c.update(triton_version=""), "triton_version is '', it must be a text"),
    (lambda c: c.update(key="no"), "key is 'no', it must be a sha256"),
    (lambda c: c.update(more=1), "has a field 'more' that this plansmith does not know"),
    (lambda c: c.pop("key"), "lacks the field 'key'"),
    (lambda c: c.update(kernels={}), "kernels is {}, it must be a list"),
    (lambda c: kernel()(c).update(name="a b"), "name is 'a b', it must be a name of letters"),
    (lambda c: kernel()(c).update(symbol="9x"), "symbol is '9x', it must be a name of letters"),
    (lambda c: kernel()(c).update(num_warps=64), "num_warps is 64, it must be an integer from 1 to 32"),
    (lambda c: kernel()(c).update(num_warps=3), "num_warps must be a power of two"),
    (lambda c: kernel()(c).update(constants=[]), r"constants is \[\], it must be an object"),
    (lambda c: kernel()(c)["constants"].update(LOW=[]), r"constants.LOW is \[\], it must be a number"),
    (lambda c: kernel()(c)["arguments"][0].update(type="*fp8"), "type is .*must be a type such as i32"),
    (lambda c: kernel()(c)["arguments"][0].update(type="i32:8"), "type is 'i32:8', it must be a type"),
    (lambda c: kernel()(c)["arguments"][0].update(name="rows"), "two arguments of one name"),
    (lambda c: kernel()(c).update(name="scan"), "two kernels have one name"),
    (lambda c: kernel()(c).update(cubins=[]), "every kernel must have a cubin"),
    (
        lambda c: kernel()(c)["cubins"][0].update(sm=80, file="other"),
        "two cubins for one compute capability",
    ),
    (lambda c: kernel()(c)["cubins"][0].update(sm=7), "sm is 7, it must be an integer from 50 to 999"),
    (
        lambda c: kernel()(c)["cubins"][0].update(file="../x"),
        r"file is '../x', it must be the plain name",
    ),
    (lambda c: kernel()(c)["cubins"][0].update(file=".."), r"file is '..', it must be the plain name"),
    (lambda c: kernel()(c)["cubins"][0].update(file="/x"), "file is '/x', it must be the plain name"),
    (lambda c: kernel()(c)["cubins"][0].update(file="scan.sm75.cubin"), "two cubins are one file"),
    (lambda c: kernel()(c)["cubins"][0].update(size=0), "size is 0, it must be an integer from 1"),
    (lambda c: kernel()(c)["cubins"][0].update(size=1 << 30), "size is 1073741824, it must be an integer"),
    (lambda c: kernel()(c)["cubins"][0].update(sha256="0"), "sha256 is '0', it must be a sha256"),
    (lambda c: kernel()(c)["cubins"][0].update(shared_bytes=-1), "shared_bytes is -1, it must be"),
]


@pytest.mark.parametrize(("change", "words"), RULES, ids=[words[:40] for _, words in RULES])
def test_one_error_a_rule(root: pathlib.Path, change: Callable[[dict[str, Any]], Any], words: str) -> None:
    edit(root, change)
    with pytest.raises(EngineFileError, match=words):
        kb.read_bundle(root)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"key": NaN}', "NaN is not a JSON number"),
        (b'{"key": 1, "key": 2}', "the name 'key' appears twice"),
        (b"\xff", "not valid JSON"),
        (b" " * (kb.MAX_BUNDLE_BYTES + 1), "more than the 1048576 that it can have"),
    ],
)
def test_what_is_no_kernels_json(root: pathlib.Path, data: bytes, words: str) -> None:
    (root / kb.BUNDLE_NAME).write_bytes(data)
    with pytest.raises(EngineFileError, match=words):
        kb.load(root, 80)


def test_files_are_compared(root: pathlib.Path) -> None:
    path = root / "draw.sm80.cubin"
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    with pytest.raises(EngineFileError, match=r"draw.sm80.cubin has 10 bytes, kernels.json says 11"):
        kb.load(root, 80)
    path.write_bytes(good[:-1] + b"X")
    with pytest.raises(EngineFileError, match=r"draw.sm80.cubin is not what kernels.json says"):
        kb.load(root, 80)
    assert kb.load(root, 86).kernel("draw").sm == 86  # whose files are whole
    path.unlink()
    with pytest.raises(EngineFileError, match=r"draw.sm80.cubin is missing"):
        kb.load(root, 80)
    os.mkfifo(path)
    with pytest.raises(EngineFileError, match=r"draw.sm80.cubin is a FIFO"):
        kb.load(root, 80)


def test_no_folder(tmp_path: pathlib.Path) -> None:
    with pytest.raises(EngineFileError, match=r"kernels.json is missing; copy the engine again"):
        kb.load(tmp_path / "kernels", 80)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a JSON value."""
    found = [path] if path else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        found += places(one, (*path, key))
    return found


WRONG = (None, True, -1, 0, 1 << 70, 1.5, "", "x" * 5000, "a\nb", "..", [], {}, [[]], {"a": 1})


def test_any_value_replaced_or_removed_is_refused_or_means_the_same(root: pathlib.Path) -> None:
    good = json.loads((root / kb.BUNDLE_NAME).read_text())
    good["kernels"] = good["kernels"][:1]
    good["kernels"][0]["cubins"] = good["kernels"][0]["cubins"][1:3]
    refused = accepted = 0
    for path in places(good):
        for wrong in (*WRONG, "removed"):
            content = copy.deepcopy(good)
            holder = content
            for key in path[:-1]:
                holder = holder[key]
            if wrong == "removed":
                del holder[path[-1]]
            else:
                holder[path[-1]] = wrong
            write(root, content)
            try:
                bundle = kb.load(root, 86)
            except (EngineFileError, UnsupportedError):
                refused += 1
            else:
                accepted += 1
                for one in bundle.kernels.values():
                    assert one.cubin in (b"draw for 86", b"draw for 80")
    assert refused > 5 * accepted > 0


def test_any_byte_changed_is_refused_or_read(root: pathlib.Path) -> None:
    rng = random.Random(1)
    good = (root / kb.BUNDLE_NAME).read_bytes()
    for _ in range(500):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        (root / kb.BUNDLE_NAME).write_bytes(bytes(data[: rng.choice([len(data), rng.randrange(len(data))])]))
        try:
            kb.load(root, 80)
        except (EngineFileError, UnsupportedError):
            continue
