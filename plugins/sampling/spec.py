"""The kernels of sampling: which run, over what grids, in which workspace. No triton, no torch.

Dimensions: R rows, V vocabulary, C chunks of a row. Arguments of the kernels, by name:
    logits [R, V] float32; int32 words: rows [R, 12] psm_sampling_row, edits [., 4] psm_logit_edit, masks
    [., (V+31)/32]; samples [R, 44] psm_row_sample, written; vocab_size, mask_words, weight_shift int32
    every other name : the region of the workspace that has it
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..kernel import Cost, Grid, Kernel

ROW_WORDS, EDIT_WORDS, SAMPLE_WORDS, MAX_TOP_LOGPROBS = 12, 4, 44, 20
CHUNK = 2048  # tokens that a program looks at
BLOCK = 64  # tokens whose best is kept: what bounds the k-th best, and where the best log-probabilities are
LEVELS = 16  # how far below the best weights are summed, to find about where a nucleus ends
WIDE = 1024  # where top_p has more candidates, one part in FINE of them is listed; others race in place
FINE = 32
CAPACITY = 8192  # candidates of a row that can be listed; a row that has more is read as a whole
STATE_WORDS = 8
"""Candidates so far, the two words of the draw's key, the worst candidate's distance; of a part: candidates so far, the
nearest and the worst one's distance."""

