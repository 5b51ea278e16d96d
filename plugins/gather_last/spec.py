"""The kernel of gather_last by element type.

Arguments: hidden [T, E], rows [R] int32, out [R, E], num_tokens T, hidden_size E.
"""

from __future__ import annotations

from ..kernel import Cost, Grid, Kernel

BLOCK = 1024  # columns of a program
ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}


def kernel(element: str) -> Kernel:
    """Return the kernel for "fp16", "bf16" or "fp32"."""
    return Kernel(
        op="gather_last",
        name=f"gather_last_{element}",
        function="gather_last.kernels:gather_last",
        signature={
            "hidden": f"*{element}",
            "rows": "*i32",
            "out": f"*{element}",
            "num_tokens": "i32",
            "hidden_size": "i32",
        },
        constants={"BLOCK": BLOCK},
    )


def grid(num_rows: int, hidden_size: int) -> Grid:
    """Return the programs of R rows of E columns."""
    return (-(-hidden_size // BLOCK), num_rows, 1)


def cost(num_rows: int, hidden_size: int, element: str) -> Cost:
    """Return the least: each row read and written once."""
    return Cost(2 * num_rows * hidden_size * ELEMENT_BYTES[element] + 4 * num_rows, 0)


def catalog() -> list[Kernel]:
    """Return every variant."""
    return [kernel(element) for element in ELEMENT_BYTES]
