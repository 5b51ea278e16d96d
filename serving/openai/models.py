"""GET /v1/models: the model under its names, and the LoRA adapters that are loaded."""

from __future__ import annotations

import time
from typing import Any

from .context import Context

_STARTED = int(time.time())


def all_models(ctx: Context) -> dict[str, Any]:
    """Return the list."""
    names = [(name, None) for name in ctx.settings.model_names]
    adapters = [(name, ctx.settings.model_names[0]) for name in ctx.engine.adapters]
    return {"object": "list", "data": [_model(ctx, *one) for one in [*names, *adapters]]}


def one_model(ctx: Context, name: str) -> dict[str, Any]:
    """Return one of them; ApiError 404 for a name that there is not."""
    adapter = ctx.adapter_of(name)
    return _model(ctx, name, None if adapter is None else ctx.settings.model_names[0])


def _model(ctx: Context, name: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "plansmith",
        "root": ctx.settings.model_names[0],
        "parent": parent,
        "max_model_len": ctx.engine.model_info.max_seq_len,
    }
