"""An engine for tests of the benchmarks' sessions: counts up from the first prompt id; misbehaves where it is told to.

    python fake_engine.py <how>

how : ok | dies | hangs | stalls | refuses | short | repeats | spins; the others than `ok` are what goes wrong. `stalls`
      hangs at 16 requests of a round, with a process of its own below it. What precedes a dash is ignored: int8-ok is
      as ok
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from peer.session import Record, Request, serve

VOCAB_SIZE = 49152


def spin() -> None:
    while True:
        pass


def load(how: str):  # type: ignore[no-untyped-def]
    print("a library that greets on stdout")
    if how == "dies":
        raise RuntimeError("no such model")
    if how == "spins":
        threading.Thread(target=spin, daemon=True).start()
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
    if how == "stalls":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def run(requests: list[Request], record: Record) -> None:
        print("and chats while it runs")
        in_a_round = requests[0]["prompt_ids"][0] >= 1000
        if how == "hangs" or (how == "stalls" and len(requests) == 16 and in_a_round):
            time.sleep(600)
        if how == "refuses":
            raise ValueError("too many tokens")
        for idx, request in enumerate(requests):
            first = request["prompt_ids"][0]
            for i in range(request["output_len"] - (how == "short")):
                record(idx, [(first + (0 if how == "repeats" else i)) % VOCAB_SIZE])

    return run


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1].rpartition("-")[2]), lambda: "1.0")
