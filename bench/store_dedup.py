"""What plans share, as a store sees it: the bytes and chunks that each further plan adds, at several chunk sizes.

    python bench/store_dedup.py ENGINE_DIR ... [--average-kib 256 512 1024 2048]

Plans are taken in the order of the directories and, in each, of their targets' names. Cuts are the store's
(plansmith.fleet.store), at the size it uses and at others. With --store the files of all directories, not only the
plans, are also put into a store in a temporary folder, and its size is measured.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from pathlib import Path
from typing import Any

import common
from plansmith.fleet.store import open_store, verify
from plansmith.fleet.store.chunks import AVERAGE_BYTES, cut


def plans_of(engine: Path) -> list[Path]:
    """Return the plans of an engine directory."""
    found = sorted((engine / "targets").glob("*/*.plan"))
    if not found:
        raise SystemExit(f"{engine} has no targets/*/*.plan; give engine directories")
    return found


def measure(plans: list[Path], average_bytes: int) -> list[dict[str, Any]]:
    """Return what each plan has, and what of it no plan before has."""
    seen: set[bytes] = set()
    rows = []
    for plan in plans:
        chunks = new_chunks = new_bytes = 0
        for data in cut(plan, average_bytes):
            digest = hashlib.sha256(data).digest()
            chunks += 1
            if digest not in seen:
                seen.add(digest)
                new_chunks += 1
                new_bytes += len(data)
        name = f"{plan.parents[2].name}/{plan.parent.name}"
        made = {"chunks": chunks, "new_chunks": new_chunks, "new_bytes": new_bytes}
        rows.append({"plan": name, "bytes": plan.stat().st_size, **made})
    return rows


def measure_store(engines: list[Path]) -> dict[str, int]:
    """Return the bytes of all files of engines, and of a store that has them all, checked by reading it back."""
    with tempfile.TemporaryDirectory(prefix="plansmith-store-") as folder:
        store = open_store(Path(folder) / "store")
        num_bytes = 0
        for engine in engines:
            paths = sorted(
                path.relative_to(engine).as_posix() for path in engine.rglob("*") if path.is_file()
            )
            num_bytes += sum(file.size for file in store.add_files(engine, paths))
        if problems := verify(store):
            raise SystemExit(f"the store is damaged: {problems}")
        stored = sum(path.stat().st_size for path in store.root.rglob("*") if path.is_file())
        return {"bytes": num_bytes, "store_bytes": stored}


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engines", nargs="+", type=Path)
    parser.add_argument("--average-kib", nargs="+", type=int, default=[AVERAGE_BYTES >> 10])
    parser.add_argument("--store", action="store_true")
    arguments = parser.parse_args()
    plans = [plan for engine in arguments.engines for plan in plans_of(engine.resolve())]
    for kib in arguments.average_kib:
        rows = measure(plans, kib << 10)
        print(f"\ncut at {kib} KiB and more (chunks of {kib // 4} to {kib * 4} KiB)\n")
        header = ["plan", "MB", "chunks", "new chunks", "new MB"]
        lines = [[r["plan"], mb(r["bytes"]), r["chunks"], r["new_chunks"], mb(r["new_bytes"])] for r in rows]
        totals = [sum(row[name] for row in rows) for name in ("chunks", "new_chunks")]
        lines.append(
            ["all", mb(sum(r["bytes"] for r in rows)), *totals, mb(sum(r["new_bytes"] for r in rows))]
        )
        print(common.table(header, lines))
    if arguments.store:
        sizes = measure_store([engine.resolve() for engine in arguments.engines])
        print(f"\nall files {mb(sizes['bytes'])} MB, in a store {mb(sizes['store_bytes'])} MB")


def mb(num_bytes: int) -> str:
    """Return megabytes (10^6 bytes)."""
    return f"{num_bytes / 1e6:.1f}"


if __name__ == "__main__":
    main()
