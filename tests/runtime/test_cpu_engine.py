"""Engine.open on built engine directories: the same tokens as transformers, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.runtime import errors, manifest, opening
from plansmith.runtime.async_engine import AsyncEngine
from plansmith.runtime.engine import Engine, SamplingParams
from plansmith.runtime.executor import Executor
from plansmith.runtime.tokenizer import Tokenizer

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [[1, 5, 9, 33], list(range(10, 80)), [77], [8] * 9, [1, 2, 3] * 11]
GetPath = Callable[..., Path]


def transformers_greedy(checkpoint: Path, prompt: list[int]) -> list[int]:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=GREEDY.max_tokens,
        min_new_tokens=GREEDY.max_tokens,
        do_sample=False,
    )
    return [int(token) for token in out[0, len(prompt) :]]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_batch_has_the_greedy_tokens_of_transformers(
    family: str, tiny_checkpoint: GetPath, tiny_engine: GetPath
) -> None:
    with Engine.open(tiny_engine(family), num_threads=2, max_num_tokens=16) as engine:
        # min_new_tokens forbids transformers the end id; so must we.
        params = dataclasses.replace(GREEDY, logit_bias={2: float("-inf")})
        completions = engine.generate(PROMPTS, params)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert list(completion.token_ids) == transformers_greedy(tiny_checkpoint(family), prompt)


@pytest.mark.parametrize("error", [errors.EngineFileError, RuntimeError])
def test_a_tokenizer_that_cannot_be_read_leaves_no_plan_open(
    error: type[Exception], tiny_engine: GetPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Executor] = []

    def fail(directory: Path) -> None:
        raise error("no vocabulary")

    monkeypatch.setattr(Tokenizer, "from_directory", fail)
    close = Executor.close
    monkeypatch.setattr(Executor, "close", lambda one: closed.append(one) or close(one))
    with pytest.raises(error, match="no vocabulary"):
        Engine.open(tiny_engine("llama"), num_threads=1)
    assert len(closed) == 1


def test_open_brings_the_tokenizer_the_template_and_the_end_ids(
    tiny_checkpoint: GetPath, tiny_engine: GetPath
) -> None:
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(tiny_checkpoint("llama"))
    messages = [{"role": "user", "content": "the quick fox"}]
    with Engine.open(tiny_engine("llama"), num_threads=1) as engine:
        assert engine.eos_token_ids == (2,)
        assert engine.manifest is not None and engine.manifest.limits.max_seq_len == 128
        ids = engine.chat_ids(messages)
        assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        text = "".join(d.text for d in engine.stream(ids, GREEDY, new_text=True))
        (completion,) = engine.generate([ids], GREEDY, new_text=True)
        assert text == completion.text == theirs.decode(completion.token_ids, skip_special_tokens=True)


def test_the_async_engine_gives_the_same(tiny_engine: GetPath) -> None:
    async def main() -> list[Any]:
        async with AsyncEngine.open(tiny_engine("llama"), num_threads=1) as engine:
            return await engine.generate_all(PROMPTS, GREEDY)

    with Engine.open(tiny_engine("llama"), num_threads=1) as engine:
        expected = [c.token_ids for c in engine.generate(PROMPTS, GREEDY)]
    assert [c.token_ids for c in asyncio.run(main())] == expected


def test_options_reach_the_engine(tiny_engine: GetPath) -> None:
    with Engine.open(
        tiny_engine("llama"), num_threads=1, max_batch_size=3, max_num_tokens=7, kv_cache_bytes=1 << 20
    ) as engine:
        assert (engine.model_info.max_batch_size, engine.model_info.max_num_tokens) == (3, 7)
        assert 0 < engine.stats().kv_cache_bytes <= 1 << 20
    with pytest.raises(errors.InvalidArgumentError, match="scheduler_policy"):
        Engine.open(tiny_engine("llama"), scheduler_policy="fair")
    with pytest.raises((errors.UnsupportedError, errors.InvalidArgumentError), match="sse9"):
        Engine.open(tiny_engine("llama"), isa="sse9")


@pytest.mark.parametrize("how", ["alone", "ngram", "int8"])
def test_steps_of_fewer_tokens_than_requests_carry_as_many(tiny_engine: GetPath, how: str) -> None:
    drafts = {"alone": {}, "ngram": {"speculation": "ngram", "ngram_min": 1, "max_draft_len": 1}}
    asked: dict[str, Any] = {"max_batch_size": 4, "max_num_tokens": 2}
    asked |= drafts[how] if how in drafts else {"draft": tiny_engine("llama", how), "max_draft_len": 1}
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    with Engine.open(tiny_engine("llama"), num_threads=2, **asked) as engine:
        assert (engine.model_info.max_batch_size, engine.model_info.max_num_tokens) == (2, 2)
        few = [output.token_ids for output in engine.generate(PROMPTS, params)]
    with Engine.open(tiny_engine("llama"), num_threads=2) as engine:
        assert few == [output.token_ids for output in engine.generate(PROMPTS, params)]


def test_no_draft_fits_steps_of_one_token(tiny_engine: GetPath) -> None:
    with pytest.raises(
        errors.InvalidArgumentError, match="is 1; turn speculation off, or give --max-num-tokens 2"
    ):
        Engine.open(tiny_engine("llama"), speculation="ngram", max_batch_size=1, max_num_tokens=1)


@pytest.fixture
def copy(tiny_engine: GetPath, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_engine("llama"), tmp_path / "engine"))


def test_an_engine_of_another_version_is_refused_by_its_number(copy: Path) -> None:
    path = copy / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "schema_version": 99}))
    with pytest.raises(errors.EngineFileError, match=r"schema version 99.*upgrade"):
        Engine.open(copy)


def test_a_directory_that_is_no_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.EngineFileError, match=r"manifest\.json"):
        Engine.open(tmp_path)


def test_a_changed_plan_is_found_by_its_hash(copy: Path) -> None:
    plan = copy / "targets" / "cpu" / "model.plan"
    data = bytearray(plan.read_bytes())
    data[-1] ^= 1
    plan.write_bytes(data)
    with pytest.raises(errors.EngineFileError, match="sha256"):
        Engine.open(copy, verify_hashes=True)


def test_a_plan_that_was_cut_short_is_refused_without_hashes(copy: Path) -> None:
    plan = copy / "targets" / "cpu" / "model.plan"
    plan.write_bytes(plan.read_bytes()[:-64])
    with pytest.raises(errors.EngineFileError, match="cut short"):
        Engine.open(copy)


def test_a_target_that_is_not_there_says_how_to_add_it(tiny_engine: GetPath) -> None:
    with pytest.raises(
        errors.EngineFileError,
        match=r"no target 'sm89', only cpu; add it with: plansmith build .*--target sm89",
    ):
        Engine.open(tiny_engine("llama"), "sm89")


def test_a_target_of_another_compiler_says_what_runs(
    tiny_engine: GetPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_gpu_target(path: Any) -> manifest.Manifest:
        real = manifest.load_manifest(path)
        return dataclasses.replace(real, targets={**real.targets, "sm89": real.targets["cpu"]})

    monkeypatch.setattr(opening, "load_manifest", with_gpu_target)
    with pytest.raises(
        errors.Error, match=r"made by 'plansmith-cpu', this version runs plans of tensorrt_rtx"
    ):
        Engine.open(tiny_engine("llama"), "sm89")


def test_the_plan_of_another_model_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_other_vocabulary(path: Any) -> manifest.Manifest:
        real = manifest.load_manifest(path)
        return dataclasses.replace(real, model=dataclasses.replace(real.model, vocab_size=1000))

    monkeypatch.setattr(opening, "load_manifest", with_other_vocabulary)
    with pytest.raises(errors.EngineFileError, match=r"vocab_size 320, manifest\.json says 1000"):
        Engine.open(copy)
