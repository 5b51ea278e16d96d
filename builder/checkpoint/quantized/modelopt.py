"""ModelOpt's unified Hugging Face form: hf_quant_config.json, or quantization_config of quant_method "modelopt".

Names of tensors beside `weight`: weight_scale, weight_scale_2, input_scale, pre_quant_scale. A scale is amax / 448
(E4M3), amax / 127 (int8), amax / 7 (int4) or amax / (6 * 448) (NVFP4's outer one), a float code is w / scale.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable

from ....runtime.errors import CheckpointError
from ...scheme import KvFormat
from .modelopt_config import MIXED, ModelOptConfig
from .modelopt_layers import LAYERS
from .module import Layer, Module

ReadLayer = Callable[[Module, int | None], Layer]


class ModelOptReader:
    """Reader of ModelOpt's checkpoints."""

    kv_names = ("k_proj.k_scale", "v_proj.v_scale")

    def __init__(self, config: ModelOptConfig) -> None:
        self._config = config
        self._left = set(config.layers)
        self.producer = config.producer
        self.kv: KvFormat = config.kv
        self.needs_kv_scales = config.kv == "int8"  # FP8's may be left out, and are 1 then

    def layer(self, module: Module) -> Layer | None:
        """Return how a layer is stored; see Reader."""
        self._left.discard(module.name)
        algo, group = self._algo(module.name)
        if algo is None:
            return None
        if module.is_float:
            raise module.error(
                f"is plain {module.dtype('weight')}, {self._config.where} says {algo} for it; its exclude_modules or "
                "quantized_layers belong to another checkpoint"
            )
        return LAYERS[algo](module, group)

    def finish(self) -> None:
        """Raise CheckpointError for quantized_layers that the model does not have."""
        if self._left:
            raise CheckpointError(
                f"{self._config.where}: quantized_layers has {min(self._left)!r}, which the model has no such linear "
                "layer for; the file belongs to another checkpoint"
            )

    def _algo(self, name: str) -> tuple[str | None, int | None]:
        if self._config.algo == MIXED:
            return self._config.layers.get(name, (None, None))
        if any(_matches(name, pattern) for pattern in self._config.exclude):
            return None, None
        return self._config.algo, self._config.group


def _matches(name: str, pattern: str) -> bool:
    """Return whether a module is excluded: by its name, as part of a module that is, or by a pattern with stars."""
    return name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)
