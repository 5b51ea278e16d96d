"""Runs one stage in this process: `stage_main.py NAME ROWS_FILE`. check.py starts it."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from bench_device import Device
from finding import Findings


def main() -> None:
    """Import the stage and let it write its rows; an exception is the process's exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("rows_file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    device = Device(options.dry_run, options.seed, options.shard, options.shards)
    findings = Findings(options.rows_file, options.dry_run, options.limit_s)
    importlib.import_module(f"stage_{options.name}").run(device, findings)


if __name__ == "__main__":
    main()