_POINTERS = {
    "logits": "*fp32",
    "rows": "*i32",
    "edits": "*i32",
    "masks": "*i32",
    "samples": "*i32",
    "adjusted": "*fp32",
    "block_best": "*fp32",
    "raw_block_best": "*fp32",
    "chunk_best": "*fp32",
    "chunk_notes": "*i32",
    "race_times": "*fp64",
    "race_ids": "*i32",
    "log_sums": "*fp64",
    "level_sums": "*i64",
    "fine_sums": "*i64",
    "base_units": "*i64",
    "candidate_keys": "*i32",
    "candidate_ids": "*i32",
    "state": "*i32",
}
_ITEM_BYTES = {"*fp32": 4, "*i32": 4, "*fp64": 8, "*i64": 8}
_ALIGNMENT = 256


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of the workspace: bytes from its beginning, the type of its items, their number along each axis."""

    offset: int
    pointer: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """One launch: kernel.signature names its arguments."""

    kernel: Kernel
    grid: Grid


def num_chunks(vocab_size: int) -> int:
    """Return C."""
    return -(-vocab_size // CHUNK)


def weight_shift(vocab_size: int) -> int:
    """Return s of the unit 2^(s - 34) in which weights are summed: 0 up to 2^19 tokens (runtime/src/sampler.h)."""
    return max(0, (vocab_size - 1).bit_length() - 19)


def scalars(vocab_size: int) -> dict[str, int]:
    """Return the arguments that are numbers."""
    return {
        "vocab_size": vocab_size,
        "mask_words": -(-vocab_size // 32),
        "weight_shift": weight_shift(vocab_size),
    }


def regions(num_rows: int, vocab_size: int) -> dict[str, Region]:
    """Return the workspace's regions by the name of the argument that points at them.

    Nothing has to be in them before the first kernel, nothing of them is needed behind the last one.
    """
    chunks = num_chunks(vocab_size)
    shapes: Mapping[str, tuple[int, ...]] = {
        "adjusted": (num_rows, vocab_size),
        "block_best": (num_rows, chunks * (CHUNK // BLOCK)),
        "raw_block_best": (num_rows, chunks * (CHUNK // BLOCK)),
        "chunk_best": (num_rows, 2, chunks),
        "chunk_notes": (num_rows, 2, chunks),
        "race_times": (num_rows, chunks),
        "race_ids": (num_rows, chunks),
        "log_sums": (num_rows, chunks),
        "level_sums": (num_rows, chunks, LEVELS),
        "fine_sums": (num_rows, chunks, FINE),
        "base_units": (num_rows,),
        "candidate_keys": (num_rows, CAPACITY),
        "candidate_ids": (num_rows, CAPACITY),
        "state": (num_rows, STATE_WORDS),
    }
    found: dict[str, Region] = {}
    offset = 0
    for name, shape in shapes.items():
        found[name] = Region(offset, _POINTERS[name], shape)
        num_bytes = _ITEM_BYTES[_POINTERS[name]]
        for size in shape:
            num_bytes *= size
        offset += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    return found


def workspace_bytes(num_rows: int, vocab_size: int) -> int:
    """Return the size of the workspace; its address has to be a multiple of 256."""
    last = list(regions(num_rows, vocab_size).values())[-1]
    num_bytes = last.offset + num_rows * STATE_WORDS * 4
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def steps(
    num_rows: int, vocab_size: int, *, sampled: bool = True, filtered: bool = True, logprobs: bool = True
) -> list[Step]:
    """Return the launches in order. Grids depend on R and V alone, so a CUDA graph of them serves any rows.

    sampled, filtered, logprobs : False = no row has a temperature; top_k or top_p; num_logprobs. What only such rows
        need is then left out; it would find nothing to do
    """
    over_chunks: Grid = (num_chunks(vocab_size), num_rows, 1)
    over_rows: Grid = (num_rows, 1, 1)
    found = [Step(SCAN, over_chunks)]
    if sampled or logprobs:
        found.append(Step(WEIGH, over_chunks))
    if sampled and filtered:
        found += [Step(BOUND, over_rows), Step(GATHER, over_chunks)]
        found += [Step(REFINE, over_chunks), Step(REGATHER, over_chunks)]
    found.append(Step(DRAW, over_rows))
    if logprobs:
        found.append(Step(LOGPROBS, over_rows))
    return found


def cost(num_rows: int, vocab_size: int) -> Cost:
    """Return the least: every logit read once, compared once."""
    return Cost(num_rows * vocab_size * 4 + num_rows * SAMPLE_WORDS * 4, num_rows * vocab_size)


def catalog() -> list[Kernel]:
    """Return every kernel; one variant serves all sizes."""
    return [SCAN, WEIGH, BOUND, GATHER, REFINE, REGATHER, DRAW, LOGPROBS]


def _kernel(
    name: str,
    pointers: str,
    numbers: str,
    constants: Mapping[str, int],
    num_warps: int,
    *,
    module: str | None = None,
) -> Kernel:
    signature = {pointer: _POINTERS[pointer] for pointer in pointers.split()}
    signature |= dict.fromkeys(numbers.split(), "i32")
    return Kernel(
        op="sampling",
        name=f"sampling_{name}",
        function=f"sampling.{module or name}:{name}",
        signature=signature,
        constants=constants,
        num_warps=num_warps,
        num_stages=1,
        fp_fusion=False,
    )


SCAN = _kernel(
    "scan",
    "logits rows edits masks adjusted block_best raw_block_best chunk_best chunk_notes state",
    "vocab_size mask_words",
    {"CHUNK": CHUNK, "BLOCK": BLOCK},
    num_warps=4,
)
WEIGH = _kernel(
    "weigh",
    "logits rows adjusted chunk_best chunk_notes state race_times race_ids log_sums level_sums",
    "vocab_size weight_shift",
    {"CHUNK": CHUNK, "LEVELS": LEVELS},
    num_warps=4,
)
BOUND = _kernel(
    "bound",
    "rows block_best chunk_best chunk_notes level_sums state",
    "vocab_size",
    {"CHUNK": CHUNK, "BLOCK": BLOCK, "LEVELS": LEVELS},
    num_warps=8,
)
GATHER = _kernel(
    "gather",
    "logits rows adjusted chunk_best chunk_notes state candidate_keys candidate_ids",
    "vocab_size",
    {"CHUNK": CHUNK, "CAPACITY": CAPACITY},
    num_warps=4,
)
_WIDE = {"CHUNK": CHUNK, "LEVELS": LEVELS, "FINE": FINE, "WIDE": WIDE}
REFINE = _kernel(
    "refine",
    "logits rows adjusted chunk_best level_sums fine_sums state",
    "vocab_size weight_shift",
    _WIDE,
    num_warps=4,
)
REGATHER = _kernel(
    "regather",
    "logits rows adjusted chunk_best level_sums fine_sums state base_units race_times race_ids"
    " candidate_keys candidate_ids",
    "vocab_size",
    {**_WIDE, "CAPACITY": CAPACITY},
    num_warps=4,
    module="refine",
)
DRAW = _kernel(
    "draw",
    "logits rows adjusted chunk_best chunk_notes state base_units race_times race_ids level_sums"
    " candidate_keys candidate_ids samples",
    "vocab_size weight_shift",
    {"CHUNK": CHUNK, "LEVELS": LEVELS, "WIDE": WIDE, "CAPACITY": CAPACITY, "TILE": 512},
    num_warps=8,
)
LOGPROBS = _kernel(
    "logprobs",
    "logits rows raw_block_best chunk_best log_sums samples",
    "vocab_size",
    {"CHUNK": CHUNK, "BLOCK": BLOCK},
    num_warps=8,
)
