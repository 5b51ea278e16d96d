"""Writes the tables of docs/kernels.md: what each device kernel takes of a GPU, and the least that each operator moves.

python tools/kernel_tables.py [--from build/kernels/resources.json] [--check]

--from takes what `make kernels` measured into docs/results/kernels.json; the page is made from that. With --check
nothing is written, and it is an error if the page is not what the results and the code say, or the results lack a
kernel of the catalog. A table stands between `<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from plansmith.plugins.catalog import catalog, ops
from plansmith.plugins.gather_last import spec as gather_last
from plansmith.plugins.kernel import Cost
from plansmith.plugins.kv_write import spec as kv_write
from plansmith.plugins.paged_attention import spec as paged_attention
from plansmith.plugins.rejection import spec as rejection
from plansmith.plugins.sampling import spec as sampling

_DOCS = Path(__file__).parents[1] / "docs"
_PAGE, _RESULTS = _DOCS / "kernels.md", _DOCS / "results" / "kernels.json"
_SHOWN_SMS = (80, 90)
_FACTS = ("num_warps", "registers", "shared_bytes", "stack_bytes", "spill_bytes")
_MARK = re.compile(r"(<!-- table (\w+) -->\n)(.*?)(<!-- end -->)", re.S)


def results_of(report: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a report of `plansmith.plugins.aot`: each kernel on two SMs, each SM in one line."""
    rows: dict[str, dict[str, Any]] = {}
    sms: dict[str, dict[str, int]] = {}
    for one in report["kernels"]:
        spills = one["spill_store_bytes"] + one["spill_load_bytes"]
        shared = one["shared_bytes"] + one["static_shared_bytes"]
        total = sms.setdefault(
            f"sm{one['sm']}", {"kernels": 0, "max_registers": 0, "max_shared_bytes": 0, "spilling": 0}
        )
        total["kernels"] += 1
        total["max_registers"] = max(total["max_registers"], one["registers"])
        total["max_shared_bytes"] = max(total["max_shared_bytes"], shared)
        total["spilling"] += spills > 0
        if one["sm"] in _SHOWN_SMS:
            facts = {**one, "shared_bytes": shared, "spill_bytes": spills}
            row = rows.setdefault(one["name"], {"op": one["op"]})
            row[f"sm{one['sm']}"] = {name: facts[name] for name in _FACTS}
    return {"triton_version": report["triton_version"], "sms": sms, "kernels": dict(sorted(rows.items()))}


def fill(text: str, results: dict[str, Any]) -> str:
    """Return the page with its tables."""
    made = {"costs": _costs(), "sms": _sms(results), "kernels": _kernels(results)}
    return _MARK.sub(lambda found: f"{found[1]}\n{made[found[2]]}\n\n{found[4]}", text)


def _table(head: str, rows: Iterable[Iterable[object]]) -> str:
    lines = [f"| {head} |", "|" + "---|" * len(head.split(" | "))]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def _sms(results: dict[str, Any]) -> str:
    return _table(
        "GPU | kernels | registers of a thread, at most | shared memory of a program, at most | that spill",
        (
            (
                name,
                one["kernels"],
                one["max_registers"],
                f"{one['max_shared_bytes'] / 1024:.0f} KiB",
                one["spilling"],
            )
            for name, one in results["sms"].items()
        ),
    )


def _kernels(results: dict[str, Any]) -> str:
    parts = []
    for op in ops():
        rows = [
            (f"`{name}`", *(cell for sm in _SHOWN_SMS for cell in _cells(row.get(f"sm{sm}"))))
            for name, row in results["kernels"].items()
            if row["op"] == op
        ]
        head = "kernel | " + " | ".join(
            f"{what}, sm{sm}" for sm in _SHOWN_SMS for what in ("warps", "registers", "shared", "spilled")
        )
        parts.append(f"### {op}\n\n{_table(head, rows)}")
    return "\n\n".join(parts)


def _cells(facts: dict[str, int] | None) -> tuple[object, ...]:
    if facts is None:  # tiles are chosen by the SM, so a variant may be of one alone
        return ("",) * 4
    return facts["num_warps"], facts["registers"], facts["shared_bytes"], facts["spill_bytes"]


def _costs() -> str:
    shapes = {"num_heads": 32, "kv_num_heads": 8, "head_dim": 128}
    attention = paged_attention.Attention("fp16", "same", **shapes)
    small = paged_attention.Attention("fp16", "fp8", **shapes)
    write = kv_write.KvWrite("fp16", "same", **shapes, rotary_dim=128)
    rows: list[tuple[str, str, Cost]] = [
        ("paged_attention", "decode, fp16 pools", paged_attention.cost(attention, [1] * 64, [4096] * 64)),
        ("paged_attention", "decode, FP8 pools", paged_attention.cost(small, [1] * 64, [4096] * 64)),
        ("paged_attention", "one prompt of 2048", paged_attention.cost(attention, [2048], [2048])),
        ("kv_write", "64 tokens, rotated", kv_write.cost(write, 64)),
        ("sampling", "64 rows of 128256 logits", sampling.cost(64, 128256)),
        ("rejection", "64 sequences of 4 drafts", rejection.cost(64, 256)),
        ("gather_last", "64 rows of 4096", gather_last.cost(64, 4096, "fp16")),
    ]
    return _table(
        "operator | of what | bytes | operations | operations a byte",
        (
            (f"`{op}`", of, f"{cost.num_bytes:,}", f"{cost.num_operations:,}", _ratio(cost))
            for op, of, cost in rows
        ),
    )


def _ratio(cost: Cost) -> str:
    return f"{cost.num_operations / cost.num_bytes:.2g}"


def _lacking(results: dict[str, Any]) -> list[str]:
    """Return the kernels whose results are missing, or are of none of the catalog."""
    names = {f"{kernel.name} on sm{sm}" for sm in _SHOWN_SMS for kernel in catalog(sm)}
    held = {
        f"{name} on sm{sm}"
        for name, row in results["kernels"].items()
        for sm in _SHOWN_SMS
        if f"sm{sm}" in row
    }
    return sorted(names ^ held)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Write, or check; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="report", type=Path)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args(arguments)
    source = asked.report or _RESULTS
    try:
        read = json.loads(source.read_text())
        results = read if asked.report is None else results_of(read)
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = error.strerror if isinstance(error, OSError) else f"it is no report of kernels: {error!r}"
        print(
            f"error: {source} cannot be read ({problem}); run make kernels, then "
            "tools/kernel_tables.py --from build/kernels/resources.json",
            file=sys.stderr,
        )
        return 1
    page = _PAGE.read_text()
    if asked.check:
        stale = _lacking(results)
        if stale:
            print(
                f"docs/results/kernels.json is not the catalog's ({', '.join(stale[:5])}, ...); run make kernels"
            )
        if fill(page, results) != page:
            print("docs/kernels.md is not what docs/results/kernels.json says; run tools/kernel_tables.py")
        return int(bool(stale) or fill(page, results) != page)
    _RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    _PAGE.write_text(fill(page, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
