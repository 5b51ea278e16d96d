"""Sessions with a real child process: what it answers, that it stands still between runs, how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from peer.session import PeerError, Session, cpu_seconds, installed, process_tree

ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).with_name("fake_engine.py")
REQUESTS = [{"prompt_ids": [5, 1], "output_len": 3}, {"prompt_ids": [9, 2], "output_len": 20}]
LONG_S = 60.0


@pytest.fixture
def open_session(tmp_path: Path) -> Iterator[object]:
    sessions: list[Session] = []

    def start(how: str) -> Session:
        session = Session([sys.executable, str(FAKE), how], tmp_path / f"{how}.log", os.environ, LONG_S)
        sessions.append(session)
        return session

    yield start
    for session in sessions:
        session.kill()


def processes(session: Session) -> list[int]:
    return process_tree(session._process.pid)


def state(pid: int) -> str:
    """Return the letter of a process's state; "" once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def wait_until(condition) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_answers(open_session, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    session = open_session("ok")
    assert session.version(LONG_S) == "1.0"
    assert 0 <= session.load_s <= session.start_s
    for _ in range(2):
        answer = session.run(REQUESTS, LONG_S)
        assert answer["token_ids"] == [[5, 6, 7], list(range(9, 29))]
        for ttft_s, end_s in zip(answer["ttft_s"], answer["end_s"], strict=True):
            assert 0 <= ttft_s <= end_s <= answer["wall_s"]
        assert answer["peak_rss_bytes"] > 1 << 20
        assert answer["cpu_s"] >= 0
    session.close()
    assert session._process.returncode == 0
    assert "and chats while it runs" in (tmp_path / "ok.log").read_text()


def test_the_version_of_a_package_is_that_installed() -> None:
    assert installed("pytest", "?") == pytest.__version__
    assert installed("a-package-that-nobody-has", "1.2") == "1.2"


def test_nothing_of_an_idle_engine_runs(open_session) -> None:  # type: ignore[no-untyped-def]
    session = open_session("spins")
    session.run(REQUESTS, LONG_S)
    pids = processes(session)
    assert len(pids) == 2
    wait_until(lambda: all(state(pid) == "T" for pid in pids))
    before = cpu_seconds(pids)
    time.sleep(0.2)
    assert cpu_seconds(pids) == before
    assert session.run(REQUESTS, LONG_S)["token_ids"][0] == [5, 6, 7]
    session.kill()
    wait_until(lambda: all(state(pid) in ("", "Z") for pid in pids))


def test_an_error_of_a_run_names_the_log_and_ends_nothing(open_session) -> None:  # type: ignore[no-untyped-def]
    session = open_session("refuses")
    for _ in range(2):
        with pytest.raises(PeerError, match=r"ValueError: too many tokens; see .*refuses\.log"):
            session.run(REQUESTS, LONG_S)


def test_an_engine_that_dies_at_its_start(open_session, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PeerError, match=r"ended before it answered; see .*dies\.log"):
        open_session("dies")
    assert "no such model" in (tmp_path / "dies.log").read_text()


def test_an_engine_that_does_not_answer_is_ended(open_session) -> None:  # type: ignore[no-untyped-def]
    session = open_session("hangs")
    with pytest.raises(PeerError, match="no answer within 0 s"):
        session.run(REQUESTS, 0.2)
    assert session._process.returncode == -signal.SIGKILL
    with pytest.raises(PeerError, match="has ended"):
        session.run(REQUESTS, LONG_S)


def test_a_stopped_engine_ends_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\n"
        f"sys.path.insert(0, {str(ROOT / 'bench')!r})\n"
        "from pathlib import Path\n"
        "from peer.session import Session\n"
        f"session = Session([sys.executable, {str(FAKE)!r}, 'ok'], Path({str(tmp_path / 'log')!r}), os.environ, 60)\n"
        "session.sleep()\n"
        "print(session._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert state(pid) != ""
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: state(pid) in ("", "Z"))
