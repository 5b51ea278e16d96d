"""Engine.open with drafts: the engine's own, another engine's, n-grams; and drafts that do not fit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.builder.build import build_engine, plan_build
from plansmith.runtime import errors
from plansmith.runtime.engine import Engine, SamplingParams
from plansmith.runtime.manifest import hash_entries, load_manifest
from tiny_engines import LIMITS

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [[1, 5, 9, 33], list(range(10, 80)), [77], [8] * 9, [1, 2, 3] * 11]
GetPath = Callable[..., Path]
SHORT = {"max_seq_len": 64, "max_input_len": 64}


@pytest.fixture(scope="module")
def drafted(tiny_checkpoint: GetPath, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An fp32 engine with its int8 draft, which nearly always agrees, even with random weights."""
    out = tmp_path_factory.mktemp("drafted") / "engine"
    plan = plan_build(tiny_checkpoint("llama"), ["cpu"], precision="fp32", limits=dict(LIMITS), draft="int8")
    build_engine(plan, out)
    return out


def engine_of(checkpoint: Path, out: Path, **limits: int) -> Path:
    plan = plan_build(checkpoint, ["cpu"], precision="int8", limits={**LIMITS, **limits})
    build_engine(plan, out)
    return out


def run(path: Path, params: Any = GREEDY, **options: Any) -> tuple[list[tuple[int, ...]], Any]:
    with Engine.open(path, num_threads=1, adaptive_draft_len=False, **options) as engine:
        completions = engine.generate(PROMPTS, params)
        return [o.token_ids for c in completions for o in c.outputs], engine.stats()


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        dataclasses.replace(GREEDY, temperature=1.0, seed=3, n=2),
        dataclasses.replace(
            GREEDY, temperature=0.8, seed=4, top_p=0.9, repetition_penalty=1.2, logit_bias={5: 2.0}
        ),
    ],
)
def test_an_engines_own_draft_opens_by_itself_and_changes_no_token(
    drafted: Path, params: SamplingParams
) -> None:
    plain, without = run(drafted, params, speculation="off")
    tokens, stats = run(drafted, params)
    assert tokens == plain and without.num_draft_tokens == 0
    assert stats.num_accepted_draft_tokens > 0 and stats.acceptance_length > 1
    assert stats.iter < without.iter
    ngram, stats = run(drafted, params, speculation="ngram")
    assert ngram == plain and stats.draft_overhead < 1


def test_another_engine_drafts(drafted: Path, tiny_engine: GetPath) -> None:
    target = tiny_engine("llama", "fp32")
    plain, _ = run(target)
    tokens, stats = run(target, draft=tiny_engine("llama", "int8"), speculation="model", max_draft_len=3)
    assert tokens == plain and stats.num_accepted_draft_tokens > 0
    tokens, stats = run(drafted, draft=tiny_engine("llama", "int4"))  # before its own
    assert tokens == plain and stats.num_draft_tokens > 0


def test_a_model_is_wanted_and_there_is_none(tiny_engine: GetPath) -> None:
    with pytest.raises(
        errors.InvalidArgumentError, match=r"no draft for cpu; add one with: plansmith build .*--draft int4"
    ):
        Engine.open(tiny_engine("llama"), speculation="model")
    assert run(tiny_engine("llama"))[1].num_draft_tokens == 0


@pytest.mark.parametrize("speculation", ["off", "ngram"])
def test_a_draft_that_is_not_used_contradicts(tiny_engine: GetPath, speculation: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="which it does not use"):
        Engine.open(tiny_engine("llama"), draft=tiny_engine("llama", "int8"), speculation=speculation)


def test_an_unknown_speculation_is_refused(tiny_engine: GetPath) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="must be one of auto, off, ngram, model"):
        Engine.open(tiny_engine("llama"), speculation="medusa")


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"tokens_per_block": 16}, r"tokens_per_block 16, the engine has 8.*--tokens-per-block 8"),
        (
            {"max_seq_len": 64, "max_input_len": 64},
            r"max_seq_len 64, the engine needs 128.*--max-seq-len 128",
        ),
        ({"max_batch_size": 4}, r"max_batch_size 4, the engine needs 8.*--max-batch-size 8"),
        (
            {"max_batch_size": 4, "max_num_tokens": 4},
            r"max_batch_size 4, .*--max-batch-size 8 --max-num-tokens 32",
        ),
    ],
)
def test_a_draft_that_is_too_small_says_what_to_build(
    tiny_checkpoint: GetPath, tiny_engine: GetPath, tmp_path: Path, limits: dict[str, int], text: str
) -> None:
    draft = engine_of(tiny_checkpoint("llama"), tmp_path / "draft", **limits)
    with pytest.raises(errors.InvalidArgumentError, match=text) as caught:
        Engine.open(tiny_engine("llama"), draft=draft)
    command = str(caught.value).partition("rebuild it with: ")[2].split()
    assert command[:2] == ["plansmith", "build"] and str(tmp_path / "draft") in command
    if limits == {"max_batch_size": 4}:  # the engine may be narrowed instead
        Engine.open(tiny_engine("llama"), draft=draft, max_batch_size=4, num_threads=1).close()


