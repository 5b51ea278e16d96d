"""The tokenizer of an engine directory: text to ids and back, end ids, special tokens, chat template."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from .chat import ChatTemplate
from .detokenizer import Detokenizer, StageMaker, stage_makers, token_bytes
from .errors import EngineFileError, InvalidArgumentError, UnsupportedError
from .file_kind import MISSING, no_file

FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
# Characters: a longer text is encoded without Python's lock, so that other threads go on meanwhile.
_LONG_TEXT = 4096
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A Hugging Face tokenizer without transformers. Any thread.

    special_tokens : name -> text, e.g. {"bos_token": "<s>"}
    eos_token_ids : ids that end generation
    chat_template : None where the model has none
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        config: Mapping[str, Any] | None = None,
        generation_config: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> None:
        # A file may carry the padding of its training; a request's ids are never padded or cut here.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._special_ids = {
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        }
        config = config or {}
        self.special_tokens = {
            name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name))) is not None
        }
        self.eos_token_ids = self._find_eos_ids(generation_config or {})
        template = chat_template if chat_template is not None else _default_template(config)
        self.chat_template = None if template is None else ChatTemplate(template, self.special_tokens)
        # The decoder alone: as text the whole tokenizer is megabytes, and took 50 ms of every start.
        decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._stage_makers: list[StageMaker] | None = stage_makers(decoder)

    @classmethod
    def from_directory(cls, directory: Path | str) -> Tokenizer:
        """Read tokenizer.json and, where they are, tokenizer_config.json, generation_config.json, chat_template.jinja.

        raises EngineFileError when tokenizer.json is missing or a file is damaged
        """
        directory = Path(directory)
        try:
            paths = [path for name in FILES if _is_file(path := directory / name)]
            return cls.from_files({path.name: path.read_bytes() for path in paths}, str(directory))
        except OSError as error:
            raise EngineFileError(
                f"{error.filename} cannot be read: {error.strerror}; check its rights"
            ) from error

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], where: str) -> Tokenizer:
        """Read the contents of the files that from_directory names.

        where : their directory, for errors
        raises EngineFileError when tokenizer.json is missing or a file is damaged
        """
        if "tokenizer.json" not in files:
            raise EngineFileError(
                f"{where} has no tokenizer.json; build the engine from a checkpoint that has a fast tokenizer, "
                "or give prompts as token ids"
            )
        try:
            backend = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as error:  # the library raises plain Exception
            raise EngineFileError(
                f"{where}/tokenizer.json is not a tokenizer that can be read: {error}"
            ) from error
        template = files.get("chat_template.jinja")
        try:
            text = None if template is None else template.decode("utf-8")
        except UnicodeDecodeError as error:
            raise EngineFileError(f"{where}/chat_template.jinja is not UTF-8: {error}") from error
        return cls(
            backend,
            config=_read_json(files, "tokenizer_config.json", where),
            generation_config=_read_json(files, "generation_config.json", where),
            chat_template=text,
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's V may be larger."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, with the special tokens of the tokenizer's own template (mostly a BOS)."""
        try:
            if len(text) > _LONG_TEXT:
                return list(self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (
            TypeError
        ):  # the library takes Unicode only; Python's and JSON's texts can hold halves of UTF-16 pairs
            halves = [c for c in text if "\ud800" <= c <= "\udfff"]
            raise InvalidArgumentError(
                f"the text holds {halves[:1]!r}, half of a character in UTF-16; give Unicode text (read it as UTF-8)"
            ) from None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of all ids together. Ids that are not in the vocabulary have no text."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def to_json(self) -> str:
        """Return the text of a tokenizer.json, added tokens included, without padding and truncation."""
        return str(self._backend.to_str())

    def token_to_id(self, token: str) -> int | None:
        """Return the id of one token, None when there is no such token."""
        token_id = self._backend.token_to_id(token)
        return None if token_id is None else int(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token inside a text, b"" for an id that is not in the vocabulary."""
        text = self._backend.id_to_token(token_id)
        return b"" if text is None else token_bytes(text, self._stage_makers)

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is one that skip_special_tokens leaves out."""
        return token_id in self._special_ids

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a new stream whose text, put together, is decode() of all its ids.

        raises UnsupportedError for a decoder that cannot run on a stream
        """
        if self._stage_makers is None:
            kind = json.loads(self._backend.to_str())["decoder"]["type"]
            raise UnsupportedError(
                f"the tokenizer's decoder ({kind}) cannot decode token by token; use detokenize=False and decode()"
            )
        text = functools.partial(self._text_of, skip=self._special_ids if skip_special_tokens else set())
        return Detokenizer(text, [make() for make in self._stage_makers])

    def _text_of(self, token_id: int, skip: set[int]) -> str | None:
        if token_id in skip:
            return None
        text: Callable[[int], str | None] = self._backend.id_to_token
        return text(token_id)

    def _find_eos_ids(self, generation_config: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the generation config's end ids and the tokenizer's own: chat models often list only one there."""
        listed = generation_config.get("eos_token_id")
        ids = [listed] if isinstance(listed, int) else list(listed or [])
        eos = self.special_tokens.get("eos_token")
        own = None if eos is None else self.token_to_id(eos)
        return tuple(dict.fromkeys([*ids, *([] if own is None else [own])]))


def _read_json(files: Mapping[str, bytes], name: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(files.get(name, b"{}").decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise EngineFileError(f"{where}/{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise EngineFileError(f"{where}/{name} holds a {type(value).__name__}, it must be an object")
    return value


def _token_text(value: Any) -> str | None:
    """Return a special token's text: configs write it as a string or as an object with "content"."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _is_file(path: Path) -> bool:
    wrong = no_file(path)
    if wrong not in (None, MISSING):
        raise EngineFileError(f"{path} {wrong}; copy the tokenizer again, or build the engine again")
    return wrong is None


def _default_template(config: Mapping[str, Any]) -> str | None:
    """Return tokenizer_config.json's template; of a list of named ones, "default"."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None
