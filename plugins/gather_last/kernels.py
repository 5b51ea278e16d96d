"""GatherLast: rows [R] of hidden states [T, E] -> [R, E]; fp16, bf16, fp32, bit for bit. Limited by memory's bytes.

A row outside 0..T-1 (the padding of a graph's bucket) becomes zeros.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_last(hidden, rows, out, num_tokens, hidden_size, BLOCK: tl.constexpr):
    """Copy BLOCK columns of one row. hidden [T, E], rows [R] int32, out [R, E]."""
    row = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(rows + row)
    is_column = columns < hidden_size
    num_columns = tl.where((source >= 0) & (source < num_tokens), hidden_size, 0)
    x = tl.load(hidden + source.to(tl.int64) * hidden_size + columns, mask=columns < num_columns, other=0.0)
    tl.store(out + row.to(tl.int64) * hidden_size + columns, x, mask=is_column)
