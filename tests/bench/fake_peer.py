"""Peers' modules whose engines are those of fake_engine.py, and bench/peers.py run with them.

    python fake_peer.py <work folder> <words of fake_engine.py, with commas> [arguments of bench/peers.py]

With a word `unreported` among them, making the report fails. Real processes count instead of computing. Nothing is
installed or compiled, and the machine's peaks are made up.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import peers
from peer import roofline
from peer import variants as variants_module
from peer.variants import Variant
from runs import PEAKS

FAKE = Path(__file__).with_name("fake_engine.py")


def module(name: str, *variants: str, broken: bool = False) -> ModuleType:
    """Return a peer's module whose variants behave as fake_engine.py's word of that name."""

    def install(work: Path, log: Path) -> None:
        if broken:
            raise KeyError("no such package")

    made: Any = ModuleType(f"peer.{name}")
    made.NAME = name.capitalize()
    made.VARIANTS = variants
    made.install = install
    made.convert = lambda checkpoint, work, variant: checkpoint
    made.weight_bytes = lambda model, variant: 1000
    made.command = lambda work, checkpoint, variant, threads: [sys.executable, str(FAKE), variant]
    return made  # type: ignore[no-any-return]


def variants(*modules: ModuleType) -> list[Variant]:
    return [Variant(m, name) for m in modules for name in m.VARIANTS]


def main(work: Path, words: list[str]) -> None:
    """Run bench/peers.py with one peer that has these variants."""
    if "unreported" in words:
        words.remove("unreported")
        peers.report.markdown = lambda *_: {}["no report"]
    made = variants(module("fake", *words))
    model = work / "model"
    model.mkdir(parents=True)
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    config = dict.fromkeys((*sizes, "num_hidden_layers"), 1) | {"vocab_size": 49152}
    (model / "config.json").write_text(json.dumps(config))
    replaced: dict[Any, dict[str, Any]] = {
        peers: {"WORK": work, "checkpoint": lambda name: model, "check_plansmith": lambda: None},
        roofline: {"measure_peaks": lambda threads: PEAKS},
        variants_module: {"all_variants": lambda: made},
    }
    for owner, names in replaced.items():
        for name, value in names.items():
            setattr(owner, name, value)
    peers.main()


if __name__ == "__main__":
    _work, _words = Path(sys.argv[1]), sys.argv[2].split(",")
    sys.argv[1:3] = []
    main(_work, _words)
