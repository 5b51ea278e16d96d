"""The kernels of rejection. B sequences, D draft tokens of all of them, R = D + B rows, V vocabulary, W = WIDTH.

A sequence with n draft tokens has n + 1 rows: the row before each of them and the one behind the last. Its first row is
cu_draft_lens[b] + b. Outputs of both ways:
    num_accepted [B] int32; tokens [B, max_draft_len + 1] int32: the accepted and the one behind them, then -1

compare : the row's token was drawn by `sampling` with the request's own random numbers; a draft token is
accepted when it
    is what was drawn. A row that could not be drawn (token < 0) ends its sequence's tokens
    drawn int32 words whose every drawn_stride-th is a token (psm_row_sample: 44), draft_tokens [D] int32,
    cu_draft_lens [B+1] int32
totals, accept, residual : rejection sampling of drafts whose distribution is known, in this order
    target [R, V], draft [D, V] float32 weights >= 0, each row times any factor; rows [R, 12] psm_sampling_row, of which
    seed and output_idx are used; target_totals [R], draft_totals [D] float64, written by totals
"""

from __future__ import annotations

from ..kernel import Cost, Grid, Kernel

WIDTH = 128  # more than the most draft tokens of a sequence
MAX_DRAFT_LEN = WIDTH - 1
TILE = 2048

_SEQUENCES = {"draft_tokens": "*i32", "cu_draft_lens": "*i32"}
_OUTPUTS = {"num_accepted": "*i32", "tokens": "*i32", "max_draft_len": "i32"}

COMPARE = Kernel(
    op="rejection",
    name="rejection_compare",
    function="rejection.kernels:compare",
    signature={"drawn": "*i32", "drawn_stride": "i32", **_SEQUENCES, **_OUTPUTS},
    constants={"WIDTH": WIDTH},
    num_warps=1,
)
TOTALS = Kernel(
    op="rejection",
    name="rejection_totals",
    function="rejection.kernels:totals",
    signature={"weights": "*fp32", "totals_of": "*fp64", "vocab_size": "i32"},
    constants={"TILE": TILE},
    num_warps=8,
)
_KNOWN = {
    "target": "*fp32",
    "draft": "*fp32",
    "target_totals": "*fp64",
    "draft_totals": "*fp64",
    "rows": "*i32",
    **_SEQUENCES,
    **_OUTPUTS,
    "vocab_size": "i32",
}
ACCEPT = Kernel(
    op="rejection",
    name="rejection_accept",
    function="rejection.kernels:accept",
    signature=_KNOWN,
    constants={"WIDTH": WIDTH},
    num_warps=1,
    fp_fusion=False,
)
RESIDUAL = Kernel(
    op="rejection",
    name="rejection_residual",
    function="rejection.kernels:residual",
    signature=_KNOWN,
    constants={"TILE": TILE},
    num_warps=8,
    fp_fusion=False,
)


def grid(num_programs: int) -> Grid:
    """Return the grid: a program a sequence; of totals, a program a row."""
    return (num_programs, 1, 1)


def cost(num_seqs: int, num_drafts: int) -> Cost:
    """Return what comparing moves at least; rejection sampling reads each row of weights besides."""
    return Cost(4 * (2 * num_drafts + num_seqs + 2 * num_seqs + 1), num_drafts)


def catalog() -> list[Kernel]:
    """Return every kernel."""
    return [COMPARE, TOTALS, ACCEPT, RESIDUAL]
