"""Compiles many small graphs in few processes, and reads from each plan how its products are computed.

Run as `python rtx_cells.py JOB.json`, it compiles the job's cells one after the other and prints a JSON line for each.
A compiler that aborts takes its process along: that cell is a no, and another process goes on behind it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product in a plan's own listing: the types of its operands and its result, and its scalar factor.

    folded : the number of scales that the plan applies behind it, 0 = none
    """

    a: str
    b: str
    out: str
    alpha: float
    folded: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a cell: the products of its plan, or the words of the refusal."""

    products: tuple[Product, ...] | None
    words: str

    @property
    def ok(self) -> bool:
        return self.products is not None


@dataclasses.dataclass(frozen=True)
class Cell:
    """An ONNX file, the capabilities to compile it for, and the range of each dynamic input."""

    name: str
    onnx: Path
    capabilities: Sequence[str]
    shapes: dict[str, list[list[int]]]


def compile_cells(cells: Sequence[Cell], scratch: Path) -> dict[str, Outcome]:
    """Compile all cells and return what came of each, by name."""
    found: dict[str, Outcome] = {}
    todo = list(cells)
    while todo:
        job = scratch / "cells.json"
        job.write_text(json.dumps([{**dataclasses.asdict(one), "onnx": str(one.onnx)} for one in todo]))
        run = subprocess.run(
            [sys.executable, __file__, str(job)], capture_output=True, text=True, timeout=600, check=False
        )
        lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"cell"')]
        for line in lines:
            products = line["products"]
            made = None if products is None else tuple(Product(*one) for one in products)
            found[line["cell"]] = Outcome(made, line["words"])
        todo = todo[len(lines) :]
        if todo:
            found[todo[0].name] = Outcome(None, f"aborted with {run.returncode}: {run.stderr[-300:]}")
            todo = todo[1:]
    return found


def products_of(plan: bytes) -> list[Product]:
    """Return the matrix products of a plan."""
    text = b"\n".join(re.findall(rb"[\t -~]{20,}", plan)).decode()
    types, sizes = {}, {}
    for dims, name, kind in re.findall(
        r'tensor=\{[^\n]*?dims=\{([^}]*)\}[^\n]*?name="([^"]+)"[^\n]*?type=(\w+)', text
    ):
        types[name], sizes[name] = kind, dims.split()
    folded = [sizes[name] for name in sizes if name.endswith("_folded_matmul")]
    found = []
    for out, inputs, alpha in re.findall(
        r'fully_connected=\{[^\n]*?output=\{"([^"]+)"[^\n]*?input=\{([^}]*)\}[^\n]*?alpha=([0-9A-F]+)', text
    ):
        a, b = re.findall(r'"([^"]+)"', inputs)[:2]
        factor = float(_float32(int(alpha, 16)))
        count = int(folded[0][-1]) if folded else 0
        found.append(Product(types.get(a, "?"), types.get(b, "?"), types.get(out, "?"), factor, count))
    return found


def _float32(bits: int) -> Any:
    import numpy as np

    return np.array(bits, np.uint32).view(np.float32)


def main(path: str) -> None:
    """Compile the cells of a job file."""
    import tensorrt_rtx as trt  # type: ignore[import-untyped, unused-ignore]

    lines: list[str] = []

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.WARNING, trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                lines.append(message)

    logger = Logger()
    for cell in json.loads(Path(path).read_text()):
        lines.clear()
        plan = None
        with contextlib.suppress(RuntimeError):
            plan = _compile(trt, logger, cell, lines)
        products = None if plan is None else [dataclasses.astuple(one) for one in products_of(plan)]
        print(
            json.dumps({"cell": cell["name"], "products": products, "words": " | ".join(lines)}), flush=True
        )


def _compile(trt: Any, logger: Any, cell: dict[str, Any], lines: list[str]) -> bytes | None:
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(cell["onnx"]):
        lines.extend(str(parser.get_error(i).desc()) for i in range(parser.num_errors))
        return None
    config = builder.create_builder_config()
    config.num_compute_capabilities = len(cell["capabilities"])
    for i, capability in enumerate(cell["capabilities"]):
        config.set_compute_capability(getattr(trt.ComputeCapability, capability), i)
    profile = builder.create_optimization_profile()
    for name, shapes in cell["shapes"].items():
        profile.set_shape(name, *map(tuple, shapes))
    config.add_optimization_profile(profile)
    built = builder.build_serialized_network(network, config)
    return None if built is None else bytes(built)


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)
