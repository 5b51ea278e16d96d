"""Random adapters of tiny engines as requests bring them: two arrays and a task id."""

from __future__ import annotations

from typing import Any

import numpy as np
from plansmith.runtime.engine import Engine
from plansmith.serving.triton.row import LoraRequest

RANK = 4
Q, V = 1, 3


def arrays(engine: Engine, seed: int, dtype: Any = np.float16) -> tuple[Any, Any]:
    """Return (config, weights) of a random adapter of q and v in every layer, large enough to change the tokens."""
    assert engine.manifest is not None
    model, info = engine.manifest.model, engine.model_info
    random_source = np.random.default_rng(seed)
    config, rows = [], []
    for layer in range(info.num_layers):
        for module, out in ((Q, info.num_heads), (V, info.num_kv_heads)):
            size = RANK * (model.hidden_size + out * info.head_dim)
            config.append([module, layer, RANK])
            rows.append(random_source.normal(0, 0.5, size))
    width = max(map(len, rows))
    weights = np.stack([np.pad(row, (0, width - len(row))) for row in rows])
    return np.array(config, np.int32), weights.astype(np.float32).astype(dtype)


def request(engine: Engine, task_id: int, seed: int | None = None, dtype: Any = np.float16) -> LoraRequest:
    """Return a request with arrays, made from its id unless a seed is given."""
    config, weights = arrays(engine, task_id if seed is None else seed, dtype)
    return LoraRequest(task_id, weights, config)
