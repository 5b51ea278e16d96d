"""bench/peers.py from its command line: what it refuses, what is left of a run that ends early, and of a whole one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

sys.path.insert(0, str(Path(__file__).resolve().parent))

import peers
import smoke
from fake_peer import FAKE, module
from peer import driver
from peer.session import process_tree
from peer.variants import Variant
from runs import WORKLOAD

FAKE_PEER = Path(__file__).with_name("fake_peer.py")
LONG_S = 60.0


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--tests", ""], "names no test; there are single, prefill, conc16, shared16"),
        (["--tests", " ,"], "names no test"),
        (["--tests", "single,doubel"], "no test 'doubel'; there are single"),
        (["--rounds", "0"], "--rounds 0: at least 1"),
        (["--quick", "--rounds", "-3"], "--rounds -3: at least 1"),
        (["--threads", "0"], "--threads 0: from 1 to the"),
        (["--threads", "-1"], "--threads -1: from 1 to the"),
        (["--threads", "100000"], "cores that this process may use"),
        (["--run-timeout", "0"], "--run-timeout 0.0: more than 0 seconds"),
        (["--start-timeout", "nan"], "--start-timeout nan: more than 0 seconds"),
        (["--variants", ""], "--variants: '' names no variant; there are plansmith:int8"),
        (["--variants", "lama_cpp"], "--variants: no variant 'lama_cpp'; there are plansmith:int8"),
        (["--quick", "--store"], "a quick run is no result to keep"),
        (["--name", "decode"], "together with --store"),
        (["--store", "--name", "../x"], "letters, digits and _"),
        (["--model", "llama1b", "--variants", "openvino:q4_0"], "no variant 'openvino:q4_0'"),
    ],
)
def test_what_cannot_run_is_refused(given: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        peers.parse(given)
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--rounds", "0"], "--rounds 0: at least 1"),
        (["--threads", "0"], "--threads 0: from 1 to the"),
        (["--threads", "100000"], "cores that this process may use"),
        (
            ["--variants", "plansmith:int3"],
            "--variants: no variant 'plansmith:int3'; there are plansmith:int8",
        ),
        (["--variants", ","], "names no variant"),
    ],
)
def test_what_a_smoke_run_cannot_run_is_refused(
    given: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        smoke.parse(given)
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err
    assert [v.slug for v in smoke.parse(["--variants", "plansmith:int4"]).variants] == ["plansmith:int4"]


@pytest.mark.parametrize(
    ("given", "short"),
    [
        ([], []),
        (["--rounds", "2"], ["Fewer rounds than a comparison takes: 2 of at least 3."]),
        (["--rounds", "2", "--model", "llama1b"], []),
        (["--tests", "single,prefill"], ["Tests that were not run: conc16, shared16."]),
        (["--quick", "--rounds", "3"], ["A quick run: no fresh starts were measured."]),
    ],
)
def test_what_makes_a_run_less_than_a_whole_comparison(given: list[str], short: list[str]) -> None:
    assert peers.head_of(peers.parse(given))["short_of"] == short


def test_variants_that_are_not_run_are_named() -> None:
    head = peers.head_of(peers.parse(["--variants", "plansmith,llama_cpp:q8_0"]))
    assert "llama.cpp q4_0" in head["not_run"] and "vLLM CPU float32" in head["not_run"]
    assert not {"llama.cpp q8_0", "plansmith int8"} & set(head["not_run"])
    assert peers.head_of(peers.parse([]))["not_run"] == []


def small_settings(tmp_path: Path) -> driver.Settings:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    return driver.Settings(tmp_path / "work", model, WORKLOAD, ["single"], threads=1)


def test_kept_reference_tokens_are_of_this_checkpoint_and_these_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = small_settings(tmp_path)
    started: list[str] = []

    def chosen(everything: object, wanted: str) -> list[Variant]:
        started.append(wanted)
        reference = module("transformers", "fp32")
        reference.NAME = "transformers"
        reference.command = lambda *_: [sys.executable, str(FAKE), "ok"]
        return [Variant(reference, "fp32")]

    monkeypatch.setattr(peers.variants, "chosen", chosen)
    first = WORKLOAD.tests["single"][0]["prompt_ids"][0]
    wanted = [first + i for i in range(128)]
    assert peers.reference_tokens(settings) == wanted
    assert peers.reference_tokens(settings) == wanted
    assert started == ["transformers:fp32"]
    (settings.checkpoint / "model.safetensors").write_bytes(b"wexghts")
    assert peers.reference_tokens(settings) == wanted
    assert len(started) == 2
    kept = settings.work / "models" / "model" / "reference-single.json"
    kept.write_text(json.dumps([1, 2, 3]))  # as an earlier version wrote them: of what, it does not say
    assert peers.reference_tokens(settings) == wanted
    assert len(started) == 3
    monkeypatch.setattr(peers.metadata, "version", lambda name: "0")
    assert peers.reference_tokens(settings) == wanted
    assert len(started) == 4


def test_tokens_are_counted_from_the_first() -> None:
    assert peers.equal_tokens([1, 2, 3], {"A": [1, 2, 4], "B": [2]}) == {"A": 2, "B": 0}
    assert peers.equal_tokens([], {"A": [1]}) == {}


def test_what_is_not_given() -> None:
    args = peers.parse([])
    assert (args.rounds, args.tests, args.reload) == (5, ["single", "prefill", "conc16", "shared16"], False)
    assert len({v.slug.split(":")[0] for v in args.variants}) == 7
    assert peers.parse(["--quick"]).rounds == 1
    assert peers.parse(["--quick", "--rounds", "2"]).rounds == 2
    assert peers.parse(["--tests", "single, prefill,single"]).tests == ["single", "prefill"]
    large = peers.parse(["--model", "llama1b"])
    assert large.reload and not any(v.name in ("fp32", "f32", "float32") for v in large.variants)
    assert not peers.parse(["--model", "llama1b", "--no-reload"]).reload


def test_where_plansmith_is_not_built_what_to_run_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PLANSMITH_LIBRARY", str(tmp_path))
    with pytest.raises(SystemExit, match=r"has no libplansmith.*\n.*make build"):
        peers.check_plansmith()
    (tmp_path / "plansmith.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"ModuleNotFoundError.*\n.*make build"):
        peers.check_plansmith()


def start(work: Path, words: str, *more: str) -> subprocess.Popen[str]:
    """Return bench/peers.py with engines of these words, two rounds of two tests."""
    command = [sys.executable, str(FAKE_PEER), str(work), words, "--model", "llama1b", "--variants", "fake"]
    command += ["--tests", "single,conc16", "--rounds", "2", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("more", [[], ["--no-reload", "--quick"]])
def test_a_whole_run_leaves_a_report(tmp_path: Path, more: list[str]) -> None:
    run = start(tmp_path, "int8-ok,int4-ok", *more)
    out, err = run.communicate(timeout=LONG_S)
    assert run.returncode == 0, err
    assert (tmp_path / "report-llama1b.md").read_text() + "\n" == out
    assert "| Fake int8-ok | " in out and "| Fake int4-ok | " in out
    assert out.startswith("plansmith at commit ")
    assert "Tests that were not run: prefill, shared16." in out
    assert "Not run: none of the variants there are." in out
    assert "| Fake int8-ok | 1.0 |" in out
    assert out.count("n=2)") > 8
    assert not list(tmp_path.glob("partial*"))


def test_a_part_of_the_variants_is_named_as_a_part(tmp_path: Path) -> None:
    run = start(tmp_path, "int8-ok,int4-ok,int8-dies", "--variants", "fake:int8-ok,fake:int8-dies")
    out, err = run.communicate(timeout=LONG_S)
    assert run.returncode == 0, err
    assert "\n\nNot run: Fake int4-ok.\n\n" in out
    assert "left out because they failed: Fake int8-dies" in out
    assert str(tmp_path) not in out


def test_samples_are_kept_where_the_report_fails(tmp_path: Path) -> None:
    run = start(tmp_path, "int8-ok,unreported")
    out, err = run.communicate(timeout=LONG_S)
    assert (run.returncode, out) == (1, "") and "KeyError: 'no report'" in err
    kept = json.loads((tmp_path / "partial-llama1b.json").read_text())
    assert {(s["round"], s["test"]) for s in kept["samples"]} == {
        (r, test) for r in (0, 1) for test in ("start", "single", "conc16")
    }
    assert kept["not_run"] == [] and kept["threads"] >= 1
    assert not (tmp_path / "report-llama1b.md").exists()


@pytest.mark.parametrize("more", [[], ["--no-reload"]])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_keeps_what_it_measured_and_ends_its_engines(
    tmp_path: Path, number: signal.Signals, code: int, more: list[str]
) -> None:
    run = start(tmp_path, "int8-ok,int4-stalls", *more)
    assert run.stderr is not None
    for line in run.stderr:
        if "int4-stalls" in line and "decode_tokens_per_s" in line:
            break
    # It stalls in the next test, of 16 requests.
    pids = [pid for pid in process_tree(run.pid) if pid != run.pid]
    assert len(pids) >= 2
    run.send_signal(number)
    out, err = run.communicate(timeout=LONG_S)
    assert run.returncode == code
    assert "Traceback" not in err and out == ""
    assert "samples so far are in" in err
    wait_until(lambda: all(ended(pid) for pid in pids))
    text = (tmp_path / "partial-llama1b.md").read_text()
    assert text.startswith("Interrupted in round 1 of 2: not a whole run")
    assert "| Fake int8-ok | " in text and "| Fake int4-stalls | " in text
    kept = json.loads((tmp_path / "partial-llama1b.json").read_text())
    assert kept["whole"] is False
    assert list(dict.fromkeys(s["engine"] for s in kept["samples"])) == ["Fake int8-ok", "Fake int4-stalls"]
    assert not (tmp_path / "report-llama1b.md").exists()


def test_a_run_interrupted_before_its_first_sample_ends_quietly(tmp_path: Path) -> None:
    run = start(tmp_path, "int8-hangs", "--no-reload")
    log = tmp_path / "logs" / "fake-int8-hangs-start.log"
    wait_until(lambda: log.exists() and "and chats" in log.read_text())
    pids = process_tree(run.pid)
    os.kill(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=LONG_S)
    assert (run.returncode, out) == (130, "") and "Traceback" not in err
    wait_until(lambda: all(ended(pid) for pid in pids))
    assert not list(tmp_path.glob("partial*"))
