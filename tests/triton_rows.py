"""What the tests of Triton's models share: names of outputs, a prompt, a reply that writes down what it is sent."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from plansmith.runtime.stats import RequestStats

BASIC = frozenset(["output_ids", "sequence_length", "prefix_ids", "is_final", "finish_reasons"])
PERF_METRICS = frozenset(
    [
        "kv_cache_alloc_new_blocks",
        "kv_cache_reused_blocks",
        "kv_cache_alloc_total_blocks",
        "arrival_time_ns",
        "first_scheduled_time_ns",
        "first_token_time_ns",
        "last_token_time_ns",
        "acceptance_rate",
        "total_accepted_draft_tokens",
        "total_draft_tokens",
    ]
)
ALL_NAMES = (
    BASIC
    | PERF_METRICS
    | {"cum_log_probs", "output_log_probs", "context_logits", "generation_logits"}
    | {"batch_index", "sequence_index", "num_input_tokens", "num_output_tokens"}
)
ALL_WANTS = frozenset(
    [
        "log_probs",
        "context_logits",
        "generation_logits",
        "perf_metrics",
        "num_input_tokens",
        "num_output_tokens",
    ]
)
PROMPT = np.array([7, 8, 9], np.int32)
STATS = RequestStats(**{field.name: 10 + i for i, field in enumerate(dataclasses.fields(RequestStats))})


class RecordingReply:
    """Takes a request's answers and checks the rules of a reply: one thread at a time, nothing behind the end.

    send_s : how long each send takes, seconds
    gate : sends wait for it, as those of a server that hangs would
    """

    def __init__(
        self,
        request_id: str = "",
        output_names: Collection[str] = ALL_NAMES,
        *,
        send_s: float = 0.0,
        gate: threading.Event | None = None,
    ) -> None:
        self.request_id = request_id
        self.output_names = output_names
        self.answers: list[Mapping[str, NDArray[Any]]] = []
        self.times: list[float] = []
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self.cancelled = False
        self.ready = True
        self.num_looks = 0
        self.faults: list[str] = []
        self._send_s, self._gate = send_s, gate
        self._sending = threading.Lock()

    def send(self, outputs: dict[str, NDArray[Any]], final: bool) -> None:
        """Write down an answer."""
        self._take(outputs, final)

    def fail(self, error: BaseException) -> None:
        """Write down the error."""
        self.error = error
        self._take({}, True)

    def acknowledge(self) -> None:
        """Clients do not wait for this."""

    def is_ready(self) -> bool:
        """Return what the test says of its reader."""
        return self.ready

    def is_cancelled(self) -> bool:
        """Return what the test says of the client."""
        if self.ended.is_set():
            self.faults.append("is_cancelled behind the end")
        self.num_looks += 1
        return self.cancelled

    def wait(self, timeout: float = 30.0) -> list[Mapping[str, NDArray[Any]]]:
        """Wait for the end and return the answers; raises the error the request ended with."""
        assert self.ended.wait(timeout), f"no end came; {len(self.answers)} answers"
        assert not self.faults, self.faults
        if self.error is not None:
            raise self.error
        return self.answers

    def tokens(self, row: int = 0, index: int = 0, timeout: float = 30.0) -> list[int]:
        """Wait for the end and return the tokens of one row's sequence, all answers together."""
        ids: list[int] = []
        for one in self.wait(timeout):
            place = (one["batch_index"].item() if "batch_index" in one else 0,)
            place += (one["sequence_index"].item() if "sequence_index" in one else 0,)
            if place == (row, index):
                ids += one["output_ids"][0, 0].tolist()
        return ids

    def _take(self, outputs: dict[str, NDArray[Any]], final: bool) -> None:
        if not self._sending.acquire(blocking=False):
            self.faults.append("two threads send at a time")
            return
        try:
            if self.ended.is_set():
                self.faults.append("an answer behind the end")
            if self._gate is not None:
                self._gate.wait(30)
            time.sleep(self._send_s)
            if outputs:
                self.answers.append(outputs)
                self.times.append(time.monotonic())
        finally:
            self._sending.release()
        if final:
            self.ended.set()
