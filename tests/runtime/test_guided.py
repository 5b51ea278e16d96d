"""Structured output on tiny engines: random models, whose outputs are in the language only because of the masks."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")  # an optional extra

import toy_tokenizers
from plansmith.runtime import engine_base, errors, guided, guided_compiler
from plansmith.runtime._native import native
from plansmith.runtime.async_engine import AsyncEngine
from plansmith.runtime.engine import Engine, SamplingParams
from plansmith.runtime.guided import GuidedParams, guide_of
from plansmith.runtime.tokenizer import Tokenizer
from random_schemas import random_schema, violation

LIMITS = {
    "max_batch_size": 16,
    "max_num_tokens": 128,
    "max_input_len": 96,
    "max_seq_len": 256,
    "tokens_per_block": 8,
}
GetPath = Callable[..., Path]


@pytest.fixture(scope="module")
def engine_dir(tiny_checkpoint: GetPath, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from plansmith.builder.build import build_engine, plan_build

    out = tmp_path_factory.mktemp("guided") / "engine"
    build_engine(plan_build(tiny_checkpoint("llama"), ["cpu"], precision="fp32", limits=dict(LIMITS)), out)
    return out


@pytest.fixture(scope="module")
def engine(engine_dir: Path) -> Iterator[Engine]:
    with Engine.open(engine_dir, num_threads=1) as opened:
        yield opened
    assert guided._live == {}  # every guide of every request was closed


def text_of(engine: Engine, params: GuidedParams, **sampling: Any) -> str:
    sampling = {"max_tokens": 150, "seed": 1, **sampling}
    (completion,) = engine.generate(["the quick"], SamplingParams(guided=params, **sampling), new_text=True)
    return completion.text


# ---------------------------------------------------------------- outputs are in the language


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
@pytest.mark.parametrize(
    "regex",
    [
        r"[0-9]{4}-[0-9]{2}",
        r"(yes|no)\.",
        r"a+b?c{2,5}",
        r"[^a-z]{3}",
        "größe|Maß",
        r"^\{ [a-z.]{1,8} \}$",
        "/a\\/b/",
    ],
)
def test_a_regex_is_matched_as_a_whole(engine: Engine, regex: str, temperature: float) -> None:
    for seed in range(4):
        text = text_of(engine, GuidedParams(regex=regex), temperature=temperature, seed=seed)
        assert re.fullmatch(regex, text) or len(text) > 100, text


def test_a_choice_is_one_of_its_texts(engine: Engine) -> None:
    choice = ["yes", "no", "yes, but", "größe 😀", "a.b*c|d/(e)", 'say "hi"\n', "\\d", "#&-~"]
    texts = {text_of(engine, GuidedParams(choice=choice), seed=seed, temperature=4.0) for seed in range(60)}
    assert texts <= set(choice) and len(texts) > 3
    for only in choice:
        assert text_of(engine, GuidedParams(choice=[only])) == only


EBNF = r"""
# a small language, as xgrammar and llama.cpp have it
root ::= expr
expr ::= term (op term){0,2}
op   ::= " + "
       | " * "
