"""What is refused before a draft is opened, each with the command that mends it, from manifests alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.builder.build import plan_build
from plansmith.runtime import opening as opening_module
from plansmith.runtime.errors import EngineFileError, InvalidArgumentError
from plansmith.runtime.executor import cpu_executor
from plansmith.runtime.manifest import Manifest, hash_entries, hash_file, load_manifest
from plansmith.runtime.opening import CpuOptions, Opening, plan_opening

GetPath = Callable[..., Path]


@pytest.fixture
def engine_dir(tiny_engine: GetPath) -> Path:
    return tiny_engine("llama")


@pytest.fixture
def draft(tiny_engine: GetPath) -> Manifest:
    return load_manifest(tiny_engine("llama", "int8"))


def opening(
    engine_dir: Path, draft: Path | None = None, speculation: str = "auto", **options: Any
) -> Opening:
    return plan_opening(engine_dir, "cpu", draft, speculation, options)


def write(manifest: Manifest, root: Path) -> Path:
    root.mkdir(exist_ok=True)
    (root / "manifest.json").write_text(manifest.to_text(), encoding="utf-8")
    return root


def with_limits(manifest: Manifest, **limits: int) -> Manifest:
    return dataclasses.replace(manifest, limits=dataclasses.replace(manifest.limits, **limits))


def test_a_draft_that_fits_is_opened(engine_dir: Path, draft: Manifest) -> None:
    planned = opening(engine_dir, draft.root)
    assert planned.draft == draft and planned.draft_file == draft.targets["cpu"].files[0]
    assert opening(engine_dir, None).draft is None
    assert opening(engine_dir, None, "ngram").options.draft_mode == "ngram"


def test_another_vocabulary_is_refused(engine_dir: Path, draft: Manifest, tmp_path: Path) -> None:
    model = dataclasses.replace(draft.model, vocab_size=draft.model.vocab_size - 1)
    other = write(dataclasses.replace(draft, model=model), tmp_path / "other")
    with pytest.raises(InvalidArgumentError, match=r"has vocab_size \d+, the engine .* --draft int4$"):
        opening(engine_dir, other)


def test_another_tokenizer_is_refused_and_another_file_with_the_same_vocabulary_is_not(
    engine_dir: Path, draft: Manifest, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer").mkdir()
    path = tmp_path / "tokenizer/tokenizer.json"

    def write_tokenizer(content: dict[str, Any]) -> Path:
        path.write_text(json.dumps(content))
        files = tuple(
            dataclasses.replace(one, size=path.stat().st_size, sha256=hash_file(path))
            if one.path.endswith("/tokenizer.json")
            else one
            for one in draft.tokenizer.files
        )
        tokenizer = dataclasses.replace(draft.tokenizer, files=files, sha256=hash_entries(files))
        return write(dataclasses.replace(draft, tokenizer=tokenizer), tmp_path)

    content = json.loads((draft.root / "tokenizer/tokenizer.json").read_text())
    assert opening(engine_dir, write_tokenizer(content | {"decoder": None})).draft is not None
    vocabulary = content["model"]["vocab"]
    one, two = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    with pytest.raises(InvalidArgumentError, match=r"another tokenizer \(2 tokens differ\).*--draft int4$"):
        opening(engine_dir, write_tokenizer(content))
    path.write_text("{")
    with pytest.raises(EngineFileError, match="is damaged"):
        opening(engine_dir, tmp_path)


@pytest.mark.parametrize("name", ["max_seq_len", "max_batch_size", "tokens_per_block"])
def test_a_draft_with_other_limits_is_refused_with_a_command_that_builds_one_that_fits(
    engine_dir: Path, draft: Manifest, tmp_path: Path, name: str
) -> None:
    own = load_manifest(engine_dir).limits
    less = {name: getattr(own, name) // 2} | ({"max_input_len": 1} if name == "max_seq_len" else {})
    small = write(with_limits(draft, **less), tmp_path / "small")
    with pytest.raises(InvalidArgumentError, match=rf"has {name} {less[name]}, the engine") as caught:
        opening(engine_dir, small)
    words = str(caught.value).partition("rebuild it with: plansmith build ")[2].split()
    given = dict(zip(words[1::2], words[2::2], strict=True))
    assert given["--precision"] == "int8" and given["-o"] == str(small)
    names = ("max_batch_size", "max_num_tokens", "max_input_len", "max_seq_len", "tokens_per_block")
    mended = {key: int(given["--" + key.replace("_", "-")]) for key in names}
    assert opening(engine_dir, write(with_limits(draft, **mended), tmp_path / "mended")).draft is not None


def test_the_command_for_a_draft_of_its_own_is_one_that_works(engine_dir: Path, tiny_engine: GetPath) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"add one with: plansmith build .* --draft int4, give draft="
    ):
        opening(engine_dir, None, "model")
    smallest = tiny_engine("llama", "int4")
    with pytest.raises(InvalidArgumentError, match=r"for cpu; give draft=ENGINE_DIR .*'ngram'$"):
        opening(smallest, None, "model")
    manifest = load_manifest(smallest)
    with pytest.raises(InvalidArgumentError, match="no smaller"):  # so the message cannot ask for it
        plan_build(manifest.checkpoint.path, ["cpu"], precision="int4", draft="int4")


def test_the_options_of_a_draft_are_not_given_beside_it(engine_dir: Path) -> None:
    for option in ({"draft_mode": "ngram"}, {"draft_executor": None}):
        with pytest.raises(InvalidArgumentError, match="follows from speculation and draft"):
            opening(engine_dir, **option)


@pytest.mark.parametrize("speculation", ["off", "ngram"])
def test_a_draft_that_would_not_be_used_is_refused(
    engine_dir: Path, draft: Manifest, speculation: str
) -> None:
    with pytest.raises(InvalidArgumentError, match="which it does not use"):
        opening(engine_dir, draft.root, speculation)


@pytest.mark.parametrize(("asked", "wanted"), [({}, 0), ({"max_num_tokens": 7}, 7)])
def test_the_executors_take_memory_for_the_engines_steps_alone(
    engine_dir: Path,
    draft: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, int],
    wanted: int,
) -> None:
    given = []

    def create(plan: Path, *, max_num_tokens: int, **options: Any) -> Any:
        given.append(max_num_tokens)
        return cpu_executor(plan, max_num_tokens=max_num_tokens, **options)

    monkeypatch.setattr(opening_module, "cpu_executor", create)
    found = opening(engine_dir, draft.root, max_batch_size=4, enable_chunked_context=True, **asked)
    executor, options, _ = found.executors(CpuOptions(num_threads=1))
    executor.close()
    assert options.draft_executor is not None
    options.draft_executor.close()
    limit = load_manifest(engine_dir).limits.max_num_tokens
    assert given == [wanted or min(limit, 512)] * 2
