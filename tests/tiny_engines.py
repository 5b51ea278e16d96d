"""Engine directories of the tiny checkpoints, with small limits so that steps, blocks and lengths run out."""

from __future__ import annotations

from pathlib import Path

LIMITS = {
    "max_batch_size": 8,
    "max_num_tokens": 32,
    "max_input_len": 96,
    "max_seq_len": 128,
    "tokens_per_block": 8,
}


def build_tiny(checkpoint: Path, out: Path, precision: str = "fp32") -> Path:
    """Build the cpu target of a checkpoint into `out` and return it."""
    from plansmith.builder.build import build_engine, plan_build

    build_engine(plan_build(checkpoint, ["cpu"], precision=precision, limits=dict(LIMITS)), out)
    return out
