"""Requests as older clients send them, read and run: the tensors have the effect that their names promise."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plansmith.runtime.completion import Completion
from plansmith.runtime.engine import Engine
from plansmith.runtime.sampling import SamplingParams
from plansmith.serving.triton.read_row import read_rows
from plansmith.serving.triton.row import RowDefaults
from plansmith.serving.triton.settings import Settings
from plansmith.serving.triton.word_lists import make_word_list
from tiny_engines import build_tiny

LENGTH = 12


def ints(*values: int) -> Any:
    return np.array([values], np.int32)


def floats(*values: float) -> Any:
    return np.array([values], np.float32)


@pytest.fixture(scope="module")
def engine(
    tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    directory = build_tiny(tiny_checkpoint("llama"), tmp_path_factory.mktemp("rows") / "engine")
    with Engine.open(directory, num_threads=1, speculation="ngram") as engine:
        yield engine


@pytest.fixture
def run(engine: Engine) -> Callable[..., Completion]:
    """Return tensors -> the completion of a request with them."""
    defaults = RowDefaults.of(Settings(Path(), max_beam_width=4), engine)

    def completion(**tensors: Any) -> Completion:
        base = {"input_ids": ints(5, 9, 23, 41), "input_lengths": ints(4), "request_output_len": ints(LENGTH)}
        (row,) = read_rows(base | {"end_id": ints(-1)} | tensors, {}, defaults)
        return engine.generate([row.prompt_ids.tolist()], SamplingParams(**row.params))[0]

    return completion


def ids(completion: Completion) -> list[int]:
    return list(completion.token_ids)


def test_end_tokens_of_the_checkpoint_count_beside_the_tokenizers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.tokenizer is not None
    monkeypatch.setattr(engine, "eos_token_ids", (*engine.tokenizer.eos_token_ids, 7))
    defaults = RowDefaults.of(Settings(Path(), logits_dtype="float16", exclude_input=True), engine)
    assert defaults.own_end_ids == {7, *engine.tokenizer.eos_token_ids}
    assert (defaults.logits_dtype, defaults.exclude_input) == (np.float16, True)


def test_words_ends_and_biases(run: Callable[..., Completion], engine: Engine) -> None:
    plain = ids(run())
    assert len(plain) == LENGTH
    at = next(i for i in range(2, LENGTH) if plain.index(plain[i]) == i)  # its first time
    stopped = run(stop_words_list=make_word_list([[1, 1, 1], plain[at - 1 : at + 1]])[None])
    assert ids(stopped) == plain[: at + 1] and stopped.finish_reason == "stop"
    ended = run(end_id=ints(plain[at]))
    assert ids(ended) == plain[: at + 1] and ended.finish_reason == "stop"
    assert plain[0] not in ids(run(bad_words_list=make_word_list([[plain[0]]])[None]))
    bias = np.zeros((1, engine.model_info.vocab_size), np.float16)
    bias[0, 77] = 60000
    assert set(ids(run(embedding_bias=bias))) == {77}
    first = run(end_id=ints(plain[0]))  # no first token is an end, unless min_tokens says that it may be
    assert ids(first)[0] != plain[0]
    assert ids(run(end_id=ints(plain[0]), min_tokens=ints(0))) == plain[:1]


def test_a_request_is_greedy_or_draws_as_it_did(run: Callable[..., Completion]) -> None:
    plain = ids(run())
    hot = {"temperature": floats(50)}
    assert ids(run(**hot)) == plain == ids(run(**hot, runtime_top_k=ints(1), runtime_top_p=floats(0)))
    drawn = ids(run(**hot, runtime_top_k=ints(50)))
    assert drawn != plain and drawn == ids(run(**hot, runtime_top_k=ints(50), runtime_top_p=floats(-1)))
    assert drawn != ids(run(**hot, runtime_top_k=ints(50), seed=np.array([[1]], np.uint64)))
    assert ids(run(**hot, runtime_top_p=floats(1))) not in (plain, drawn)
    falling = {"runtime_top_p": floats(1), "runtime_top_p_decay": floats(1e-6)}
    one, other = (
        ids(run(temperature=floats(50), seed=np.array([[s]], np.uint64), **falling)) for s in (1, 2)
    )
    assert one[0] != other[0]  # drawn from all; then from the likeliest alone
    greedy_behind = run(input_ids=ints(5, 9, 23, 41, one[0]), input_lengths=ints(5))
    assert one[1:] == ids(greedy_behind)[: LENGTH - 1]


def test_beams_and_several_outputs(run: Callable[..., Completion]) -> None:
    beams = run(beam_width=ints(3), runtime_top_k=ints(40), runtime_top_p=floats(0.5))
    assert len(beams.outputs) == 3 and len({one.token_ids for one in beams.outputs}) == 3
    outputs = run(num_return_sequences=ints(3), runtime_top_k=ints(50), temperature=floats(5)).outputs
    assert len({one.token_ids for one in outputs}) == 3


def test_drafts_change_the_time_alone(run: Callable[..., Completion]) -> None:
    plain = ids(run())
    right = run(draft_input_ids=ints(*plain[:5]), draft_acceptance_threshold=floats(0.5))
    assert ids(right) == plain and right.stats.num_accepted_draft_tokens >= 5
    assert ids(run(draft_input_ids=ints(plain[0], *plain[:3]))) == plain
    assert ids(run(max_draft_len=ints(0))) == plain


def test_no_ngram_comes_again_and_penalties_count(run: Callable[..., Completion]) -> None:
    tokens = [5, 9, 23, 41, *ids(run(no_repeat_ngram_size=ints(2), request_output_len=ints(80)))]
    pairs = list(itertools.pairwise(tokens))
    assert len(pairs) == len(set(pairs))
    assert len(set(ids(run(presence_penalty=floats(1000))))) == LENGTH


def test_a_length_that_is_too_long_is_what_is_left(run: Callable[..., Completion], engine: Engine) -> None:
    done = run(request_output_len=ints(100_000))
    assert len(done.token_ids) == engine.model_info.max_seq_len - 4 and done.finish_reason == "length"
