"""Optimization profiles: the ranges of every dynamic dimension, from the build's limits.

One [B, S] range would let B and S be at their maxima together, 64 x 2048 tokens where a step holds 2048, and the
plan's scratch memory with it. So there is one profile a kind of step:

    0 decode   B up to max_batch_size, S = 1
    1 prefill  B = 1, S up to max_num_tokens
    2 mixed    B up to max_batch_size, S such that B * S stays within max_num_tokens: only when asked for

The compiler takes its whole time again for each: 28 s for 30 layers of SmolLM2-135M on a busy machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ...limits import Limits
from ...spec import DecoderSpec
from .contract import TensorSpec

Range = tuple[int, int, int]  # min, opt, max

# TensorRT counts a tensor's elements in an int32 in places; a pool must stay below.
_MAX_ELEMENTS = (1 << 31) - 1


@dataclasses.dataclass(frozen=True)
class Profile:
    """The range of each named dimension for one kind of step."""

    name: str
    dims: dict[str, Range]

    def shapes(self, tensor: TensorSpec) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the tensor's min, opt and max shape."""
        low, opt, high = (
            tuple(d if isinstance(d, int) else self.dims[d][i] for d in tensor.dims) for i in range(3)
        )
        return low, opt, high


def make_profiles(spec: DecoderSpec, limits: Limits, *, mixed: bool = False) -> list[Profile]:
    """Return the profiles of a plan; their order is the profile index the executor selects.

    mixed : also steps of several sequences with several tokens each, where max_num_tokens has room for them
    """
    batch, tokens = limits.max_batch_size, limits.max_num_tokens
    rows_each = tokens // batch
    profiles = [
        _profile("decode", spec, limits, batch=(1, _middle(batch), batch), rows=(1, 1, 1), tokens=batch),
        _profile("prefill", spec, limits, batch=(1, 1, 1), rows=(1, _middle(tokens), tokens), tokens=tokens),
    ]
    if mixed and batch > 1 and rows_each > 1:
        rows = (1, _middle(rows_each), rows_each)
        profiles.append(
            _profile("mixed", spec, limits, batch=(1, _middle(batch), batch), rows=rows, tokens=tokens)
        )
    return profiles


def max_pool_blocks(spec: DecoderSpec, limits: Limits) -> int:
    """Return the largest pool, in blocks, that a plan takes."""
    return _MAX_ELEMENTS // (spec.num_kv_heads * limits.tokens_per_block * spec.head_dim)


def _profile(
    name: str, spec: DecoderSpec, limits: Limits, *, batch: Range, rows: Range, tokens: int
) -> Profile:
    width = limits.max_blocks_per_seq
    most = max_pool_blocks(spec, limits)
    blocks = (1, min(most, limits.max_batch_size * width), most)
    return Profile(
        name,
        {
            "B": batch,
            "S": rows,
            "MB": (1, _middle(width), width),
            "R": (1, batch[1], limits.max_batch_size),
            "U": (1, min(tokens, batch[1] * rows[1]), tokens),
            "NB": blocks,
            "NB1": (blocks[0] + 1, blocks[1] + 1, blocks[2] + 1),
        },
    )


def _middle(high: int) -> int:
    return max(1, high // 2)


def as_json(profiles: Sequence[Profile], inputs: Sequence[TensorSpec]) -> list[dict[str, list[list[int]]]]:
    """Return, a profile, input name -> [min, opt, max] shapes, as the child process takes them."""
    return [{t.name: [list(s) for s in p.shapes(t)] for t in inputs} for p in profiles]
