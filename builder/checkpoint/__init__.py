"""Reads checkpoints: a Hugging Face directory or a GGUF file becomes a DecoderSpec and weights on demand."""

from __future__ import annotations

from .checkpoint import Checkpoint, open_checkpoint
from .weights import WeightSource

__all__ = ["Checkpoint", "WeightSource", "open_checkpoint"]
