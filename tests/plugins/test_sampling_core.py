"""Sampling on the device against the core itself: the same tokens, bit for bit, and the same log-probabilities.

Each request runs twice over the same logits: in an engine that draws its tokens, and in one whose executor is given
the rows to draw. The rule in numpy draws all of them there; the kernels, which the interpreter runs slowly, a part.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from plansmith.plugins.sampling import reference
from plansmith.runtime.batch import ROW_SAMPLE, ModelInfo, StepSampling
from plansmith.runtime.engine import Engine, SamplingParams
from plansmith.runtime.errors import InvalidArgumentError
from plansmith.runtime.executor import PythonExecutor
from sampling_problems import LOGITS, kernels_draw, make_logits, make_parameters, rule_draws


@dataclasses.dataclass
class Row:
    """A row that the core drew from."""

    logits: Any
    row: Any
    edits: Any
    token: int = -7
    logprob: float = 0.0
    top: Any = ()


class Model:
    """An executor whose logits are those of a list, one a step."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.logits: list[Any] = []

    def describe(self) -> ModelInfo:
        return ModelInfo(
            vocab_size=self._vocab_size,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            max_batch_size=1,
            max_num_tokens=16,
            max_input_len=16,
            max_seq_len=32,
            tokens_per_block=8,
            kv_bytes_per_block=64,
            samples_rows=1,
        )

    def open(self, num_blocks: int) -> None:
        pass

    def close(self) -> None:
        pass


class Given(Model):
    """Leaves the draw to the core."""

    def step(self, batch: Any) -> Any:
        return self.logits.pop(0)[None]


class Drawing(Model):
    """Draws by the rule in numpy and keeps what it was asked for."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.rows: list[Row] = []

    def launch(self, batch: Any) -> None:
        pass

    def collect(self, sampling: StepSampling | None) -> Any:
        assert sampling is not None
        row = Row(self.logits.pop(0), sampling.rows.copy(), sampling.edits.copy())
        self.rows.append(row)
        samples = np.zeros(1, ROW_SAMPLE)
        samples["token"] = rule_draws(row.logits[None], row.row, row.edits)
        return samples


def penalties(random: np.random.Generator, vocab_size: int) -> dict[str, Any]:
    """Return what makes edits: of a third of the requests."""
    if random.random() > 0.35:
        return {}
    ids = random.choice(vocab_size, min(vocab_size, 5), replace=False).tolist()
    return {
        "repetition_penalty": float(random.choice((0.7, 1.0, 1.3))),
        "presence_penalty": float(random.choice((0.0, 0.5))),
        "frequency_penalty": float(random.choice((0.0, -0.25))),
        "logit_bias": dict(zip(ids, random.choice((-np.inf, 1.5, -2.25), len(ids)).tolist(), strict=True)),
    }


def core_rows(vocab_size: int, num_requests: int, seed: int, logprobs: int | None = None) -> list[Row]:
    """Return the rows of random requests with the core's tokens; the rule's are compared with them on the way."""
    random = np.random.default_rng(seed)
    given, drawing = Given(vocab_size), Drawing(vocab_size)
    rows: list[Row] = []
    with (
        Engine.from_executor(PythonExecutor(given)) as core,
        Engine.from_executor(PythonExecutor(drawing)) as device,
    ):
        for i in range(num_requests):
            prompt = random.integers(0, vocab_size, 3).tolist()
            made = make_parameters(random, vocab_size) | penalties(random, vocab_size)
            params = SamplingParams(max_tokens=3, logprobs=logprobs, **made)
            logits = [make_logits(random, LOGITS[i % len(LOGITS)], vocab_size) for _ in range(3)]
            given.logits, drawing.logits = list(logits), list(logits)
            try:
                (want,) = core.generate(prompt, params)
            except InvalidArgumentError:  # all tokens that there are were forbidden
                with pytest.raises(InvalidArgumentError):
                    device.generate(prompt, params)
                drawing.rows.clear()
                continue
            (got,) = device.generate(prompt, params)
            assert list(got.token_ids) == list(want.token_ids), made
            for j, row in enumerate(drawing.rows):
                row.token = want.token_ids[j]
                if logprobs is not None:
                    row.top = want.logprobs[j]
            rows += drawing.rows
            drawing.rows.clear()
    return rows


def draw_together(rows: list[Row]) -> Any:
    """Return the kernels' samples of all rows, from one launch."""
    packed = np.concatenate([row.row for row in rows])
    ends = np.cumsum([len(row.edits) for row in rows])
    packed["edit_end"] = ends
    packed["edit_begin"] = ends - [len(row.edits) for row in rows]
    edits = np.concatenate([row.edits for row in rows])
    return kernels_draw(np.stack([row.logits for row in rows]), packed, edits)


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 333, 2049, 5000])
def test_the_rule_in_numpy_draws_the_cores_tokens(vocab_size: int) -> None:
    assert len(core_rows(vocab_size, 140, vocab_size)) > (0 if vocab_size < 6 else 300)


