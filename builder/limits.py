"""The limits an engine is built for, under trtllm-build's names."""

from __future__ import annotations

import dataclasses

from ..runtime.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a step and a sequence may hold at most, all inclusive.

    max_batch_size : sequences in a step
    max_num_tokens : packed tokens in a step
    max_input_len : tokens of a prompt
    max_seq_len : tokens of prompt and output together
    max_beam_width : beams of a request, each a sequence of max_batch_size. For programs that read the manifest: no
        plan depends on it, and any engine takes as many beams as sequences
    tokens_per_block : positions in a KV block, a power of two, 8..128
    """

    max_batch_size: int = 64
    max_num_tokens: int = 2048
    max_input_len: int = 4096
    max_seq_len: int = 4096
    max_beam_width: int = 1
    tokens_per_block: int = 32
    kv_cache_type: str = "paged"

    @property
    def max_blocks_per_seq(self) -> int:
        """Columns of a block table."""
        return -(-self.max_seq_len // self.tokens_per_block)


def make_limits(
    max_position_embeddings: int,
    *,
    max_batch_size: int = 64,
    max_num_tokens: int = 2048,
    max_input_len: int | None = None,
    max_seq_len: int | None = None,
    max_beam_width: int = 1,
    tokens_per_block: int = 32,
    kv_cache_type: str = "paged",
) -> Limits:
    """Return checked limits; what is not given follows from the model (max_seq_len: its own, at most 4096).

    raises InvalidArgumentError naming the limit, what it was given and what it can be.
    """
    if max_seq_len is None:
        max_seq_len = min(max_position_embeddings, 4096)
    if max_input_len is None:
        max_input_len = max_seq_len

    def check(name: str, value: int, low: int, high: int, why: str) -> None:
        if not low <= value <= high:
            raise InvalidArgumentError(
                f"--{name} is {value}, it must be between {low} and {high} ({why}); give another --{name}"
            )

    check("max_batch_size", max_batch_size, 1, 4096, "sequences in a step")
    check("max_seq_len", max_seq_len, 2, max_position_embeddings, "the model's max_position_embeddings")
    check("max_input_len", max_input_len, 1, max_seq_len, "max_seq_len")
    check("max_num_tokens", max_num_tokens, 1, 1 << 20, "packed tokens in a step")
    if max_num_tokens < max_batch_size:
        raise InvalidArgumentError(
            f"--max_num_tokens is {max_num_tokens} but --max_batch_size is {max_batch_size}: a step must hold "
            f"one token of each sequence; raise --max_num_tokens to at least {max_batch_size}"
        )
    if tokens_per_block not in (8, 16, 32, 64, 128):
        raise InvalidArgumentError(
            f"--tokens_per_block is {tokens_per_block}, it must be one of 8, 16, 32, 64, 128; "
            "give another --tokens_per_block"
        )
    check(
        "max_beam_width", max_beam_width, 1, max_batch_size, "max_batch_size: a beam is a sequence of a step"
    )
    if kv_cache_type.lower() != "paged":
        raise InvalidArgumentError(
            f"--kv_cache_type is {kv_cache_type!r}, engines have a paged KV cache; give 'paged'"
        )
    return Limits(
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_input_len=max_input_len,
        max_seq_len=max_seq_len,
        max_beam_width=max_beam_width,
        tokens_per_block=tokens_per_block,
        kv_cache_type=kv_cache_type.lower(),
    )
