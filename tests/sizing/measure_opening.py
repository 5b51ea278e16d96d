"""Opens a cpu plan as an engine and prints how much address space that took, as JSON; run in a process of its own.

    python measure_opening.py PLAN '{"num_threads": 2, "weights": "mapped", ...}' STACK_BYTES

Pages that nobody may touch (guards, what malloc keeps for arenas) and stacks of threads do not count.
"""

from __future__ import annotations

import json
import sys


def mappings() -> dict[str, int]:
    """Return the accessible mappings of this process: address range -> bytes."""
    found: dict[str, int] = {}
    name = ""
    with open("/proc/self/smaps", encoding="utf-8") as file:  # noqa: PTH123
        for line in file:
            words = line.split()
            if not words[0].endswith(":"):
                name = words[0] if words[1] != "---p" else ""
            elif words[0] == "Size:" and name:
                found[name] = int(words[1]) * 1024
    return found


def counted(found: dict[str, int], stack_bytes: int) -> int:
    """Return the bytes of mappings that are no stacks."""
    return sum(size for size in found.values() if size not in (stack_bytes, stack_bytes - 4096))


def main(plan: str, options: dict[str, object], stack_bytes: int) -> None:
    """Open, measure, print."""
    from plansmith.runtime._native import native
    from plansmith.runtime.engine_options import EngineOptions
    from plansmith.runtime.executor import cpu_executor
    from plansmith.runtime.native_engine import NativeEngine

    engine_options = EngineOptions(manual_step=True, **options.pop("engine"))  # type: ignore[arg-type]
    native()
    before = counted(mappings(), stack_bytes)
    executor = cpu_executor(plan, max_num_tokens=engine_options.max_num_tokens, **options)  # type: ignore[arg-type]
    engine = NativeEngine(executor, engine_options)
    grown = counted(mappings(), stack_bytes) - before
    blocks = engine.stats().max_num_blocks
    engine.close()
    print(json.dumps({"grown_bytes": grown, "num_blocks": blocks}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
