"""Building, checking and serving need neither torch nor transformers, nor do they look for them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PROGRAM = """
import importlib.abc, sys

asked = []

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "accelerate"):
            asked.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
from plansmith.cli import main

checkpoint, gguf, engine = sys.argv[1:]
limits = ["--max-seq-len", "64", "--tokens-per-block", "8"]
for words in (
    ["build", checkpoint, "-o", engine, "--precision", "int8", *limits],
    ["build", gguf, "-o", engine + "-gguf", "--precision", "int4", "--dry-run"],
    ["inspect", engine, "--plan"],
    ["verify", engine, "--sequences", "2", "--length", "8"],
    ["eval", engine, "--length", "64", "--contexts", "16", "--sensitivity", "--sensitivity-tokens", "32"],
    ["generate", engine, "the quick fox", "--max-tokens", "4", "--json"],
    ["bench", engine, "--requests", "2", "--input-len", "4", "--output-len", "2"],
):
    try:
        main(words)
    except SystemExit as end:
        assert not end.code, (words, end.code)
assert not asked, asked
"""


def test_every_command(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    from tiny_gguf import write_gguf

    gguf = write_gguf(tiny_checkpoint("llama"), tmp_path / "model.gguf")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny_checkpoint("llama")), str(gguf), str(tmp_path / "engine")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answer = next(line for line in done.stdout.splitlines() if line.startswith('{"text"'))
    assert len(json.loads(answer)["token_ids"]) == 4
