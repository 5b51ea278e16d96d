"""What a kernel is, without triton or torch: its function, argument types, constants, and how it is launched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

Constant = int | float | bool | str | None
Grid = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One variant of a Triton-language kernel, the same for the interpreter, a GPU and ahead-of-time compilation.

    op : the folder of plugins/ it belongs to
    name : unique among all variants; letters, digits and _
    function : "module:function", the module relative to this package, e.g. "sampling.kernels:draw"
    signature : argument -> Triton's type ("*fp16", "*i32", "i32", "fp32", ...) in the function's order, without its
        constants; ":16" behind a type promises that a pointer's address or a number is a multiple of 16
    constants : the constexpr arguments
    fp_fusion : a multiplication and an addition may become one operation; False where results must be bit-exact
    min_sm : the first compute capability that it compiles for
    """

    op: str
    name: str
    function: str
    signature: Mapping[str, str]
    constants: Mapping[str, Constant]
    num_warps: int = 4
    num_stages: int = 2
    fp_fusion: bool = True
    min_sm: int = 75


@dataclasses.dataclass(frozen=True)
class Cost:
    """The least that an operation moves to and from memory, and computes (a product and its sum are 2 operations)."""

    num_bytes: int
    num_operations: int

    def seconds(self, bytes_per_s: float, operations_per_s: float) -> float:
        """Return the roofline's time: the longer of the two."""
        return max(self.num_bytes / bytes_per_s, self.num_operations / operations_per_s)
