"""The one optimization profile of a packed plan: every step of the limits, decode, prefill and mixed, runs in it."""

from __future__ import annotations

from ...limits import Limits
from ...spec import DecoderSpec
from ..rtx.profiles import Profile, max_pool_blocks

NAME = "packed"


def make_profile(spec: DecoderSpec, limits: Limits) -> Profile:
    """Return the range of every dynamic dimension, from the build's limits.

    Kernels are timed at the middle one: as many tokens as a step of a full batch that decodes has, since most steps
    are such. A step's dimensions are bounded one by one, so T = 1 with B = max_batch_size is in the profile too; no
    step is like that. Nothing is faster for another number of blocks; the compiler allocates pools of the middle one,
    beside the weights, so that is what one sequence can have.
    """
    batch, tokens, width = limits.max_batch_size, limits.max_num_tokens, limits.max_blocks_per_seq
    most = max_pool_blocks(spec, limits)
    often = min(batch, tokens)
    return Profile(
        NAME,
        {
            "T": (1, often, tokens),
            "B": (1, often, batch),
            "B+1": (2, often + 1, batch + 1),
            "MB": (1, max(1, width // 2), width),
            "R": (1, often, batch),
            "NB": (1, min(most, width), most),
        },
    )
