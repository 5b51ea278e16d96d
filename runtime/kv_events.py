"""KV events: which prefixes an engine holds, for a router that sends requests where they are."""

from __future__ import annotations

import dataclasses
from typing import Any

from ._native import native

_KINDS = {1: "created", 2: "stored", 3: "removed", 4: "updated"}
_LEVELS = {0: "device", 1: "host"}
EVENTS_A_CALL = 256


@dataclasses.dataclass(frozen=True)
class KvEvent:
    """One change of the prefix cache.

    event_id : 1, 2, ...; a gap means that events were dropped and a router should begin anew
    kind : "created" (num_blocks of a level), "stored" (a block can be reused), "removed" (it no longer can), "updated"
    level : "device" or "host"
    block_hash, parent_hash : of a block's tokens and all before them; parent 0 = it is the first of its prefix
    cache_salt, adapter_id, token_ids : of "stored"
    priority : of "stored" and "updated"
    """

    event_id: int
    kind: str
    level: str
    block_hash: int
    parent_hash: int
    cache_salt: int
    adapter_id: int
    priority: int
    num_blocks: int
    token_ids: tuple[int, ...]


class KvEventReader:
    """Buffers for psm_engine_kv_events, made once."""

    def __init__(self, tokens_per_block: int) -> None:
        ffi = native().ffi
        self._max_ids = EVENTS_A_CALL * tokens_per_block
        self._events = ffi.new("psm_kv_event[]", EVENTS_A_CALL)
        self._ids = ffi.new("int32_t[]", self._max_ids)
        self._count = ffi.new("size_t*")

    def take(self, engine: Any) -> list[KvEvent]:
        """Return up to EVENTS_A_CALL events of a psm_engine, oldest first; [] when there are no more."""
        core = native()
        status = core.lib.psm_engine_kv_events(
            engine, self._events, EVENTS_A_CALL, self._ids, self._max_ids, self._count
        )
        core.check(status)
        return [self._event(self._events[i]) for i in range(self._count[0])]

    def _event(self, event: Any) -> KvEvent:
        begin = event.first_token_idx
        return KvEvent(
            event_id=event.event_id,
            kind=_KINDS[event.kind],
            level=_LEVELS[event.level],
            block_hash=event.block_hash,
            parent_hash=event.parent_hash,
            cache_salt=event.cache_salt,
            adapter_id=event.adapter_id,
            priority=event.priority,
            num_blocks=event.num_blocks,
            token_ids=tuple(self._ids[i] for i in range(begin, begin + event.num_tokens)),
        )
