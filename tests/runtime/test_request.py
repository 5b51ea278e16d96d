"""A request's events turned into deltas and a completion, without an engine: orders that an engine gives rarely."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import pytest
from plansmith.runtime.completion import Completion, Delta
from plansmith.runtime.errors import Error, ExecutorError
from plansmith.runtime.events import ContextEvent, EndEvent, TokenEvent
from plansmith.runtime.request import RequestState
from plansmith.runtime.sampling import SamplingParams
from plansmith.runtime.stats import RequestStats

STATS = RequestStats(**{field.name: 0 for field in dataclasses.fields(RequestStats)})
END, STOP_WORDS, LENGTH, TIMEOUT, CANCELLED = 1, 2, 3, 4, 5


class Letters:
    """A detokenizer: token i is the i-th letter."""

    def push(self, token: int) -> str:
        return chr(ord("a") + token)

    def flush(self) -> str:
        return ""


class Driver:
    """A request and what its sink got."""

    def __init__(self, end_ids: tuple[int, ...] = (), **params: Any) -> None:
        self.got: list[Delta | Error] = []
        own = SamplingParams(max_tokens=100, **params)
        self.state = RequestState([1, 2], own, end_ids, Letters, self.got.append)  # type: ignore[arg-type]
        self.num_tokens = [0] * max(own.num_sequences, own.beam_width)
        self.num_cancels = 0

    def tokens(self, sequence: int, text: str, cum_logprob: float = 0.0) -> None:
        for letter in text:
            event = TokenEvent(
                1, 1, ord(letter) - 97, self.num_tokens[sequence], 0.0, cum_logprob, (), sequence
            )
            self.num_tokens[sequence] += 1
            self.num_cancels += self.state.on_token(event)

    def end(
        self, sequence: int, reason: int = LENGTH, *, final: bool = False, error: Error | None = None
    ) -> None:
        self.num_cancels += self.state.on_end(EndEvent(1, 1, reason, error, STATS, sequence, final))

    @property
    def deltas(self) -> list[Delta]:
        return [item for item in self.got if isinstance(item, Delta)]

    @property
    def completion(self) -> Completion:
        assert self.state.completion is not None
        return self.state.completion


def texts(completion: Completion) -> list[tuple[str, str, Any]]:
    return [(one.text, one.finish_reason, one.stop_reason) for one in completion.outputs]


def test_a_stop_string_of_one_output_lets_the_others_run_on() -> None:
    request = Driver(n=2, stop="xy")
    request.tokens(0, "ab")
    request.tokens(1, "cd")
    request.tokens(0, "xyzz")  # what follows is unseen
    assert request.num_cancels == 0
    told = request.deltas[-1]
    assert (told.index, told.finish_reason, told.stop_reason, told.is_final) == (0, "stop", "xy", False)
    request.tokens(1, "e")
    request.end(1)
    assert request.num_cancels == 1, "only the output that nobody reads is left"
    request.tokens(0, "zz")
    assert not any(delta.is_final for delta in request.deltas)
    request.end(0, CANCELLED, final=True)
    assert texts(request.completion) == [("ab", "stop", "xy"), ("cde", "length", None)]
    finals = [delta for delta in request.deltas if delta.finish_reason is not None]
    assert [(d.index, d.is_final) for d in finals] == [(0, False), (1, True)]
    assert request.deltas[-1] is finals[-1]


def test_when_all_have_stopped_the_request_is_cancelled() -> None:
    request = Driver(n=3, stop="x")
    request.tokens(0, "ax")
    request.tokens(1, "bx")
    assert request.num_cancels == 0
    request.tokens(2, "cx")
    assert request.num_cancels == 1
    for sequence in range(3):
        request.end(sequence, CANCELLED, final=sequence == 2)
    assert texts(request.completion) == [(letter, "stop", "x") for letter in "abc"]
    finals = [delta for delta in request.deltas if delta.finish_reason is not None]
    assert [(d.index, d.is_final) for d in finals] == [(0, False), (1, False), (2, True)]


def test_a_stop_string_of_the_only_output_cancels_at_once() -> None:
    request = Driver(stop="xy")
    request.tokens(0, "axy")
    assert request.num_cancels == 1
    assert request.deltas[-1].finish_reason is None
    request.end(0, CANCELLED, final=True)
    assert request.deltas[-1] == Delta("", (), None, "stop", "xy", STATS, 0, True)


def test_best_of_ranks_by_the_sum_and_a_sequence_without_tokens_goes_last() -> None:
    request = Driver(n=2, best_of=4, temperature=1.0)
    for sequence, cum_logprob in ((0, -5.0), (1, -1.0), (2, -3.0)):
        request.tokens(sequence, "abc"[sequence], cum_logprob)
    assert request.got == []
    for sequence in range(4):
        request.end(sequence, final=sequence == 3)
    assert [one.text for one in request.completion.outputs] == ["b", "c"]
    assert [(d.index, d.text, d.is_final) for d in request.deltas] == [(0, "b", False), (1, "c", True)]


def test_beams_are_cut_at_a_stop_string_and_may_be_fewer() -> None:
    request = Driver(beam_width=3, stop="x")
    request.tokens(0, "abxc")
    request.end(0)
    request.tokens(1, "de")
    request.end(1, END, final=True)
    assert texts(request.completion) == [("ab", "stop", "x"), ("de", "stop", None)]
    assert [delta.is_final for delta in request.deltas] == [False, True]


def test_an_error_ends_all_and_what_comes_later_is_dropped() -> None:
    request = Driver(n=2)
    request.tokens(0, "ab")
    request.end(1, error=ExecutorError("broken"))
    assert request.num_cancels == 1 and isinstance(request.got[-1], ExecutorError)
    before = len(request.got)
    request.tokens(0, "cd")
    request.end(0, CANCELLED, final=True)
    assert len(request.got) == before and request.state.completion is None


def test_an_error_behind_a_stop_string_is_not_the_requests() -> None:
    request = Driver(stop="x")
    request.tokens(0, "abx")
    request.end(0, error=ExecutorError("broken"), final=True)  # the step that was under way
    assert texts(request.completion) == [("ab", "stop", "x")]
    request = Driver(n=2, stop="x")
    request.tokens(0, "ax")
    request.end(0, error=ExecutorError("broken"))
    request.tokens(1, "bc")
    assert request.num_cancels == 0
    request.end(1, final=True)
    assert texts(request.completion) == [("a", "stop", "x"), ("bc", "length", None)]
    assert [delta.is_final for delta in request.deltas if delta.finish_reason] == [False, True]


def test_logits_of_a_request_without_tokens_are_an_empty_table() -> None:
    request = Driver(return_context_logits=True, return_generation_logits=True)
    request.end(0, CANCELLED, final=True)
    for rows in (request.completion.context_logits, request.completion.generation_logits):
        assert rows is not None and rows.shape == (0, 0) and rows.dtype == np.float32


def test_prompt_events_of_the_first_sequence_count() -> None:
    params = {"prompt_logprobs": 1, "return_context_logits": True, "n": 2}
    request = Driver(**params)
    for sequence in range(2):
        for position, token in ((0, 2), (1, -1)):
            row = np.full(3, position, np.float32)
            request.state.on_context(
                ContextEvent(1, 1, token, position, -0.5, ((2, -0.5), (1, -1.0)), sequence, row)
            )
    for sequence in range(2):
        request.end(sequence, final=sequence == 1)
    entries = request.completion.prompt_logprobs
    assert entries is not None and entries[0] is None and len(entries) == 2
    assert entries[1] is not None and (entries[1].token_id, entries[1].top) == (2, ((2, -0.5),))
    assert np.array_equal(request.completion.context_logits, [[0, 0, 0], [1, 1, 1]])  # type: ignore[arg-type]


def test_the_statistics_of_a_request_are_those_of_its_sequences() -> None:
    a = dataclasses.replace(
        STATS, arrival_time_ns=5, first_token_time_ns=9, last_token_time_ns=20, num_prompt_tokens=3
    )
    b = dataclasses.replace(a, first_token_time_ns=0, last_token_time_ns=30, num_generated_tokens=4)
    both = RequestStats.of_sequences([a, b])
    assert (both.arrival_time_ns, both.first_token_time_ns, both.last_token_time_ns) == (5, 9, 30)
    assert (both.num_prompt_tokens, both.num_generated_tokens) == (3, 4)


@pytest.mark.parametrize("seed", range(200))
def test_any_order_of_events_gives_whole_outputs_and_one_final_delta(seed: int) -> None:
    """Random texts, stops and ends, interleaved as they may come; deltas add up to the completion."""
    pick = random.Random(seed)
    n = pick.randint(1, 4)
    request = Driver(n=n, stop=["xx", "yz"])
    script = ["".join(pick.choice("abxyz") for _ in range(pick.randint(0, 8))) for _ in range(n)]
    wanted = [
        min((text.find(stop) for stop in ("xx", "yz") if stop in text), default=None) for text in script
    ]
    open_ones, given = list(range(n)), [0] * n
    while open_ones:
        i = pick.choice(open_ones)
        if given[i] < len(script[i]) and not request.num_cancels:
            request.tokens(i, script[i][given[i]])
            given[i] += 1
            continue
        open_ones.remove(i)
        request.end(i, CANCELLED if request.num_cancels else LENGTH, final=not open_ones)
    for i, output in enumerate(request.completion.outputs):
        text = script[i] if wanted[i] is None else script[i][: wanted[i]]
        if output.finish_reason == "cancelled":
            assert script[i].startswith(output.text)
        else:
            assert output.text == text and (output.finish_reason == "stop") == (wanted[i] is not None)
        own = [delta for delta in request.deltas if delta.index == i]
        assert "".join(delta.text for delta in own) == output.text
        assert tuple(itertools.chain(*(delta.token_ids for delta in own))) == output.token_ids
        assert [delta.finish_reason for delta in own if delta.finish_reason] == [output.finish_reason]
        assert own[-1].finish_reason is not None
    assert [delta.is_final for delta in request.deltas] == [False] * (len(request.deltas) - 1) + [True]
