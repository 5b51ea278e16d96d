"""Evaluation: the numbers against an independent computation, and everything that cannot be evaluated by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plansmith.builder.checkpoint import Checkpoint, open_checkpoint
from plansmith.builder.limits import Limits, make_limits
from plansmith.builder.precision import precision
from plansmith.calibration import eval_text, scoring
from plansmith.calibration.evaluate import EvalOptions, evaluate_plan
from plansmith.calibration.quality import Tally
from plansmith.calibration.scoring import PlanRunner, TokenRun, compile_cpu
from plansmith.runtime.errors import ExecutorError, InvalidArgumentError

LIMITS = make_limits(256, max_batch_size=4, max_num_tokens=40, max_seq_len=128, tokens_per_block=8)


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Callable[[str], Path]) -> Checkpoint:
    return open_checkpoint(tiny_checkpoint("llama"))


@pytest.fixture(scope="module")
def plan(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("plans")

    def get(name: str) -> Path:
        path = folder / f"{name}.plan"
        return path if path.exists() else compile_cpu(tiny.spec, tiny.weights, precision(name), LIMITS, path)

    return get


def measure(plan: Path, tiny: Checkpoint, name: str, **options: Any) -> Any:
    chosen = EvalOptions(
        **{"length": 400, "contexts": (16, 96), "greedy_tokens": 0, "num_threads": 1, **options}
    )
    return evaluate_plan(plan, tiny, precision(name), LIMITS, tiny, chosen)


def transformers_logits(path: Path, rows: list[tuple[int, ...]]) -> list[np.ndarray]:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return [model.eval()(torch.tensor([row])).logits[0].double().numpy() for row in rows]


def test_perplexity_is_that_of_transformers(tiny: Checkpoint, plan: Callable[[str], Path]) -> None:
    report = measure(plan("fp32"), tiny, "fp32")
    ids = eval_text.tokenizer_of(tiny).encode(eval_text.OWN_TEXT.read_text())[:400]
    for one, length in zip(report.contexts, (16, 96), strict=True):
        rows = [tuple(ids[at : at + length]) for at in range(0, 400 - length + 1, length)]
        nll = []
        for row, logits in zip(rows, transformers_logits(tiny.path, rows), strict=True):
            probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
            nll += [-math.log(probs[at - 1, row[at]]) for at in range(length // 2, length)]
        assert (one.context, one.windows, one.tokens) == (length, len(rows), len(nll))
        assert one.ppl == pytest.approx(math.exp(np.mean(nll)), rel=1e-4)
        assert one.ppl_reference == pytest.approx(one.ppl, rel=1e-6)
        assert one.kl < 1e-9 and one.top1 == 1.0


@pytest.mark.parametrize("elements", [1 << 22, 21])
def test_kl_and_agreement_against_plain_numpy(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MAX_SLICE_ELEMENTS", elements)
    rng = np.random.default_rng(0)
    p, q = rng.normal(size=(2, 50, 7)) * 2
    targets = rng.integers(0, 7, 50)
    tally = Tally()
    tally.add(q[:20], p[:20], targets[:20])
    tally.add(q[20:], p[20:], targets[20:])
    got = tally.quality(8, 5)
    kl, same, nll = [], [], []
    for one, two, target in zip(p, q, targets, strict=True):
        a, b = (np.exp(x) / sum(math.exp(v) for v in x) for x in (one, two))
        kl.append(sum(a[v] * (math.log(a[v]) - math.log(b[v])) for v in range(7)))
        same.append(int(np.argmax(a)) == int(np.argmax(b)))
        nll.append(-math.log(b[target]))
    assert got.kl == pytest.approx(sum(kl) / 50)
    assert got.kl_max == pytest.approx(max(kl))
    # the 99th percentile of 50 values lies 0.51 of the way from the last but one to the last
    ordered = sorted(kl)
    assert got.kl_p99 == pytest.approx(ordered[48] + 0.51 * (ordered[49] - ordered[48]))
    assert got.top1 == pytest.approx(sum(same) / 50)
    assert got.ppl == pytest.approx(math.exp(sum(nll) / 50))
    assert (got.context, got.windows, got.tokens) == (8, 5, 50)


def test_fewer_bits_cost_more(tiny: Checkpoint, plan: Callable[[str], Path]) -> None:
    reports = {name: measure(plan(name), tiny, name) for name in ("fp32", "int8", "int4")}
    kl = {name: one.overall.kl for name, one in reports.items()}
    assert kl["fp32"] < 1e-9 < kl["int8"] < kl["int4"] / 10
    assert reports["int8"].overall.top1 > reports["int4"].overall.top1
    whole = reports["int4"]
    tokens = [one.tokens for one in whole.contexts]
    assert whole.overall.tokens == sum(tokens)
    mean = sum(one.kl * one.tokens for one in whole.contexts) / sum(tokens)
    assert whole.overall.kl == pytest.approx(mean)


def test_runs_do_not_depend_on_how_they_are_cut(tiny: Checkpoint, plan: Callable[[str], Path]) -> None:
    """Long runs in chunks and short ones packed give the logits of each run by itself."""
    rng = np.random.default_rng(1)
    runs = [
        TokenRun(tuple(rng.integers(0, 320, n).tolist()), first)
        for n, first in ((90, 40), (3, 0), (1, 0), (17, 16))
    ]
    whole = list(PlanRunner(plan("fp32"), LIMITS, "it", 1).run(runs))
    for idx, run in enumerate(runs):
        got = np.concatenate([piece.logits for piece in whole if piece.sequence == idx])
        alone = np.concatenate(
            [piece.logits for piece in PlanRunner(plan("fp32"), LIMITS, "it", 1).run([run])]
        )
        assert got.shape == (len(run.tokens) - run.first, 320)
        np.testing.assert_array_equal(got, alone)


def test_greedy_agreement(tiny: Checkpoint, plan: Callable[[str], Path]) -> None:
    same = measure(plan("fp32"), tiny, "fp32", greedy_tokens=12).greedy
    assert same.lengths == (12,) * len(same.lengths) and same.mean == 12.0
    other = measure(plan("int4"), tiny, "int4", greedy_tokens=12).greedy
    assert other.most == 12 and other.mean < 12.0
    # against each model's own greedy output, by the engine itself
    ids = eval_text.tokenizer_of(tiny).encode(eval_text.OWN_TEXT.read_text())[:400]
    starts = range(0, 400, 16)[: 400 // 16 : 25 // 4]
    prompts = [tuple(ids[at : at + 8]) for at in starts][: len(other.lengths)]
    lengths = []
    for prompt in prompts:
        outputs = []
        for name in ("fp32", "int4"):
            tokens = list(prompt)
            for _ in range(12):
                runner = PlanRunner(plan(name), LIMITS, "it", 1)
                (piece,) = runner.run([TokenRun(tuple(tokens), len(tokens) - 1)])
                tokens.append(int(piece.logits[0].argmax()))
            outputs.append(tokens[8:])
        lengths.append(next((at for at in range(12) if outputs[0][at] != outputs[1][at]), 12))
    assert other.lengths == tuple(lengths)


def test_contexts_follow_the_limits(tiny: Checkpoint, plan: Callable[[str], Path]) -> None:
    report = measure(plan("fp32"), tiny, "fp32", contexts=None)
    assert [one.context for one in report.contexts] == [128]
    assert "max_seq_len is 128" in report.notes[0]
    assert json.loads(json.dumps(report.to_json()))["overall"]["tokens"] == report.overall.tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contexts": (16, 200)}, "max_seq_len is 128"),
        ({"contexts": ()}, "--contexts is empty"),
        ({"contexts": (3,)}, "too short"),
        ({"length": 40, "contexts": (96,)}, "has 40 tokens"),
    ],
)
def test_contexts_that_cannot_be(
    tiny: Checkpoint, plan: Callable[[str], Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        measure(plan("fp32"), tiny, "fp32", **options)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b" \n ", "is empty"),
        ("a.jsonl", b"", "is empty"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', r'a\.jsonl:2: "text" is a int'),
        ("a.jsonl", b'{"text": "x"}\n\n[\n', "jsonl:3: is not JSON"),
        ("a.jsonl", b"[" * 100_000, "jsonl:1: is not JSON"),
        ("a.pdf", b"x", "ends in .pdf"),
        ("a.txt", b"too short", "tokens"),
    ],
)
def test_texts_that_cannot_be_taken(
    tiny: Checkpoint, plan: Callable[[str], Path], tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=message):
        measure(plan("fp32"), tiny, "fp32", text=tmp_path / name)
    with pytest.raises(InvalidArgumentError, match="not a file"):
        measure(plan("fp32"), tiny, "fp32", text=tmp_path / "none.txt")


def test_own_texts(tmp_path: Path) -> None:
    # A byte order mark, and a string with a character that str.splitlines would end a line at.
    lines = '\ufeff{"text": "one\u2028more"}\n\n{"text": "two", "id": 2}\r\n'
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    assert eval_text.read_text(tmp_path / "a.jsonl") == eval_text.EvalText("a.jsonl", "one\u2028more\n\ntwo")


def test_a_bos_begins_every_window(tiny: Checkpoint) -> None:
    from plansmith.runtime.tokenizer import Tokenizer
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    backend = Backend.from_str(eval_text.tokenizer_of(tiny).to_json())
    backend.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    text = eval_text.EvalText("it", "the quick brown fox " * 20)
    prefix, ids = text.encode(Tokenizer(backend), 50)
    assert prefix == [1] and 1 not in ids and len(ids) == 50
    rows = eval_text.windows(prefix, ids, 10, "it")
    assert [row[0] for row in rows] == [1] * 5 and [t for row in rows for t in row[1:]] == ids[:45]


def test_two_models_that_do_not_belong_together(
    tiny: Checkpoint, plan: Callable[[str], Path], tmp_path: Path
) -> None:
    from tiny_models import make_tiny

    more = open_checkpoint(make_tiny("llama", tmp_path / "more", vocab_size=330))
    chosen = EvalOptions(length=100, contexts=(16,), num_threads=1)
    with pytest.raises(InvalidArgumentError, match=r"vocabulary of 320 tokens, .* one of 330"):
        evaluate_plan(plan("fp32"), tiny, precision("fp32"), LIMITS, more, chosen)
    other = make_tiny("llama", tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    content = json.loads(text)
    vocab = content["model"]["vocab"]
    vocab["e"], vocab["t"] = vocab["t"], vocab["e"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InvalidArgumentError, match=r"encode .* differently"):
        evaluate_plan(plan("fp32"), tiny, precision("fp32"), LIMITS, open_checkpoint(other), chosen)


def test_logits_that_are_not_numbers(tiny: Checkpoint, plan: Callable[[str], Path], tmp_path: Path) -> None:
    """Weights so large that float32 overflows: all finite in the file, infinite in the product."""

    class Huge:
        def names(self) -> tuple[str, ...]:
            return tiny.weights.names()

        def shape(self, name: str) -> tuple[int, ...]:
            return tiny.weights.shape(name)

        def get(self, name: str) -> Any:
            weight = np.asarray(tiny.weights.get(name))
            return weight * np.float32(3e38) if name == "lm_head.weight" else weight

    limits: Limits = LIMITS
    broken = compile_cpu(tiny.spec, Huge(), precision("fp32"), limits, tmp_path / "huge.plan")
    with pytest.raises(ExecutorError, match=r"logits of the engine are not finite numbers behind token \d+"):
        measure(broken, tiny, "fp32")
