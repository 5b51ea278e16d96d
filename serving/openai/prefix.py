"""Hashes of a prompt's first blocks, by which a gateway sends equal prefixes to the replica that has them cached.

The header of an answer is `x-plansmith-prefix-hash: 1=4f0c..., 2=91ab..., 4=...`: behind each number of blocks the
hash of so many blocks' tokens, together with the adapter and the cache salt, which are part of the cache's key too.
Two prompts with an equal hash at 4 share at least 4 blocks, on every server with the same key.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

_HASH_BYTES = 8
_MAX_BLOCKS = 1 << 12  # 13 hashes at most


class PrefixHasher:
    """Hashes prompts. Any thread.

    key : of the hash, so that nobody without it can tell from a log which prompt it was
    tokens_per_block : of the engine's KV cache
    """

    def __init__(self, key: str, tokens_per_block: int) -> None:
        self._key = hashlib.blake2b(key.encode(), digest_size=32).digest()
        self._tokens_per_block = tokens_per_block

    def header(self, prompt_ids: Sequence[int], adapter: str | None, cache_salt: str | int | None) -> str:
        """Return the header's value: hashes of the first 1, 2, 4, 8, ... full blocks; "" for a shorter prompt."""
        size = self._tokens_per_block
        most = min(len(prompt_ids) // size, _MAX_BLOCKS)
        state = hashlib.blake2b(key=self._key, digest_size=_HASH_BYTES)
        state.update(repr((adapter, cache_salt)).encode("utf-8", "surrogatepass"))
        parts: list[str] = []
        done, count = 0, 1
        while count <= most:
            state.update(array("i", prompt_ids[done * size : count * size]).tobytes())
            parts.append(f"{count}={state.hexdigest()}")
            done, count = count, 2 * count
        return ", ".join(parts)
