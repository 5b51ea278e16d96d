"""What an engine's precision costs: its cpu plan against the unquantized checkpoint in float32, on a text and on tasks.

Both run the same windows of the text, token for token through the KV cache. Of a window of L tokens the second half is
scored: each of those tokens has at least L / 2 before it. Perplexity is of the tokens of the text; KL is KL(original ||
engine) of the next-token distributions, in nats; top-1 is how often both have the same best token.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from typing import Any

import numpy as np

from ..builder.checkpoint import Checkpoint
from ..builder.limits import Limits
from ..builder.precision import Precision, precision
from ..builder.progress import Progress, no_progress
from ..builder.scratch import scratch_directory
from ..runtime.errors import InvalidArgumentError
from ..runtime.tokenizer import Tokenizer
from .eval_text import MIN_CONTEXT, EvalText, read_text, tokenizer_of, windows
from .greedy import GreedyAgreement, greedy_agreement
from .quality import Quality, Tally, joined
from .scoring import PlanRunner, TokenRun, compile_cpu
from .tasks import TaskReport, run_tasks

EVAL = "eval"  # what progress is told of, where a build names a target
DEFAULT_CONTEXTS = (128, 1024)


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """What is measured.

    text : a .txt or .jsonl file; None = the text that comes with plansmith
    length : tokens of the text at most
    contexts : lengths of windows, in tokens; None = DEFAULT_CONTEXTS as far as the engine and the text reach
    tasks : whether the tasks are run
    greedy_tokens : tokens that greedy decoding is followed for, from each of a few prompts; 0 = not at all
    num_threads : 0 = one a core
    weights : where they lie in memory, as cpu_executor takes it
    """

    text: pathlib.Path | None = None
    length: int = 4096
    contexts: tuple[int, ...] | None = None
    tasks: bool = False
    greedy_tokens: int = 32
    num_threads: int = 0
    weights: str = "auto"


@dataclasses.dataclass(frozen=True)
class EvalReport:
    """What was measured.

    precision : of the engine
    against : the checkpoint that it is compared with, in float32
    contexts : by length of the windows, ascending; `overall` is all of them together
    sensitivity, gate : filled in by those who measure them (to_json of theirs)
    """

    plan: str
    checkpoint: str
    precision: str
    against: str
    text: str
    text_tokens: int
    contexts: tuple[Quality, ...]
    overall: Quality
    seconds: float
    greedy: GreedyAgreement | None = None
    tasks: TaskReport | None = None
    sensitivity: dict[str, Any] | None = None
    gate: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        result: dict[str, Any] = dataclasses.asdict(self)
        result["tasks"] = None if self.tasks is None else self.tasks.to_json()
        return result


def evaluate_plan(
    plan_path: str | pathlib.Path,
    checkpoint: Checkpoint,
    recipe: Precision,
    limits: Limits,
    against: Checkpoint,
    options: EvalOptions | None = None,
    progress: Progress | None = None,
) -> EvalReport:
    """Return how the cpu plan of a checkpoint compares with an unquantized checkpoint.

    plan_path : a file of the cpu target, of `checkpoint` at `recipe` within `limits`
    against : the original; a float32 cpu plan of it is made for the time being, which needs that much disk
    progress : told what is done, on this thread
    raises InvalidArgumentError when the two do not belong together (vocabulary, tokenizer), or the text is empty or
        shorter than a context; ExecutorError when logits are not finite
    """
    options, tell, start = options or EvalOptions(), progress or no_progress, time.monotonic()
    tokenizer = check_comparable(checkpoint, against)
    text = read_text(options.text)
    cut = _cut(text, tokenizer, options, limits)
    with scratch_directory("eval") as folder:
        tell(EVAL, "compiling the original in float32", 0, 0)
        reference_plan = compile_cpu(
            against.spec, against.weights, precision("fp32"), limits, folder / "original.plan"
        )
        original = PlanRunner(reference_plan, limits, "the original", options.num_threads, options.weights)
        plan = pathlib.Path(plan_path)
        engine = PlanRunner(plan, limits, "the engine", options.num_threads, options.weights)
        tallies = _tallies(cut, engine, original, tell)
        greedy = None
        if options.greedy_tokens:
            tell(EVAL, "decoding greedily", 0, 0)
            greedy = greedy_agreement(engine, original, _prompts(cut), options.greedy_tokens)
        tasks = None
        if options.tasks:
            tasks = run_tasks(engine, original, tokenizer, lambda *step: tell(EVAL, *step))
    contexts = tuple(
        tally.quality(length, len(rows))
        for (length, rows), tally in zip(cut.windows.items(), tallies, strict=True)
    )
    return EvalReport(
        plan=str(plan_path),
        checkpoint=str(checkpoint.path),
        precision=recipe.name,
        against=str(against.path),
        text=text.name,
        text_tokens=cut.num_tokens,
        contexts=contexts,
        overall=joined(tallies).quality(0, sum(one.windows for one in contexts)),
        seconds=round(time.monotonic() - start, 3),
        greedy=greedy,
        tasks=tasks,
        notes=cut.notes,
    )


def check_comparable(checkpoint: Checkpoint, against: Checkpoint) -> Tokenizer:
    """Return the tokenizer of two checkpoints that have the same one; raise InvalidArgumentError otherwise."""
    ours, theirs = checkpoint.spec.vocab_size, against.spec.vocab_size
    if ours != theirs:
        raise InvalidArgumentError(
            f"{checkpoint.path} has a vocabulary of {ours} tokens, {against.path} one of {theirs}: their distributions "
            "cannot be compared; give the checkpoint that it was made from as --against"
        )
    if against.quantization is not None:
        raise InvalidArgumentError(
            f"{against.path} is quantized itself ({against.quantization.name}), so nothing could be said about what "
            "quantizing costs; give the unquantized checkpoint as --against"
        )
    one, two = tokenizer_of(checkpoint), tokenizer_of(against)
    for sample in _SAMPLES:
        if one.encode(sample) != two.encode(sample):
            raise InvalidArgumentError(
                f"the tokenizers of {checkpoint.path} and {against.path} encode {sample!r} differently, so one id "
                "means two things; give the checkpoint that it was made from as --against"
            )
    return two


_SAMPLES = ("The quick brown fox, 1234 times.", "def f(x):\n    return x ** 2\n", "naïve café 数字 €")


@dataclasses.dataclass(frozen=True)
class _Cut:
    """The text as windows: length -> rows of that many tokens, ascending."""

    windows: dict[int, list[tuple[int, ...]]]
    num_tokens: int
    notes: tuple[str, ...]


def _cut(text: EvalText, tokenizer: Tokenizer, options: EvalOptions, limits: Limits) -> _Cut:
    """Return the windows of each context; what was not asked for by name is shortened to what there is."""
    prefix, ids = text.encode(tokenizer, options.length)
    most = min(limits.max_seq_len, len(prefix) + len(ids))
    notes: tuple[str, ...] = ()
    if options.contexts is None:
        if len(ids) < MIN_CONTEXT:
            raise InvalidArgumentError(
                f"{text.name} has {len(ids)} tokens (--length is the most that are taken), too few to score; give a "
                "text of some thousand tokens"
            )
        lengths = sorted({min(length, most) for length in DEFAULT_CONTEXTS})
        if lengths[-1] < DEFAULT_CONTEXTS[-1]:
            notes = (
                f"windows have at most {most} tokens, not {DEFAULT_CONTEXTS[-1]}: max_seq_len is "
                f"{limits.max_seq_len} and the text has {len(ids)} tokens",
            )
    else:
        lengths = sorted(set(options.contexts))
    if not lengths:
        raise InvalidArgumentError("--contexts is empty; give lengths of windows in tokens, e.g. 128,1024")
    for length in lengths:
        if length > limits.max_seq_len:
            raise InvalidArgumentError(
                f"a context of {length} tokens is asked for, the engine's max_seq_len is {limits.max_seq_len}; give "
                "shorter --contexts, or build with a larger --max-seq-len"
            )
    return _Cut({length: windows(prefix, ids, length, text.name) for length in lengths}, len(ids), notes)


def _prompts(cut: _Cut) -> list[tuple[int, ...]]:
    """Return a few beginnings for greedy decoding: first halves of the shortest windows, spread over the text."""
    length, rows = next(iter(cut.windows.items()))
    chosen = rows[:: max(1, len(rows) // 4)][:4]
    return [row[: max(1, length // 2)] for row in chosen]


def _tallies(cut: _Cut, engine: PlanRunner, original: PlanRunner, tell: Progress) -> list[Tally]:
    """Return one tally a context."""
    tallies = []
    done, total = 0, sum(length * len(rows) for length, rows in cut.windows.items())
    for length, rows in cut.windows.items():
        tally = Tally()
        # The token at position t is told by the logits behind t - 1; the last token's say nothing about the text.
        runs = [TokenRun(row[:-1], length // 2 - 1) for row in rows]
        for got, wanted in zip(engine.run(runs), original.run(runs), strict=True):
            row = np.array(rows[got.sequence])
            tally.add(got.logits, wanted.logits, row[got.start + 1 : got.start + 1 + len(got.logits)])
            tell(EVAL, f"windows of {length} tokens", done + got.sequence * length, total)
        done += length * len(rows)
        tallies.append(tally)
    return tallies