term ::= number | "(" term ")"
number ::= [1-9] [0-9]{0,2}
"""
LARK = """
start: expr
expr: term (op term){0,2}
op: " + " | " * "
term: NUMBER | "(" term ")"
NUMBER: /[1-9][0-9]{0,2}/
"""


@pytest.mark.parametrize("grammar", [EBNF, LARK])
def test_ebnf_and_lark(engine: Engine, grammar: str) -> None:
    seen = set()
    for seed in range(12):
        text = text_of(engine, GuidedParams(ebnf=grammar), seed=seed)
        seen.add(text)
        stripped = re.sub(r"[()]", "", text)
        assert re.fullmatch(r"[1-9][0-9]{0,2}( [+*] [1-9][0-9]{0,2}){0,2}", stripped) or text.startswith("((")
    assert len(seen) > 6


def test_json_is_an_object_or_an_array(engine: Engine) -> None:
    ended = 0
    for seed in range(30):
        params = SamplingParams(
            max_tokens=200, seed=seed, temperature=0.7, guided=GuidedParams(json=True, whitespace_pattern="")
        )
        (completion,) = engine.generate(["x"], params, new_text=True)
        if completion.token_ids[-1] in engine.eos_token_ids:
            ended += 1
            assert isinstance(json.loads(completion.text), (dict, list))
    assert ended > 3


def test_a_thousand_random_schemas_give_a_thousand_outputs_that_fit(engine: Engine) -> None:
    rng = random.Random(0)
    schemas = [random_schema(rng) for _ in range(1000)]
    params = [
        SamplingParams(
            max_tokens=220,
            seed=i,
            temperature=rng.choice([0.0, 1.0]),
            guided=GuidedParams(json_schema=schema, whitespace_pattern="" if i % 2 else "[ \n]{0,2}"),
        )
        for i, schema in enumerate(schemas)
    ]
    completions = engine.generate([[5, 6, 7]] * len(params), params, new_text=True)
    for schema, completion in zip(schemas, completions, strict=True):
        assert completion.token_ids[-1] in engine.eos_token_ids, (schema, completion.text)
        assert violation(json.loads(completion.text), schema) is None, (schema, completion.text)


# ---------------------------------------------------------------- together with the rest of the engine


def test_drafts_change_nothing(engine: Engine, engine_dir: Path) -> None:
    schema = {"type": "array", "items": {"enum": ["abc", "abd", "xyz"]}, "minItems": 12, "maxItems": 14}
    one_of = GuidedParams(json_schema=schema, whitespace_pattern="")
    params = [
        SamplingParams(max_tokens=150, seed=i, temperature=t, guided=one_of, n=1 + i % 2)
        for i, t in enumerate([0.0, 0.0, 1.0, 1.0, 0.7])
    ]
    prompts = [[5, 6, 7 + i] for i in range(len(params))]
    plain = engine.generate(prompts, params)
    with Engine.open(
        engine_dir, num_threads=1, ngram_min=1, speculation="ngram", max_draft_len=4, adaptive_draft_len=False
    ) as drafted:
        outputs = drafted.generate(prompts, params)
        assert drafted.stats().num_accepted_draft_tokens > 20
    for a, b in zip(plain, outputs, strict=True):
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]
        assert all(violation(json.loads(o.text), schema) is None for o in b.outputs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_that_a_request_brings_obey_the_grammar(engine: Engine, temperature: float) -> None:
    guide = GuidedParams(regex="[a-c]{60,80}")
    params = SamplingParams(guided=guide, max_tokens=90, temperature=temperature, seed=3)
    (want,) = engine.generate(["the quick"], params, new_text=True)
    for wrong_at in (len(want.token_ids), 20, 0):
        brought = [*want.token_ids]
        brought[wrong_at : wrong_at + 1] = [0] * (wrong_at < len(brought))  # not in the language
        own = dataclasses.replace(params, draft_token_ids=brought)
        (done,) = engine.generate(["the quick"], own, new_text=True)
        assert done.token_ids == want.token_ids and done.text == want.text
        # 64 masks a step; what the grammar forbids is not even proposed.
        assert done.stats.num_accepted_draft_tokens == done.stats.num_draft_tokens
        assert done.stats.num_draft_tokens == min(len(want.token_ids) - 1, wrong_at)


def test_each_of_n_outputs_has_a_guide_of_its_own(engine: Engine) -> None:
    params = SamplingParams(
        n=6, seed=3, max_tokens=30, temperature=2.0, guided=GuidedParams(regex="[ab]{3,8}c")
    )
    (completion,) = engine.generate(["x"], params, new_text=True)
    texts = [output.text for output in completion.outputs]
    assert len(set(texts)) > 1 and all(re.fullmatch("[ab]{3,8}c", text) for text in texts)


def test_stop_strings_end_the_output_earlier(engine: Engine) -> None:
    params = GuidedParams(regex="[ab]{20}")
    whole = text_of(engine, params)
    cut = text_of(engine, params, stop=["b"])
    assert cut == whole.split("b")[0]


def test_min_tokens_behind_the_end_of_the_grammar_is_an_error(engine: Engine) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        text_of(engine, GuidedParams(choice=["a"]), min_tokens=5)
    assert text_of(engine, GuidedParams(regex="a{3,9}"), min_tokens=1).startswith("aaa")


def test_ids_that_end_a_request_end_the_grammar(engine: Engine) -> None:
    assert engine.tokenizer is not None
    newline = engine.tokenizer.encode("\n", add_special_tokens=False)[-1]
    params = SamplingParams(
        max_tokens=40,
        temperature=0.0,
        stop_token_ids=[newline],
        guided=GuidedParams(regex="[ab]{4}"),
        logit_bias={engine.eos_token_ids[0]: -100.0},
    )
    (completion,) = engine.generate(["x"], params, new_text=True)
    assert completion.token_ids[-1] == newline and re.fullmatch("[ab]{4}", completion.text.rstrip("\n"))


def test_a_cancelled_request_closes_its_guide(engine: Engine) -> None:
    handle = engine.submit("x", SamplingParams(max_tokens=200, guided=GuidedParams(regex="[a-z]{200}")))
    handle.cancel()
    handle.result()
    deadline = time.monotonic() + 5
    while guided._live and time.monotonic() < deadline:
        time.sleep(0.01)
    assert guided._live == {}


def test_a_task_that_is_cancelled_while_its_grammar_is_compiled_leaves_no_guide(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    guide_of = engine_base.guide_of

    def slow(*args: Any) -> Any:
        begun.set()
        go_on.wait(10)
        return guide_of(*args)

    async def run() -> None:
        async with AsyncEngine.open(engine_dir, num_threads=1) as engine:
            task = asyncio.create_task(engine.generate("x", SamplingParams(guided=GuidedParams(regex="a"))))
            await asyncio.to_thread(begun.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go_on.set()
            for _ in range(1000):
                await asyncio.sleep(0.005)
                if made and not guided._live:
                    return

    made: list[Any] = []
    keep = guided._keep
    monkeypatch.setattr(guided, "_keep", lambda guide: made.append(guide) or keep(guide))
    monkeypatch.setattr(engine_base, "guide_of", slow)
    asyncio.run(run())
    assert made and guided._live == {}


def test_a_guide_that_breaks_fails_its_request_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_mask = guided._Guide.fill_mask

    def broken(self: Any, ahead: Any, mask: Any) -> None:
        if threading.current_thread() is not threading.main_thread() and self._end_ids == {2, 99}:
            raise KeyboardInterrupt("no more masks")
        fill_mask(self, ahead, mask)

    monkeypatch.setattr(guided._Guide, "fill_mask", broken)
    other = engine.submit("x", SamplingParams(max_tokens=60, guided=GuidedParams(regex="[a-z]{20}")))
    bad = engine.submit("x", SamplingParams(stop_token_ids=[99], guided=GuidedParams(regex="[a-z]{20}")))
    with pytest.raises(errors.ExecutorError, match="no more masks"):
        bad.result()
    assert len(other.result().text) == 20


# ---------------------------------------------------------------- the guide itself


@pytest.fixture(scope="module", params=["byte_level", "llama", "gemma"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(toy_tokenizers.MAKERS[request.param](), config={"eos_token": "</s>"})


class Calls:
    """A guide's functions as the core calls them."""

    def __init__(
        self, params: GuidedParams, tokenizer: Tokenizer, vocab_size: int, eos_ids: list[int]
    ) -> None:
        self.ffi = native().ffi
        self.handle = guide_of(params, tokenizer, vocab_size, eos_ids)
        self.table = self.handle.struct
        self.vocab_size = vocab_size

    def mask(self, *ahead: int) -> set[int]:
        num_words = (self.vocab_size + 31) // 32
        mask = self.ffi.new("uint32_t[]", [0xDEADBEEF] * (num_words + 1))
        drafts = self.ffi.new("int32_t[]", list(ahead)) if ahead else self.ffi.NULL
        assert self.table.fill_mask(self.table.self, drafts, len(ahead), mask) == 0
        assert mask[num_words] == 0xDEADBEEF
        return {i for i in range(num_words * 32) if mask[i // 32] >> i % 32 & 1}

    def accept(self, *tokens: int) -> int:
        return int(self.table.accept(self.table.self, self.ffi.new("int32_t[]", list(tokens)), len(tokens)))

    def error(self) -> str:
        return native().text(self.table.last_error(self.table.self))


@pytest.mark.parametrize("extra_rows", [-1, 0, 5, 100])
def test_masks_are_the_continuations_of_the_language(tokenizer: Tokenizer, extra_rows: int) -> None:
    """Against every token's text: allowed exactly when what it gives can still become `[ab]{3}c?`."""
    vocab_size = tokenizer.vocab_size + extra_rows
    (eos,) = tokenizer.eos_token_ids
    calls = Calls(GuidedParams(regex="[ab]{3}c?"), tokenizer, vocab_size, [eos])
    texts = {}
    for token in range(min(vocab_size, tokenizer.vocab_size)):
        name = tokenizer._backend.id_to_token(token)
        texts[token] = chr(int(name[3:5], 16)) if re.fullmatch("<0x[0-7].>", name) else name
    words = [a + b + c + d for a in "ab" for b in "ab" for c in "ab" for d in ("", "c")]
    rng = random.Random(1)
    for _ in range(10):
        text, tokens = "", []
        while True:
            wanted = {t for t, own in texts.items() if any(w.startswith(text + own) for w in words)}
            wanted |= {eos} if text in words else set()
            assert calls.mask(*tokens) == wanted
            token = rng.choice(sorted(wanted))
            if token == eos:
                assert calls.mask(*tokens, eos) == set()
                break
            tokens.append(token)
            text += texts[token]
    # The state has not moved: those were drafts. Accepting is for good, and a draft may begin alike or not.
    a, b = (next(t for t, own in texts.items() if own == c) for c in "ab")
    first = calls.mask()
    assert calls.mask(a, b) and calls.accept(a) == 0
    assert calls.mask(b) == calls.mask(a) and calls.mask(b, b, b) == set()
    assert calls.accept(b, a) == 0 and eos in calls.mask() and calls.mask() != first
    assert calls.accept(a) != 0 and str(a) in calls.error()
    calls.handle.close()
    calls.handle.close()
    assert (
        calls.table.fill_mask(calls.table.self, native().ffi.NULL, 0, native().ffi.new("uint32_t[100]")) != 0
    )


def test_a_clone_goes_its_own_way(tokenizer: Tokenizer) -> None:
    calls = Calls(GuidedParams(choice=["ab", "ba"]), tokenizer, 512, list(tokenizer.eos_token_ids))
    out = calls.ffi.new("void**")
    assert calls.table.clone(calls.table.self, out) == 0
    start = calls.mask()
    assert calls.accept(next(iter(start))) == 0
    calls.table.self, original = out[0], calls.table.self
    assert calls.mask() == start
    calls.table.close(calls.table.self)
    calls.table.self = original
    assert calls.mask() != start
    calls.handle.close()


def test_several_end_ids_are_all_allowed_at_the_end_and_no_others(tokenizer: Tokenizer) -> None:
    (eos,) = tokenizer.eos_token_ids
    for end_ids in ([eos], [eos, 500], [500, 501]):
        calls = Calls(GuidedParams(choice=["a"]), tokenizer, 512, end_ids)
        for token in sorted(calls.mask()):
            assert token not in end_ids
            after = calls.mask(token)
            assert after == set(end_ids)
        calls.handle.close()


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GuidedParams(), "exactly one"),
        (lambda: GuidedParams(regex="a", json=True), "regex and json"),
        (lambda: GuidedParams(regex=""), "regex"),
        (lambda: GuidedParams(choice=[]), "choice"),
        (lambda: GuidedParams(choice="abc"), "choice"),
        (lambda: GuidedParams(choice=["a", ""]), "non-empty"),
        (lambda: GuidedParams(json="yes"), "True or False"),  # type: ignore[arg-type]
        (lambda: GuidedParams(json_schema=[1]), "list"),  # type: ignore[arg-type]
        (lambda: GuidedParams(regex="a", whitespace_pattern=" "), "whitespace_pattern"),
    ],
)
def test_contradictory_parameters(make: Callable[[], GuidedParams], words: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=words):
        make()


