"""What a reader of one quantized format gives: each linear layer's form, and the KV cache's scales."""

from __future__ import annotations

from typing import Protocol

from ...scheme import KvFormat
from .module import Layer, Module


class Reader(Protocol):
    """One format, made of its configuration, which it has checked.

    producer : what wrote the checkpoint
    kv : what the KV cache is to hold
    kv_names : (K, V) where a layer's scales are beside its attention, e.g. ("k_proj.k_scale", "v_proj.v_scale")
    needs_kv_scales : whether a scale that is absent is an error; otherwise it is 1
    """

    producer: str
    kv: KvFormat
    kv_names: tuple[str, str]
    needs_kv_scales: bool

    def layer(self, module: Module) -> Layer | None:
        """Return how a layer is stored, all its tensors checked; None for one that is plain float.

        raises CheckpointError for what the configuration and the tensors do not agree on
        """

    def finish(self) -> None:
        """Raise CheckpointError if the configuration names layers that were never asked for."""
