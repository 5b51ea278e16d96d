"""bench/peer_quality.py and the peers' logits, without the peers: distances worked out by hand, files, refusals."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import peer_quality
from peer import logits


def of(*shares: float) -> np.ndarray:
    """Return logits of a distribution, moved by a constant: logits are known but for that."""
    return np.log(np.array(shares, np.float32)) + np.float32(3)


def test_equal_logits_lose_nothing() -> None:
    reference = np.stack([[of(0.5, 0.25, 0.25), of(0.1, 0.2, 0.7)]])
    found = peer_quality.quality(reference, iter(reference - 1))
    assert found["kl"] == pytest.approx(0, abs=1e-7) and found["top1"] == 1.0


def test_the_distance_is_that_of_the_definition() -> None:
    reference = np.stack([[of(0.5, 0.5), of(0.75, 0.25)], [of(0.5, 0.5), of(0.25, 0.75)]])
    subject = [np.stack([of(0.75, 0.25), of(0.25, 0.75)]), np.stack([of(0.5, 0.5), of(0.25, 0.75)])]
    # sum p log(p / q), p the reference's: 1/2 log(1/2 / 3/4) + 1/2 log(1/2 / 1/4); then 3/4 log 3 - 1/4 log 3.
    every = [0.5 * math.log(4 / 3), 0.5 * math.log(3), 0.0, 0.0]
    found = peer_quality.quality(reference, iter(subject))
    assert found["kl"] == pytest.approx(np.mean(every), abs=1e-6)
    assert found["kl_error"] == pytest.approx(np.std(every) / 2, abs=1e-6)
    assert found["kl_median"] == pytest.approx(np.median(every), abs=1e-6)
    assert found["kl_p99"] == pytest.approx(np.quantile(every, 0.99), abs=1e-6)
    assert found["top1"] == 0.75  # the tie of the first position goes to the first token on both sides


def test_an_engine_that_leaves_out_a_window_is_not_scored() -> None:
    reference = np.stack([[of(0.5, 0.5)], [of(0.5, 0.5)]])
    with pytest.raises(ValueError, match="zip"):
        peer_quality.quality(reference, iter(reference[:1]))


def test_the_table_begins_with_the_most_bits(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"kl": 0.1, "kl_error": 0.01, "kl_median": 0.1, "kl_p99": 0.5, "top1": 0.9}
    rows = {
        "four": {**row, "bits": 4.5},
        "worse": {**row, "bits": 8.5, "kl": 0.2},
        "eight": {**row, "bits": 8.4},
    }
    peer_quality.show(rows)
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == ["eight", "worse", "four"]
    assert lines[0] == "| eight | 8.40 | 1.00e-01 ± 1e-02 | 1.00e-01 | 5.00e-01 | 0.9000 |"


def test_other_groups_are_of_both_precisions() -> None:
    assert list(peer_quality.other_groups()) == ["int8 in 64", "int8 in 128", "int4 in 64", "int4 in 128"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--only", "lama"], "--only lama: there are plansmith, llama_cpp"),
        (["--only", ","], "--only ',': there are plansmith"),
        (["--tokens", "511"], "--tokens 511: at least a window of 512"),
        (["--threads", "0"], "--threads 0: from 1 to the"),
    ],
)
def test_what_cannot_run_is_refused(given: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        peer_quality.parse(given)
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


def test_every_peer_that_rounds_has_logits() -> None:
    assert set(peer_quality.PEERS) == set(logits.ENGINES)


def test_logits_are_written_window_by_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(model: str, variant: str, threads: int) -> logits.Logits:
        assert (model, variant, threads) == ("m", "int8", 2)
        return lambda window: np.array([[token, -token, 0.5] for token in window])

    monkeypatch.setitem(logits.ENGINES, "fake", engine)
    given, out = tmp_path / "windows.json", tmp_path / "logits.npy"
    given.write_text(json.dumps([[1, 2], [3, 4]]))
    logits.main("fake", "m", "int8", "2", str(given), str(out))
    written = np.load(out)
    assert written.dtype == np.float32 and written.shape == (2, 2, 3)
    assert written.tolist() == [[[1, -1, 0.5], [2, -2, 0.5]], [[3, -3, 0.5], [4, -4, 0.5]]]


def test_rows_that_an_engine_leaves_out_are_an_error() -> None:
    with pytest.raises(ValueError, match="1 rows of logits of 2 tokens"):
        list(logits.all_logits(lambda window: np.zeros((1, 3)), [[1, 2]]))
