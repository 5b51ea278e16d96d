"""What lowering knows of the graph's values: where a value's rows lie, and who still needs them.

Every activation is a matrix in memory: a row for each token (or each row with logits), its other dimensions side by
side. Reshape, Unsqueeze, Squeeze and a Transpose that moves the token axis alone change nothing there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import onnx_ir as ir

from ....runtime.errors import BuildError
from .buffers import Ref
from .plan_file import RoundFormat, SlotRows

ROWS_AXIS = -1
"""Stands in a value's dims for the axis of tokens (or of rows with logits)."""

Dims = tuple[int, ...]


@dataclasses.dataclass(eq=False)
class Storage:
    """Columns that one or more values are names for.

    pending : uses of those values by nodes that were not lowered yet; 1 = the node at hand may overwrite them
    """

    ref: Ref
    width: int
    pending: int = 0

    @property
    def rows(self) -> SlotRows:
        """Return the kind of rows."""
        return self.ref.buffer.rows


@dataclasses.dataclass(frozen=True)
class Rounding:
    """How products' inputs are rounded, as ROUND_INPUT words it.

    group : columns that share a scale, scheme.ROW = a token's all, scheme.WHOLE = all, fixed
    scale : the fixed one; of FP4 the factor on the blocks' scales
    """

    format: RoundFormat
    group: int
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Activation:
    """A value that lies in memory.

    before : the value that was multiplied by factors or rounded for a product's sake; adapters take that
    rounding : still to be done by the products that read it
    """

    storage: Storage
    dims: Dims  # with ROWS_AXIS once
    before: ir.Value | None = None
    rounding: Rounding | None = None

    @property
    def ref(self) -> Ref:
        """Return where it lies."""
        return self.storage.ref

    @property
    def last_dim(self) -> int:
        """Return the columns of the last axis."""
        return self.dims[-1]


@dataclasses.dataclass(frozen=True)
class Pending:
    """A value that is half of a fused op and is not in memory: what is done to the columns of `storage`.

    kind : "sigmoid", "act" (argument: number of kOpGlu), "scaled" (argument: the factor), "capped" (the cap)
    """

    kind: str
    storage: Storage
    dims: Dims
    argument: float = 0.0


def width_of(dims: Dims) -> int:
    """Return the columns of a row."""
    return math.prod(d for d in dims if d != ROWS_AXIS)


def reshape(dims: Dims, target: Sequence[int]) -> Dims | None:
    """Return the dims after an ONNX Reshape to `target` (0 copies, -1 is inferred), None if rows would be cut."""
    copied = [dims[n] if d == 0 and n < len(dims) else d for n, d in enumerate(target)]
    known = math.prod(d for d in copied if d > 0)
    free = [n for n, d in enumerate(target) if d == -1]
    rows = [n for n, d in enumerate(target) if d == 0 and n < len(dims) and dims[n] == ROWS_AXIS]
    if len(free) + len(rows) == 1 and known == width_of(dims):  # the one axis left is the rows'
        copied[(free or rows)[0]] = ROWS_AXIS
    elif len(free) == len(rows) == 1 and known and width_of(dims) % known == 0:
        copied[free[0]] = width_of(dims) // known
    else:
        return None
    return tuple(copied) if _leads(dims) and _leads(tuple(copied)) else None


def transpose(dims: Dims, perm: Sequence[int]) -> Dims | None:
    """Return the dims after a Transpose, None if more than the rows' axis moves."""
    out = tuple(dims[p] for p in perm)
    kept = [p for p in perm if dims[p] not in (ROWS_AXIS, 1)]
    return out if kept == sorted(kept) else None


def unsqueeze(dims: Dims, axes: Sequence[int]) -> Dims:
    """Return the dims after an Unsqueeze."""
    out = list(dims)
    for axis in sorted(a % (len(dims) + len(axes)) for a in axes):
        out.insert(axis, 1)
    return tuple(out)


def squeeze(dims: Dims, axes: Sequence[int]) -> Dims:
    """Return the dims after a Squeeze of axes of size 1."""
    gone = {a % len(dims) for a in axes}
    if any(dims[a] != 1 for a in gone):
        raise BuildError(f"Squeeze of axes {list(axes)} of {list(dims)}; only axes of size 1 can go")
    return tuple(d for n, d in enumerate(dims) if n not in gone)


def _leads(dims: Dims) -> bool:
    """Return whether the rows' axis comes first but for axes of size 1, as the rows do in memory."""
    return all(d == 1 for d in dims[: dims.index(ROWS_AXIS)])