CIRCLE: dict[str, Any] = {"type": "object"}
CIRCLE["properties"] = {"a": CIRCLE}


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (GuidedParams(json_schema='{"type":'), "not JSON"),
        (GuidedParams(json_schema="[1]"), "no schema"),
        (GuidedParams(json_schema=False), "no schema"),
        (GuidedParams(json_schema={"type": "strin"}), "strin"),
        (GuidedParams(json_schema={"not": {"type": "string"}}), "not"),
        (GuidedParams(json_schema={"$ref": "#/nowhere"}), "nowhere"),
        (GuidedParams(json_schema={"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (GuidedParams(json_schema={"a": {1, 2}}), "JSON"),
        (GuidedParams(json_schema=CIRCLE), "JSON"),
        (GuidedParams(json_schema={"type": "integer", "multipleOf": 0}), "multipleOf"),
        (GuidedParams(regex="(a"), "unclosed"),
        (GuidedParams(regex=r"(a)\1"), "backreference"),
        (GuidedParams(regex=r"[^\x00-\U0010FFFF]"), "no text"),
        (GuidedParams(ebnf="root ::= foo"), "foo"),
        (GuidedParams(ebnf="just text"), "ebnf"),
        (GuidedParams(ebnf='main ::= "a"'), "root"),
        (GuidedParams(ebnf="start: FOO"), "FOO"),
    ],
)
def test_what_cannot_be_compiled_is_an_error_at_submission(
    engine: Engine, params: GuidedParams, words: str
) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=words):
        engine.submit("x", SamplingParams(guided=params))
    assert guided._live == {}


