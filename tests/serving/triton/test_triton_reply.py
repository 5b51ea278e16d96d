"""A reply beside a server that hangs. Only a server has the Python backend's module, so it is played here."""

from __future__ import annotations

import importlib
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
from plansmith.runtime.errors import InvalidArgumentError, QueueFullError

_NAME = "plansmith.serving.triton.triton_reply"


class Sender:
    """A response sender whose sends wait for a gate."""

    def __init__(self) -> None:
        self.gate, self.is_sending = threading.Event(), threading.Event()
        self.num_sent = 0

    def send(self, *_arguments: Any, **_flags: Any) -> None:
        self.is_sending.set()
        assert self.gate.wait(30)
        self.num_sent += 1

    def is_cancelled(self) -> bool:
        return True


@pytest.fixture
def reply(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Sender]]:
    """Return a reply and its sender."""
    codes = {name: name for name in ("INVALID_ARG", "UNAVAILABLE", "NOT_FOUND", "UNSUPPORTED", "INTERNAL")}
    backend = types.SimpleNamespace(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        TritonError=type("TritonError", (), {**codes, "__new__": lambda _cls, text, code: (text, code)}),
        InferenceResponse=lambda output_tensors, error: error,
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, _NAME, raising=False)
    sender = Sender()
    request = types.SimpleNamespace(get_response_sender=lambda: sender)
    yield importlib.import_module(_NAME).TritonReply(request, is_decoupled=True), sender
    sender.gate.set()
    sys.modules.pop(_NAME, None)  # the one that was played for


def test_a_last_answer_that_hangs_holds_up_nobody_who_asks_for_the_client(reply: tuple[Any, Sender]) -> None:
    """The one thread that asks for all clients also finds sends that are stuck: it must not be stuck itself."""
    one, sender = reply
    assert one.is_cancelled()
    threads = [threading.Thread(target=one.send, args=({}, True)) for _ in range(2)]
    threads[0].start()
    assert sender.is_sending.wait(10)
    asked = threading.Event()
    threading.Thread(target=lambda: (one.is_cancelled(), asked.set()), daemon=True).start()
    assert asked.wait(5)
    assert not one.is_cancelled()
    threads[1].start()
    sender.gate.set()
    for thread in threads:
        thread.join(10)
    assert (
        sender.num_sent == 1 and not one.is_cancelled()
    )  # one end, and nothing is asked of the server behind it


def test_an_error_has_a_code_of_its_kind_and_a_text_that_can_be_sent(reply: tuple[Any, Sender]) -> None:
    make = importlib.import_module(_NAME).error_response
    assert make(InvalidArgumentError("no \ud800")) == ("no ?", "INVALID_ARG")
    assert make(QueueFullError("later")) == ("later", "UNAVAILABLE")
    assert make(KeyError("x")) == ("KeyError: 'x'; this is a bug", "INTERNAL")
