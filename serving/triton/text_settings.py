"""What the parameters of the models around `tensorrt_llm` say."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...runtime.errors import EngineFileError, InvalidArgumentError
from ...runtime.tokenizer import Tokenizer
from .parameter_text import flag
from .parameters import in_repository

_UNFILLED = "${"
# Of the texts of one request. A prompt has 4 or so bytes a token; encoding takes half a second a MiB, and all wait.
_LEAST_TEXT_BYTES = 1 << 20
_TEXT_BYTES_PER_TOKEN = 32
_TEXT_BYTES = 4 << 20  # where the engine's limits are not beside the tokenizer


@dataclasses.dataclass(frozen=True)
class TextSettings:
    """The settings of preprocessing, postprocessing and tensorrt_llm_bls; a model reads those that it has.

    tokenizer_dir : a directory with tokenizer.json, as an engine directory's `tokenizer` is
    is_decoupled : a request may have several answers
    """

    tokenizer_dir: Path
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    accumulate_tokens: bool = False
    engine_model: str = "tensorrt_llm"
    draft_model: str = ""
    is_decoupled: bool = False

    @classmethod
    def read(cls, config: Mapping[str, Any], repository: Path | None = None) -> TextSettings:
        """Return what Triton's JSON of a config.pbtxt says.

        config : json.loads(args["model_config"])
        repository : where a relative tokenizer_dir starts; the directory of the models
        raises InvalidArgumentError that names a key without a value it needs, with one that cannot be read, or with a
            `${...}` that was not filled
        """
        texts = _Texts(config)
        directory = texts.required("tokenizer_dir")
        return cls(
            tokenizer_dir=in_repository(directory, repository),
            add_special_tokens=texts.switch("add_special_tokens", True),
            skip_special_tokens=texts.switch("skip_special_tokens", True),
            accumulate_tokens=texts.switch("accumulate_tokens", False),
            engine_model=texts.text("tensorrt_llm_model_name") or "tensorrt_llm",
            draft_model=texts.text("tensorrt_llm_draft_model_name"),
            is_decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
        )

    def max_text_bytes(self) -> int:
        """Return how many bytes the texts of a request may have, by the limits of the engine that has the tokenizer."""
        for folder in (self.tokenizer_dir, self.tokenizer_dir.resolve().parent):
            try:
                manifest = json.loads((folder / "manifest.json").read_bytes())
                most = int(manifest["limits"]["max_input_len"])
            except (OSError, ValueError, KeyError, TypeError):
                continue
            return max(_LEAST_TEXT_BYTES, _TEXT_BYTES_PER_TOKEN * most)
        return _TEXT_BYTES

    def open_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of tokenizer_dir, or of the `tokenizer` in it: an engine directory serves as well."""
        inside = self.tokenizer_dir / "tokenizer"
        try:
            return Tokenizer.from_directory(inside if inside.is_dir() else self.tokenizer_dir)
        except EngineFileError as error:
            raise EngineFileError(f"tokenizer_dir is {str(self.tokenizer_dir)!r}: {error}") from error


class _Texts:
    def __init__(self, config: Mapping[str, Any]) -> None:
        self._model = config.get("name", "the model")
        self._texts = {key: one.get("string_value", "") for key, one in config.get("parameters", {}).items()}

    def text(self, key: str) -> str:
        text = self._texts.get(key, "").strip()
        if _UNFILLED in text:
            raise InvalidArgumentError(
                f"{key} of {self._model} is {text!r}, a variable of the template that was not filled; give it a value, "
                "or make it empty for the default"
            )
        return str(text)

    def required(self, key: str) -> str:
        text = self.text(key)
        if not text:
            raise InvalidArgumentError(
                f"{key} of {self._model} is empty, it must be a directory with the tokenizer.json of the engine; write "
                "the repository with: plansmith triton-repo ENGINE_DIR -o REPO"
            )
        return text

    def switch(self, key: str, default: bool) -> bool:
        text = self.text(key)
        try:
            return flag(text) if text else default
        except ValueError as error:
            raise InvalidArgumentError(f"{key} of {self._model} is {text!r}, it must be {error}") from None
