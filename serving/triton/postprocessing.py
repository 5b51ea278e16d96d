"""The model `postprocessing`: token ids to text, with nothing kept between requests."""

from __future__ import annotations

from .text_decoder import TextDecoder
from .text_model import Tensors, TextModel
from .text_settings import TextSettings


class TritonPythonModel(TextModel):
    """See TextDecoder: any instance can decode any answer, in any order."""

    def open(self, settings: TextSettings) -> None:
        """Read the tokenizer that the parameters name."""
        self._decoder = TextDecoder(
            settings.open_tokenizer(), skip_special_tokens=settings.skip_special_tokens
        )

    def convert(self, tensors: Tensors) -> Tensors:
        """Return the texts of a request's tokens."""
        return self._decoder.decode(tensors)
