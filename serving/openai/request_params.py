"""The sampling parameters that are the server's to say."""

from __future__ import annotations

from typing import Any

from .context import Context
from .identity import Identity, cache_salt
from .protocol import SamplingFields


def server_params(
    ctx: Context, body: SamplingFields, identity: Identity, adapter: str | None
) -> dict[str, Any]:
    """Return adapter, cache_salt, tenant and timeout_ms of a request."""
    settings = ctx.settings
    times = [body.timeout_ms]
    if settings.request_timeout_s is not None:
        times.append(max(1, round(1000 * settings.request_timeout_s)))
    given = [ms for ms in times if ms is not None]
    return {
        "adapter": adapter,
        "cache_salt": cache_salt(identity, body.cache_salt, by_key=settings.salt_by_key),
        "tenant": identity.tenant or None,
        "timeout_ms": min(given) if given else None,
    }
