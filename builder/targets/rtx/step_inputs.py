"""From a mixed packed step to the rectangular steps of an RTX plan, as the runtime's executor makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ....runtime.executors import rectangular
from ....runtime.executors.runs import Run
from ...batch import StepBatch

IntArray = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class RectangularStep:
    """One run of a plan.

    inputs : name -> array, all of contract.py's inputs but the pools
    logits_idx : for each row of the plan's logits that is wanted, its row in the packed step's logits; fewer than
        the plan's rows (none) when the step wants no logits
    """

    inputs: dict[str, IntArray]
    logits_idx: IntArray


def split(step: StepBatch, num_blocks: int, block_size: int) -> Iterator[RectangularStep]:
    """Yield the rectangular steps of a packed one: the decode tokens together, then each longer chunk alone.

    num_blocks : NB, blocks of each pool; block_size : BS, positions in a block
    raises : as `rectangle`
    """
    for run in rectangular.split(step, num_blocks, block_size):
        yield _wanted(run)


def rectangle(step: StepBatch, seqs: Sequence[int], num_blocks: int, block_size: int) -> RectangularStep:
    """Return one [B, S] step of the sequences `seqs` of a packed step; S is their longest query.

    raises : InvalidArgumentError if a sequence has no new token, a position has no block, a block is beyond the
        pool, or two sequences write one block
    """
    return _wanted(rectangular.rectangle(step, np.asarray(seqs, np.intp), num_blocks, block_size))


def _wanted(run: Run) -> RectangularStep:
    return RectangularStep(run.inputs, run.logits_idx[run.logits_idx >= 0])