def test_the_command_of_the_message_mends_it(
    tiny_checkpoint: GetPath, tiny_engine: GetPath, tmp_path: Path
) -> None:
    from plansmith.cli import main

    draft = engine_of(tiny_checkpoint("llama"), tmp_path / "draft", tokens_per_block=16, **SHORT)
    with pytest.raises(errors.InvalidArgumentError) as caught:
        Engine.open(tiny_engine("llama"), draft=draft)
    command = str(caught.value).partition("rebuild it with: plansmith ")[2].split()
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code in (0, None)
    assert run(tiny_engine("llama"), draft=draft)[1].num_accepted_draft_tokens > 0


def test_another_vocabulary_is_refused(drafted: Path, tmp_path: Path, tiny_checkpoint: GetPath) -> None:
    other = engine_of(tiny_checkpoint("qwen3"), tmp_path / "qwen3")
    if load_manifest(other).model.vocab_size == load_manifest(drafted).model.vocab_size:
        other = _with_vocab_size(other, 1000)
    with pytest.raises(
        errors.InvalidArgumentError, match=r"has vocab_size \d+, the engine in .* has \d+.*--draft int4"
    ):
        Engine.open(drafted, draft=other)


def _with_vocab_size(path: Path, size: int) -> Path:
    manifest = load_manifest(path)
    model = dataclasses.replace(manifest.model, vocab_size=size)
    (path / "manifest.json").write_text(dataclasses.replace(manifest, model=model).to_text())
    return path


def _with_tokenizer(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change tokenizer.json, and the manifest's hashes with it, as a build of such a checkpoint would have them."""
    from plansmith.builder.engine_dir import describe_file

    file = path / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    manifest = load_manifest(path)
    files = tuple(describe_file(path, path / one.path) for one in manifest.tokenizer.files)
    entry = dataclasses.replace(manifest.tokenizer, files=files, sha256=hash_entries(files))
    (path / "manifest.json").write_text(dataclasses.replace(manifest, tokenizer=entry).to_text())
    return path


def test_the_same_number_of_other_tokens_is_refused_by_name(drafted: Path, tmp_path: Path) -> None:
    def swap(content: dict[str, Any]) -> None:
        vocab = content["model"]["vocab"]
        a, b = sorted(vocab, key=vocab.__getitem__)[10:12]
        vocab[a], vocab[b] = vocab[b], vocab[a]

    other = shutil.copytree(drafted, tmp_path / "other")
    _with_tokenizer(other, swap)
    text = r"another tokenizer \(2 tokens differ\), in which .* is the id \d+, the engine .* has \d+.*--draft int4"
    with pytest.raises(errors.InvalidArgumentError, match=text):
        Engine.open(drafted, draft=other)


def test_a_tokenizer_that_differs_in_what_is_no_vocabulary_is_taken(drafted: Path, tmp_path: Path) -> None:
    other = shutil.copytree(drafted, tmp_path / "other")
    _with_tokenizer(other, lambda content: content["added_tokens"].reverse())
    Engine.open(drafted, draft=other, num_threads=1).close()


def test_a_damaged_draft_is_an_engine_file_error(drafted: Path, tmp_path: Path) -> None:
    other = shutil.copytree(drafted, tmp_path / "other")
    plan = other / "targets/cpu/draft/model.plan"
    plan.write_bytes(plan.read_bytes()[:-64])
    with pytest.raises(errors.EngineFileError, match=r"draft of target cpu .*--draft int8 --force"):
        Engine.open(other)
    plan.unlink()
    with pytest.raises(errors.EngineFileError, match="is missing"):
        Engine.open(other, speculation="off")
