"""What the server is told when it starts."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
    """The server's options; times are seconds, sizes bytes.

    model_names : what clients may call the model, the first is the one it answers with
    api_keys : one of them must come with a request; empty = none is asked for
    max_body_bytes : longest body of a request
    max_prompts, max_outputs : of one request; outputs are prompts times n, best_of or beams
    max_connections : open at a time; one more is closed at once
    request_timeout_s : ends a request with what it has; None = as long as it takes
    header_timeout_s : for the head of a request, from the connection's first byte, or from the connection
    body_timeout_s : for its body
    write_timeout_s : without a byte taken by the client, after which its connection is closed
    keep_alive_s : an idle connection is kept so long
    drain_s : running requests may take so long to finish when the server is told to end
    stall_s : a queue without a step for so long makes the server unhealthy
    stream_interval_s : least time between two chunks of a stream; None = by what sending costs
    prefix_hash_key : key of the hashes of prompts; servers with the same one give the same hashes
    tool_format : how the model writes tool calls: hermes, llama3, mistral, none, or auto: as its template has it
    salt_by_key : requests of different API keys share no cached prefixes and count as tenants
    access_log : write a JSON line for each request to standard error
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    max_prompts: int = 256
    max_outputs: int = 256
    max_connections: int = 8192
    request_timeout_s: float | None = None
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    keep_alive_s: float = 75.0
    drain_s: float = 30.0
    stall_s: float = 120.0
    stream_interval_s: float | None = None
    prefix_hash_key: str = ""
    tool_format: str = "auto"
    salt_by_key: bool = False
    access_log: bool = False
