"""Share of the allocated KV positions that hold nothing, from the engine's statistics, beside the least there can be.

    python bench/kv_waste.py

Waste is 1 - used / allocated, both summed over all steps of the 16-request workload. Blocks are allocated as positions
are filled, so what is empty is the rest of each sequence's last block. The least possible takes every sequence of every
decode step and rounds its length up to whole blocks; no allocator of whole, unshared blocks can be below it.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import common


def least_waste(requests: list[dict[str, Any]], block: int) -> float:
    """Return the waste of an ideal allocator over the decode steps of all requests."""
    allocated = used = 0
    for request in requests:
        start = len(request["prompt_ids"])
        for length in range(start, start + request["output_len"]):
            allocated += -(-length // block) * block
            used += length
    return 1 - used / allocated


def main() -> None:
    """Measure, print the table, store the results."""
    requests = common.workload()["requests16"]
    rows, results = [], {}
    for block in (8, 16, 32):
        engine = common.engine("int8", "--tokens-per-block", str(block), name=f"int8-block{block}")
        command = [*common.PLANSMITH, "bench", str(engine), "--workload", str(common.WORKLOAD)]
        out = subprocess.check_output([*command, "--set", "requests16", "--threads", "2", "--json"])
        kv = json.loads(out)["kv"]
        least = least_waste(requests, block)
        rows.append([block, f"{kv['waste']:.1%}", f"{least:.1%}", kv["peak_used_blocks"]])
        results[str(block)] = {"waste": kv["waste"], "least_waste": least, **kv}
    print(common.table(["positions in a block", "waste", "least possible", "blocks in use at most"], rows))
    common.store("kv_waste", results)


if __name__ == "__main__":
    main()
