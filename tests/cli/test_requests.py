"""generate and bench with all that a request can ask for: outputs, beams, grammars, adapters, drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from plansmith.builder.build import build_engine, plan_build
from plansmith.cli.bench import _sharing_rows
from plansmith.runtime.engine import Completion, Engine, SamplingParams
from plansmith.runtime.manifest import load_manifest
from tiny_engines import LIMITS

Run = Callable[..., Any]
PROMPT = "the quick fox"
FLAGS = ("--max-tokens", 8, "--threads", 1)
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def engine(engine_dir: Path) -> Any:
    with Engine.open(engine_dir, num_threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def drafted(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("drafted") / "engine"
    build_engine(plan_build(tiny_checkpoint("llama"), ["cpu"], limits=dict(LIMITS), draft="int8"), out)
    return out


def expected(engine: Engine, **params: Any) -> Completion:
    own = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **params})
    return engine.generate([engine.chat_ids(MESSAGES)], own, new_text=True)[0]


def generate(plansmith: Run, engine_dir: Path, *flags: Any) -> dict[str, Any]:
    result = plansmith("generate", engine_dir, PROMPT, "--json", *FLAGS, *flags)
    assert result.status == 0, result.err
    return dict(json.loads(result.out))


def test_several_answers(plansmith: Run, engine: Engine, engine_dir: Path) -> None:
    flags = ("--temperature", 1, "--seed", 3)
    fields = generate(plansmith, engine_dir, "-n", 3, *flags)
    wanted = expected(engine, n=3, temperature=1.0, seed=3)
    assert [one["token_ids"] for one in fields["outputs"]] == [list(o.token_ids) for o in wanted.outputs]
    assert fields["token_ids"] == fields["outputs"][0]["token_ids"] and fields["usage"] == wanted.usage
    best = generate(plansmith, engine_dir, "-n", 2, "--best-of", 5, *flags)
    sums = [one["cumulative_logprob"] for one in best["outputs"]]
    assert len(sums) == 2 and sums == sorted(sums, reverse=True)
    shown = plansmith("generate", engine_dir, PROMPT, "-n", 2, *flags, *FLAGS).out
    assert re.match(r"\[0\] .*\[1\] ", shown, re.DOTALL)


def test_beams(plansmith: Run, engine: Engine, engine_dir: Path) -> None:
    fields = generate(plansmith, engine_dir, "--beam-width", 3, "--length-penalty", 0.5)
    wanted = expected(engine, beam_width=3, length_penalty=0.5)
    assert [one["token_ids"] for one in fields["outputs"]] == [list(o.token_ids) for o in wanted.outputs]


def test_prompt_logprobs_and_salts(plansmith: Run, engine: Engine, engine_dir: Path) -> None:
    fields = generate(plansmith, engine_dir, "--prompt-logprobs", 1, "--cache-salt", "mine")
    ids = engine.chat_ids(MESSAGES)
    assert fields["prompt_logprobs"][0] is None
    assert [entry["token_id"] for entry in fields["prompt_logprobs"][1:]] == ids[1:]


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        (("--regex", "[ab]{3}"), "[ab]{3}"),
        (("--choice", "yes", "--choice", "no"), "yes|no"),
        (("--ebnf", 'root ::= "x" | "yy"'), "x|yy"),
        (("--json-schema", '{"enum": ["left", "right"]}'), '"left"|"right"'),
    ],
)
def test_the_text_is_what_was_asked_for(
    plansmith: Run, engine_dir: Path, flags: tuple[str, ...], pattern: str
) -> None:
    fields = generate(plansmith, engine_dir, *flags, "--max-tokens", 30)
    assert re.fullmatch(pattern, fields["text"]) and fields["finish_reason"] == "stop"


def test_a_schema_from_a_file_and_of_a_line(plansmith: Run, engine_dir: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [true, null]}')
    fields = generate(plansmith, engine_dir, "--json-schema", schema, "--max-tokens", 30)
    assert json.loads(fields["text"]) in (True, None)
    source = tmp_path / "in.jsonl"
    lines = [
        {"prompt": PROMPT, "guided": {"choice": ["one", "two"]}, "max_tokens": 20},
        {"prompt": PROMPT, "n": 2, "temperature": 1.0, "retention": [{"start": 0, "end": 2, "priority": 90}]},
        {"prompt": PROMPT, "guided": {"regex": "("}},
        {"prompt": PROMPT, "guided": {"grammar": "a"}},
        {"prompt": PROMPT, "logits_processor": "f"},
        {"prompt": PROMPT, "best_of": 2},
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = plansmith("generate", engine_dir, "--input", source, "--keep-going", *FLAGS)
    answers = [json.loads(line) for line in result.out.splitlines()]
    assert answers[0]["text"] in ("one", "two") and len(answers[1]["outputs"]) == 2
    texts = [answer["error"]["message"] for answer in answers[2:]]
    assert "guided" in texts[0] and "grammar" in texts[1] and "unknown field" in texts[2]
    assert "best_of is 2" in texts[3]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--regex", "a", "--choice", "b"), "--regex and --choice say different things"),
        (("--json-schema", "none.json"), "--json-schema 'none.json' is no file"),
        (("--regex", "("), "guided"),
        (("--beam-width", 2, "-n", 2), "beam_width 2 does not go with n"),
        (("--best-of", 2), "all outputs are the same"),
        (("--lora", "x"), "--lora is 'x', it must be NAME=DIR"),
        (("--lora", "x=none"), "does not exist"),
        (("--adapter", "x"), "there is no adapter 'x'"),
        (("--speculation", "model"), "--draft int4"),
        (("--speculation", "x"), "must be one of auto, off, ngram, model"),
        (("--draft", "none"), "none does not exist"),
        (("--max-draft-len", 100, "--speculation", "ngram"), "max_draft_len is 100"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    plansmith: Run, engine_dir: Path, flags: tuple[Any, ...], text: str
) -> None:
    result = plansmith("generate", engine_dir, PROMPT, *flags)
    assert result.status == 1 and text in result.err and "Traceback" not in result.err


@pytest.mark.parametrize("flags", [("-n", 2), ("--beam-width", 2)])
def test_a_conversation_has_one_answer(plansmith: Run, engine_dir: Path, flags: tuple[Any, ...]) -> None:
    result = plansmith("generate", engine_dir, "--chat", *flags)
    assert result.status == 1 and "--chat goes on from one answer" in result.err


def test_an_adapter(plansmith: Run, engine: Engine, engine_dir: Path, tmp_path: Path) -> None:
    model = load_manifest(engine_dir).model
    weights = {}
    random = np.random.default_rng(0)
    for layer in range(model.num_layers):
        head = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        shapes = {"lora_A": (4, model.hidden_size), "lora_B": (model.num_heads * model.head_dim, 4)}
        for name, shape in shapes.items():
            weights[f"{head}.{name}.weight"] = random.standard_normal(shape).astype(np.float32)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(weights, tmp_path / "a" / "adapter_model.safetensors")
    lora = ("--lora", f"a={tmp_path / 'a'}")
    plain = generate(plansmith, engine_dir, *lora)
    assert plain["token_ids"] == list(expected(engine).token_ids)
    assert generate(plansmith, engine_dir, *lora, "--adapter", "a")["token_ids"] != plain["token_ids"]


def test_drafts_change_no_text_and_the_summary_tells_of_them(
    plansmith: Run, drafted: Path, engine_dir: Path, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True}) + "\n")
    flags = ("generate", drafted, "--input", source, "--threads", 1)
    plain, own = plansmith(*flags, "--speculation", "off"), plansmith(*flags)
    assert own.out == plain.out
    assert "draft tokens accepted" in own.err and "draft" not in plain.err
    other = plansmith("generate", engine_dir, "--input", source, "--threads", 1, "--draft", drafted)
    assert other.out == plain.out and "draft tokens accepted" in other.err


def test_bench_tells_reuse_and_drafts(plansmith: Run, drafted: Path, tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps([{"prompt_ids": list(range(3, 40)), "output_len": 20}] * 4))
    flags = ("bench", drafted, "--workload", path, "--threads", 1)
    fields = json.loads(plansmith(*flags, "--repeat", 2, "--json").out)
    assert fields["failures"] == []
    # Of the run's own four requests: the first finds nothing that the warm-up or the other run left.
    assert 3 * 32 <= fields["kv"]["reused_tokens"] <= 3 * 36
    # How many, the machine's speed decides: on a busy one drafting may not pay.
    assert 0 <= fields["speculation"]["accepted_tokens"] <= fields["speculation"]["draft_tokens"]
    assert "prefix reuse" in plansmith(*flags).out
    off = json.loads(plansmith(*flags, "--no-reuse", "--speculation", "off", "--json").out)
    assert off["kv"]["reused_tokens"] == 0 and off["speculation"]["draft_tokens"] == 0
    assert off["token_ids"] == fields["token_ids"]


def test_bench_tells_what_became_of_drafts() -> None:
    spec = {"draft_tokens": 10, "accepted_tokens": 4, "acceptance_rate": 0.4}
    spec |= {"acceptance_length": 1.8, "overhead": 0.25}
    rows = dict(_sharing_rows({"kv": {"reused_tokens": 0}, "speculation": spec}))
    assert list(rows) == ["speculation"]
    assert rows["speculation"].startswith("4 of 10 draft tokens accepted (40.0%), 1.80 tokens a verification")


def test_inspect_shows_the_draft(plansmith: Run, drafted: Path, engine_dir: Path) -> None:
    assert "int8, drafts for this one" in plansmith("inspect", drafted).out
    manifest = json.loads(plansmith("inspect", drafted, "--json").out)["manifest"]
    assert manifest["draft"]["targets"]["cpu"]["files"][0]["path"] == "targets/cpu/draft/model.plan"
    assert "draft" not in json.loads(plansmith("inspect", engine_dir, "--json").out)["manifest"]


def test_build_with_a_draft_by_trtllm_builds_flags(
    plansmith: Run, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / "engine"
    result = plansmith(
        *("build", "--checkpoint_dir", tiny_checkpoint("llama"), "--output_dir", out, "--draft", "int4"),
        *("--max_batch_size", 4, "--max_num_tokens", 32, "--max_seq_len", 64, "--max_beam_width", 4),
        *("--speculative_decoding_mode", "draft_tokens_external", "--max_draft_len", 8),
        *("--lora_plugin", "auto", "--max_lora_rank", 8, "--gather_generation_logits"),
    )
    assert result.status == 0, result.err
    assert "cpu/draft" in result.out and "draft int4" in result.out
    for name in ("--speculative_decoding_mode draft_tokens_external", "--max_draft_len 8"):
        assert f"note: {name} is ignored: any engine " in result.err
    assert "note: --lora_plugin auto is ignored: the cpu target takes LoRA adapters" in result.err
    assert "for a GPU target merge them into the checkpoint" in result.err
    manifest = load_manifest(out)
    assert manifest.limits.max_beam_width == 4
    assert manifest.draft is not None and manifest.draft.precision == "int4"
    dry = json.loads(
        plansmith("build", tiny_checkpoint("llama"), "-o", out, "--draft", "int8", "--dry-run", "--json").out
    )
    assert dry["draft"] == "int8"
