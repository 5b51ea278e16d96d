"""Small real inferences that show whether a model still answers."""

from __future__ import annotations

import dataclasses
import enum
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .api import NoAnswer, TritonApi, TritonError, counter_sum

# Triton's ways to say that a model's process is gone or the model is not there.
_DEAD = ("is not healthy", "has no available versions", "is not ready", "is not found", "Stub process")
_BUSY = ("queue is full", "queue full", "Exceeds maximum queue size", "too many requests")
_ENGINE = {"input_ids": [1], "input_lengths": 1, "request_output_len": 1}
_TEXT = {"text_input": "a", "max_tokens": 1}

log = logging.getLogger("plansmith.triton")


class Outcome(enum.Enum):
    """What came of one try.

    ANSWERED : an answer, or a refusal because the queue is full
    BUSY : nothing in time, but other requests moved on
    DEAD : the server says that the model is not there
    REFUSED : another error
    SILENT : nothing in time, and nothing else moved
    """

    ANSWERED = "answered"
    BUSY = "busy"
    DEAD = "dead"
    REFUSED = "refused"
    SILENT = "silent"


@dataclasses.dataclass(frozen=True)
class Result:
    """One try: when it began (seconds since 1970), how long it took, and the error's text."""

    outcome: Outcome
    at: float
    latency_ms: float
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it for state.json."""
        latency_ms = round(self.latency_ms, 3)
        return {"at": self.at, "latency_ms": latency_ms, "outcome": self.outcome.value, "error": self.error}


def canary_inputs(name: str, config: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a model is tried with: what the user gave, one token of an engine or of a text model, or None."""
    if name in given:
        found: Mapping[str, Any] = given[name]
        return found
    inputs = {one["name"] for one in config.get("input", ())}
    for known in (_ENGINE, _TEXT):
        if inputs >= known.keys():
            return known
    return None


def try_model(
    api: TritonApi, name: str, inputs: Mapping[str, Any], timeout_s: float, relatives: Sequence[str] = ()
) -> Result:
    """Infer once and return what came of it. Raises nothing of the server's.

    relatives : other models whose progress counts as this one's: an ensemble's steps
    """
    before = _progress(api, (name, *relatives))
    at, began = time.time(), time.monotonic()
    error = ""
    try:
        api.generate(name, inputs, timeout_s)
        outcome = Outcome.ANSWERED
    except TritonError as raised:
        error = str(raised)
        outcome = _of_error(error)
    except NoAnswer as raised:
        error = str(raised)
        after = _progress(api, (name, *relatives))
        outcome = (
            Outcome.BUSY if before is not None and after is not None and after > before else Outcome.SILENT
        )
    return Result(outcome, at, (time.monotonic() - began) * 1e3, error)


def try_server(api: TritonApi, timeout_s: float) -> Result:
    """Ask whether the server is live, and return what came of it."""
    at, began = time.time(), time.monotonic()
    is_live = api.is_live(timeout_s)
    outcome = Outcome.ANSWERED if is_live else Outcome.SILENT
    return Result(outcome, at, (time.monotonic() - began) * 1e3)


def _of_error(text: str) -> Outcome:
    if any(one.lower() in text.lower() for one in _BUSY):
        return Outcome.ANSWERED
    return Outcome.DEAD if any(one in text for one in _DEAD) else Outcome.REFUSED


def _progress(api: TritonApi, models: Sequence[str]) -> float | None:
    """Return `progress_of` the server's metrics, None when it does not answer."""
    try:
        return progress_of(api.metrics(5.0), models)
    except NoAnswer:
        return None


def progress_of(metrics: str, models: Sequence[str]) -> float:
    """Return a number that grows as long as the models finish requests or the engine makes steps."""
    done = sum(counter_sum(metrics, "nv_inference_request_success", {"model": one}) for one in models)
    steps = counter_sum(metrics, "nv_trt_llm_general_metrics", {"general_type": "iteration_counter"})
    return done + steps


class Canary:
    """Tries something again and again on a thread of its own; what it notes may be read by any thread.

    last : the latest result, None before the first
    has_answered : whether any try was answered
    num_refused : tries refused in a row
    """

    def __init__(self, attempt: Callable[[], Result], interval_s: float) -> None:
        self._attempt = attempt
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._unwell_since: float | None = None
        self.last: Result | None = None
        self.has_answered = False
        self.num_refused = 0
        threading.Thread(target=self._run, name="canary", daemon=True).start()

    @property
    def unwell_s(self) -> float:
        """Return for how long every try was SILENT or DEAD, seconds; 0.0 after any sign of life."""
        since = self._unwell_since
        return 0.0 if since is None else time.monotonic() - since

    def stop(self) -> None:
        """End it; a try in flight ends by itself."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                self._note(self._attempt(), began)
            except Exception:  # or nobody would look any more
                log.exception("a try failed; this is a bug in plansmith")
            self._stopped.wait(max(0.05, self._interval_s - (time.monotonic() - began)))

    def _note(self, result: Result, began: float) -> None:
        if result.outcome not in (Outcome.SILENT, Outcome.DEAD):
            self._unwell_since = None
        elif self._unwell_since is None:
            self._unwell_since = began
        self.num_refused = self.num_refused + 1 if result.outcome is Outcome.REFUSED else 0
        self.has_answered = self.has_answered or result.outcome is Outcome.ANSWERED
        self.last = result
