"""The model `preprocessing`: text to token ids."""

from __future__ import annotations

from .text_encoder import TextEncoder
from .text_model import Tensors, TextModel
from .text_settings import TextSettings


class TritonPythonModel(TextModel):
    """See TextEncoder."""

    def open(self, settings: TextSettings) -> None:
        """Read the tokenizer that the parameters name."""
        self._encoder = TextEncoder(
            settings.open_tokenizer(),
            add_special_tokens=settings.add_special_tokens,
            max_text_bytes=settings.max_text_bytes(),
        )

    def convert(self, tensors: Tensors) -> Tensors:
        """Return the ids of a request's texts."""
        return self._encoder.encode(tensors)
