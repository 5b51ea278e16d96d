"""Parts of the supervisor that need no server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from plansmith.runtime.errors import InvalidArgumentError
from plansmith.serving.supervisor import processes
from plansmith.serving.supervisor.api import TritonError, counter_sum
from plansmith.serving.supervisor.calls import called_by_code, steps
from plansmith.serving.supervisor.canary import Canary, Outcome, Result, canary_inputs
from plansmith.serving.supervisor.control import stop, verdict
from plansmith.serving.supervisor.install import TritonInstall
from plansmith.serving.supervisor.loading import load_order
from plansmith.serving.supervisor.log_files import last_lines, put_aside
from plansmith.serving.supervisor.options import SupervisorOptions, read_canaries
from plansmith.serving.supervisor.orphans import end_orphans
from plansmith.serving.supervisor.report import StateReport
from plansmith.serving.supervisor.state import State, boot_id, read_state, write_state
from plansmith.serving.supervisor.stop_signals import Stop, StopSignals
from plansmith.serving.supervisor.supervisor import Supervisor

_ENSEMBLE = 'platform: "ensemble" ensemble_scheduling {{ step [ {{ model_name: "{}" }} ] }}'


def _repository(folder: Path, **configs: str) -> Path:
    for name, text in configs.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(text)
    return folder


def test_the_engine_is_loaded_first_and_ensembles_after_their_steps(tmp_path: Path) -> None:
    python = 'backend: "python"'
    repository = _repository(
        tmp_path,
        aaa=_ENSEMBLE.format("all"),
        all=_ENSEMBLE.format("zzz"),
        zzz=f'{python}  # platform: "ensemble" model_name: "aaa"',
        tensorrt_llm=python,
        tensorrt_llm_bls=python,
    )
    assert load_order([repository]) == ["tensorrt_llm", "zzz", "tensorrt_llm_bls", "all", "aaa"]
    assert load_order([repository], ["all"]) == ["zzz", "all"]
    with pytest.raises(InvalidArgumentError, match="no model nope"):
        load_order([repository], ["nope"])
    with pytest.raises(InvalidArgumentError, match="is no directory"):
        load_order([tmp_path / "nowhere"])


def test_logs_are_put_aside(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    assert not put_aside(log, 10)
    with log.open("ab") as writer:
        for number in range(6):
            writer.write(f"line {number} of a log\n".encode())
            writer.flush()
            assert put_aside(log, 10)
        writer.write(b"the end\n")
    assert last_lines(log, 5) == ["the end"]
    assert [last_lines(tmp_path / f"a.log.{one}", 1) for one in (1, 2, 3, 4)] == [
        ["line 5 of a log"],
        ["line 4 of a log"],
        ["line 3 of a log"],
        [],
    ]


def test_options_travel_as_json() -> None:
    options = SupervisorOptions(
        (Path("/a"),), Path("/b"), models=("x",), canaries={"x": {"IN": [1]}}, arguments=("-v",)
    )
    assert SupervisorOptions.from_json(options.to_json()) == options
    assert read_canaries(('x={"IN": [1]}',)) == {"x": {"IN": [1]}}
    for wrong in ("x", "x=1", '={"IN": 1}', "x={"):
        with pytest.raises(InvalidArgumentError, match="not of the form"):
            read_canaries((wrong,))


def test_models_that_are_known_are_tried_with_one_token() -> None:
    engine = {
        "input": [{"name": name} for name in ("input_ids", "input_lengths", "request_output_len", "seed")]
    }
    text = {"input": [{"name": "text_input"}, {"name": "max_tokens"}]}
    assert canary_inputs("m", engine, {}) == {"input_ids": [1], "input_lengths": 1, "request_output_len": 1}
    assert canary_inputs("m", text, {}) == {"text_input": "a", "max_tokens": 1}
    assert canary_inputs("m", text, {"m": {"text_input": "b"}}) == {"text_input": "b"}
    assert canary_inputs("m", {"input": [{"name": "QUERY"}]}, {}) is None


def test_counters_are_summed_by_label() -> None:
    text = '# HELP a b\na{m="x",v="1"} 2\na{m="x",v="2"} 3e0\na{m="y",v="1"} 9\nab{m="x"} 50\n'
    assert counter_sum(text, "a", {"m": "x"}) == 5
    assert counter_sum(text, "a", {"m": "z"}) == 0


def test_state_of_a_process_number_that_came_again(tmp_path: Path) -> None:
    me = processes.look_up(os.getpid())
    assert me is not None
    state = State(phase="running", boot_id=boot_id(), supervisor_pid=me.pid, supervisor_ticks=me.start_ticks)
    state.updated_at = time.time()
    assert verdict(state) == ("running", 0)
    state.models = {"m": {"ready": True, "canary": {"outcome": "silent"}}}
    assert verdict(state) == ("degraded", 1)
    state.updated_at -= 100
    assert verdict(state) == ("stuck", 1)
    state.supervisor_ticks += 1  # another process that has its number
    assert verdict(state) == ("lost", 3)
    state.supervisor_ticks, state.boot_id = me.start_ticks, "another"
    assert verdict(state) == ("lost", 3)
    write_state(tmp_path, state)
    assert stop(tmp_path) == "nothing is running"
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(InvalidArgumentError, match="is damaged"):
        read_state(tmp_path)


def test_only_marked_processes_are_orphans(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    marked = subprocess.Popen(words, env={**os.environ, "PLANSMITH_TRITON_RUN": "abc123test"})
    other = subprocess.Popen(words, env={**os.environ, "PLANSMITH_TRITON_RUN": "abc123test2"})
    try:
        region = Path("/dev/shm/plansmithabc123test-region")
        region.write_bytes(b"x")
        write_state(
            tmp_path, State(phase="running", boot_id=boot_id(), token="abc123test", server_pid=other.pid)
        )
        end_orphans(tmp_path)
        assert marked.wait(5) == -9
        assert other.poll() is None
        assert not region.exists()
    finally:
        marked.kill()
        other.kill()
        marked.wait()
        other.wait()
    assert json.loads((tmp_path / "state.json").read_text())["token"] == "abc123test"


def test_models_that_a_program_calls() -> None:
    def config(name: str, **texts: str) -> dict[str, object]:
        return {"name": name, "parameters": {key: {"string_value": text} for key, text in texts.items()}}

    assert called_by_code(config("tensorrt_llm_bls", tokenizer_dir="/t")) == {"tensorrt_llm"}
    named = config("text", tensorrt_llm_model_name="big", tensorrt_llm_draft_model_name="small")
    assert called_by_code(named) == {"big", "small"}
    assert called_by_code(config("text", tensorrt_llm_model_name=" ")) == {"tensorrt_llm"}
    assert called_by_code(config("tensorrt_llm", engine_dir="/e")) == frozenset()
    assert steps({"ensemble_scheduling": {"step": [{"model_name": "a"}, {"model_name": "b"}]}}) == ["a", "b"]


def test_a_log_that_cannot_be_copied_is_cut_all_the_same(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("x" * 100)
    (tmp_path / "a.log.1").touch()
    (tmp_path / "a.log.2").mkdir()  # in the way
    (tmp_path / "a.log.2" / "file").touch()
    assert put_aside(log, 10)
    assert log.stat().st_size == 0


def test_a_state_that_cannot_be_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "state.json" / "file"
    in_the_way.parent.mkdir()
    in_the_way.touch()
    report = StateReport(SupervisorOptions((Path("/a"),), tmp_path))
    report.say("running", "one")
    report.say("running", "two")
    assert len([one for one in caplog.records if "cannot be written" in one.message]) == 1
    in_the_way.unlink()
    in_the_way.parent.rmdir()
    report.write()
    found = read_state(tmp_path)
    assert found is not None
    assert (found.message, found.supervisor_pid, found.is_supervised) == ("two", os.getpid(), True)


def test_an_order_to_stop_waits_for_what_must_not_be_left_half_done() -> None:
    signals = StopSignals()
    done = []
    with signals.taken(), pytest.raises(Stop), signals.interruptible():
        with signals.held():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("whole")
        done.append("never")
    assert done == ["whole"]
    with pytest.raises(Stop), signals.interruptible():  # it was given, however late that is asked
        done.append("never")
    assert signals.num_stops == 1


def test_a_signal_goes_to_the_process_that_is_meant() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        found = processes.look_up(child.pid)
        assert found is not None
        assert not processes.send_signal(child.pid, found.start_ticks + 1, signal.SIGKILL)
        assert child.poll() is None
        assert processes.send_signal(child.pid, found.start_ticks, signal.SIGKILL)
        assert child.wait(5) == -signal.SIGKILL
        assert not processes.send_signal(child.pid, found.start_ticks, signal.SIGKILL)
    finally:
        child.kill()
        child.wait()


def test_a_program_that_hangs_when_it_is_asked_for_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(*_words: object, **_options: object) -> None:
        raise subprocess.TimeoutExpired("tritonserver", 60)

    python = Path(sys.executable)
    install = TritonInstall(python, tmp_path, tmp_path, None, None, python, None)
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").touch()
    monkeypatch.setattr(subprocess, "run", hang)
    assert install.options() == frozenset()
    install.compile_models([tmp_path])
    assert "two minutes" in install.import_failure("plansmith", tmp_path)


def test_a_server_that_answers_a_look_with_an_error_is_not_ended(tmp_path: Path) -> None:
    supervisor = Supervisor(SupervisorOptions((tmp_path,), tmp_path))
    server = Mock(answers=None, names=["m"])
    server.describe.side_effect = TritonError("too busy to list models")
    supervisor._keeper.server = server
    supervisor._look()
    assert read_state(tmp_path) is not None
    server.process.kill.assert_not_called()


def test_a_canary_outlives_a_try_that_fails_in_an_unknown_way(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []

    def attempt() -> Result:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("planted")
        return Result(Outcome.ANSWERED, 0.0, 1.0)

    canary = Canary(attempt, 0.01)
    deadline = time.monotonic() + 10
    while canary.last is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    canary.stop()
    assert canary.has_answered
    assert "a bug in plansmith" in caplog.text