@pytest.mark.parametrize("vocab_size", [1, 2, 65, 333, 2049])
def test_the_kernels_draw_the_cores_tokens(vocab_size: int) -> None:
    rows = core_rows(vocab_size, 16, vocab_size + 1)
    assert draw_together(rows)["token"].tolist() == [row.token for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab_size", "num_requests"), [(5, 200), (64, 200), (127, 200), (1000, 100), (4999, 40), (10007, 25)]
)
def test_the_kernels_draw_the_cores_tokens_of_many_rows(vocab_size: int, num_requests: int) -> None:
    """The interpreter runs a chunk of a row in some 10 ms: fewer rows of more tokens."""
    rows = core_rows(vocab_size, num_requests, vocab_size + 2)
    assert draw_together(rows)["token"].tolist() == [row.token for row in rows]


def test_log_probabilities_are_the_cores() -> None:
    rows = core_rows(333, 12, 5, logprobs=6)
    samples = draw_together(rows)
    for row, sample in zip(rows, samples, strict=True):
        assert sample["token"] == row.token
        top = row.top.top
        ids, values = [t for t, _ in top], np.array([v for _, v in top], np.float32)
        assert sample["num_top"] == len(ids)
        assert sample["top_ids"][: len(ids)].tolist() == ids
        # Both are float32 of a float64 number that differs by 1e-10 at most: an ulp.
        got = sample["top_logprobs"][: len(ids)]
        assert (np.abs(got - values) <= np.spacing(np.abs(values)) + 1e-9).all()
        assert abs(sample["logprob"] - row.top.logprob) <= np.spacing(np.float32(abs(row.top.logprob))) + 1e-9


def test_a_bias_that_forbids_wins_over_a_penalty_that_drives_a_logit_beyond_float32() -> None:
    given, drawing = Given(8), Drawing(8)
    logits = np.array([3e38, 1, 2, 3, 4, 5, 6, 7], np.float32)
    made = SamplingParams(max_tokens=1, seed=4, repetition_penalty=0.5, logit_bias={0: -np.inf})
    tokens = []
    for model in (given, drawing):
        model.logits = [logits]
        with Engine.from_executor(PythonExecutor(model)) as engine:
            tokens.append(engine.generate([0], made)[0].outputs[0].token_ids[0])
    (row,) = drawing.rows
    assert tokens == [tokens[0]] * 2 and tokens[0] != 0
    assert kernels_draw(row.logits[None], row.row, row.edits)["token"].tolist() == tokens[:1]


def test_a_penalty_that_drives_a_logit_beyond_float32_is_told() -> None:
    given, drawing = Given(8), Drawing(8)
    logits = np.array([3e38, 1, 2, 3, 4, 5, 6, 7], np.float32)
    for model in (given, drawing):
        model.logits = [logits]
        with (
            Engine.from_executor(PythonExecutor(model)) as engine,
            pytest.raises(InvalidArgumentError, match="beyond float32 at output 0"),
        ):
            engine.generate([0], SamplingParams(max_tokens=1, repetition_penalty=0.5))
    (row,) = drawing.rows
    assert kernels_draw(row.logits[None], row.row, row.edits)["token"].tolist() == [reference.OVERFLOW]