def _nested_schema(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def _doubling(keyword: str, depth: int) -> dict[str, Any]:
    defs: dict[str, Any] = {
        f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
        for i in range(depth)
    }
    defs[f"d{depth}"] = {"type": "string"}
    return {"$defs": defs, "$ref": "#/$defs/d0"}


BOMBS = {
    "huge": GuidedParams(json_schema={"enum": [f"value {i}" for i in range(30_000)]}),
    "deep": GuidedParams(json_schema=_nested_schema(100_000)),
    "deep, as objects": GuidedParams(json_schema=json.loads(_nested_schema(300))),
    "deep in parentheses": GuidedParams(regex="(" * 100_000 + ")" * 100_000),
    "deep in Lark": GuidedParams(ebnf="start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "deep in EBNF": GuidedParams(ebnf="root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "repetition of repetitions": GuidedParams(regex="((a{1,1000}){1,1000}){1,1000}"),
    "states that double": GuidedParams(regex="(a|b)*a(a|b){40}"),
    "too many states at a token": GuidedParams(regex="(a|b)*c{100000}"),
    "allOf that doubles": GuidedParams(json_schema=_doubling("allOf", 40)),
    "anyOf that doubles": GuidedParams(json_schema=_doubling("anyOf", 40)),
    "products of anyOf": GuidedParams(
        json_schema={
            "allOf": [
                {"anyOf": [{"properties": {f"a{i}{j}": {"type": "string"}}} for j in range(4)]}
                for i in range(12)
            ]
        }
    ),
    "multipleOf a prime": GuidedParams(json_schema={"type": "integer", "multipleOf": 999_999_937}),
    "multipleOf in Lark": GuidedParams(ebnf='start: %json {"type": "integer", "multipleOf": 999999937}'),
    "many items": GuidedParams(json_schema={"type": "array", "minItems": 10**9}),
    "a long string": GuidedParams(json_schema={"type": "string", "minLength": 10**8}),
    "rules that double": GuidedParams(
        ebnf="root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60 ::= "a"\n'
    ),
    "terminals that double": GuidedParams(
        ebnf="start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(60)) + 'T60: "a"\n'
    ),
    "a terminal of itself": GuidedParams(ebnf='start: T\nT: T "a" | "b"'),
    "endless ambiguity": GuidedParams(ebnf='start: start start | "a" | ""'),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_or_harmless_and_the_others_go_on(engine: Engine, name: str) -> None:
    other = engine.submit("x", SamplingParams(max_tokens=200, guided=GuidedParams(regex="[a-z]{100}")))
    begin = time.monotonic()
    try:
        bomb = engine.submit("x", SamplingParams(max_tokens=30, guided=BOMBS[name]))
    except errors.InvalidArgumentError:
        pass
    else:
        try:
            bomb.result()
        except errors.ExecutorError as error:  # llguidance's limit for one step
            assert "guide" in str(error) and "does not allow" not in str(error)  # no token is to blame
    assert time.monotonic() - begin < 20
    assert len(other.result().text) == 100


def test_a_compile_that_takes_too_long_is_given_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(guided_compiler, "COMPILE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(guided_compiler.GuideCompiler, "_compile", lambda self, source: release.wait(20))
    for _ in range(3):  # more than may run at a time
        with pytest.raises(errors.InvalidArgumentError, match=r"too long|within"):
            engine.submit("x", SamplingParams(guided=GuidedParams(regex="never seen before")))
    release.set()


def test_compiled_grammars_are_kept_and_let_go(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guided_compiler, "MAX_COMPILED", 3)
    compiler = guided_compiler.GuideCompiler(tokenizer, 512, tokenizer.eos_token_ids)
    made = []
    compile_ = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda source: made.append(source) or compile_(source))
    for regex in ["a", "b", "a", "c", "d", "a", "b"]:
        compiler.matcher(GuidedParams(regex=regex))
    assert len(made) == 5  # b went, a was used again in time


def test_no_end_id_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="ignore_eos"):
        guide_of(GuidedParams(regex="a"), tokenizer, 512, [])
    with pytest.raises(errors.InvalidArgumentError, match="600"):
        guide_of(GuidedParams(regex="a"), tokenizer, 512, [600])
    with pytest.raises(errors.InvalidArgumentError, match="ignore_eos"):
        SamplingParams(guided=GuidedParams(regex="a"), ignore_eos=True)


def test_a_tokenizer_without_bytes_is_refused() -> None:
    unusable = Tokenizer(toy_tokenizers.word_level(), config={"eos_token": "</s>"})
    with pytest.raises(errors.UnsupportedError, match="tokenizer"):
        guide_of(GuidedParams(regex="a"), unusable, unusable.vocab_size, unusable.eos_token_ids)


def test_without_llguidance_the_extra_is_named(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    guided_compiler._compilers.pop(tokenizer, None)
    with pytest.raises(errors.UnsupportedError, match=r"plansmith\[guided\]"):
        guide_of(GuidedParams(regex="a"), tokenizer, 512, tokenizer.eos_token_ids)
