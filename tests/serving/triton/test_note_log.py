"""Notes on requests are written once, and not without end."""

from __future__ import annotations

from plansmith.serving.triton.note_log import NoteLog


def test_a_note_is_written_once() -> None:
    lines: list[str] = []
    log = NoteLog(lines.append)
    for _ in range(3):
        log.add(["x has no effect", "y has no effect"])
    assert [line.split(": ")[1] for line in lines] == ["x has no effect", "y has no effect"]


def test_clients_cannot_fill_the_log() -> None:
    lines: list[str] = []
    log = NoteLog(lines.append, max_notes=4)
    for i in range(1000):
        log.add([f"{i} " + "x" * 10_000])
    assert len(lines) == 5 and max(map(len, lines)) < 400
    assert "further" in lines[-1]
