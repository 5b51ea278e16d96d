"""Reading a config.pbtxt, also one whose `${variables}` were never filled."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from ...runtime.errors import InvalidArgumentError, UnsupportedError

MAX_CONFIG_BYTES = 4 << 20
# The text format's tokens as far as variables need them: strings and comments are told from the rest.
_TOKENS = re.compile(
    r"(?P<comment>#[^\n]*)|(?P<string>\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*')|\$\{(?P<variable>\w*)\}"
)
_FIELD = re.compile(r"(\w+)\s*:\s*\[?\s*$")
_KEY = re.compile(r"""\bkey\s*:\s*(?:"((?:[^"\\\n]|\\.)*)"|'((?:[^'\\\n]|\\.)*)')""")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A config.pbtxt.

    path : of it
    message : inference.ModelConfig; a number, a switch or a type that was not filled is 0, false, TYPE_INVALID
    unfilled : names of fields outside of quotes that have a variable where their value belongs
    key_lines : line of each `key:`, the first one of equal keys
    """

    path: Path
    message: Any
    unfilled: frozenset[str]
    key_lines: dict[str, int]

    @property
    def name(self) -> str:
        """The model's name: that of its directory, as Triton has it."""
        return self.path.parent.name

    def parameters(self) -> dict[str, str]:
        """Return the texts of the parameters, variables as they stand, in the order of the file."""
        found = {key: str(one.string_value) for key, one in self.message.parameters.items()}
        return dict(sorted(found.items(), key=lambda item: self.key_lines.get(item[0], 0)))

    def where(self, key: str | None = None) -> str:
        """Return the file, and the line of a parameter's key."""
        line = self.key_lines.get(key) if key is not None else None
        return f"{self.path}" + (f", line {line}" if line else "")


def read_config(path: Path) -> ModelConfig:
    """Return a config.pbtxt.

    raises InvalidArgumentError naming file, line and what is wrong there; UnsupportedError without the extra triton
    """
    try:
        data = path.read_bytes() if path.stat().st_size <= MAX_CONFIG_BYTES else None
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error.strerror}; check the path") from error
    if data is None:
        raise InvalidArgumentError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes, so no config.pbtxt")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InvalidArgumentError(
            f"{path}, line {line}: not UTF-8 ({error.reason}); save it as UTF-8"
        ) from None
    return parse_config(text, path)


def parse_config(text: str, path: Path) -> ModelConfig:
    """Return the config of a text; see read_config."""
    text_format, message = _protobuf()
    plain, unfilled = _without_variables(text, path)
    try:
        text_format.Parse(plain, message)
    except text_format.ParseError as error:
        raise InvalidArgumentError(_parse_message(error, text, plain, path)) from None
    except (UnicodeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} is no model configuration: {error}") from None
    return ModelConfig(path, message, frozenset(unfilled), _key_lines(text))


def _protobuf() -> tuple[Any, Any]:
    """Return protobuf's text format, and an empty message."""
    try:
        from google.protobuf import text_format
        from tritonclient.grpc import model_config_pb2
    except ImportError as error:
        raise UnsupportedError(
            f"an older repository is read with the package tritonclient ({error}); run: pip install "
            "'plansmith[triton]'"
        ) from error
    return text_format, model_config_pb2.ModelConfig()


def _without_variables(text: str, path: Path) -> tuple[str, set[str]]:
    """Return the text with 0 for each variable outside of quotes and comments, and the fields that had one."""
    unfilled: set[str] = set()
    parts: list[str] = []
    end = 0
    for found in _TOKENS.finditer(text):
        if found["variable"] is None:
            continue
        parts += [text[end : found.start()], "0"]
        end = found.end()
        field = _FIELD.search("".join(parts[:-1])[-200:])
        if field is None:
            line = text.count("\n", 0, found.start()) + 1
            raise InvalidArgumentError(
                f"{path}, line {line}: {found[0]} stands where no value belongs; fill it or remove it"
            )
        unfilled.add(field[1])
    return "".join([*parts, text[end:]]), unfilled


def _parse_message(error: Any, text: str, plain: str, path: Path) -> str:
    """Return protobuf's error with file and line, the line itself, and what to do.

    plain : the text that was parsed
    """
    number = error.GetLine()
    said = re.sub(r"^\d+:\d+ : ", "", str(error)).replace("inference.", "")
    if not number:
        return f"{path}: {_printable(said)}"
    said = said.removeprefix(f"'{_line(plain, number)}': ").strip().rstrip(".")
    shown = _line(text, number).strip()[:100]
    return _printable(f"{path}, line {number}: {said}; the line is: {shown}")


def _line(text: str, number: int) -> str:
    lines = text.split("\n")
    return lines[number - 1] if number <= len(lines) else ""


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _key_lines(text: str) -> dict[str, int]:
    """Return the line of each `key:`, comments left out."""
    result: dict[str, int] = {}
    plain = _TOKENS.sub(lambda one: " " * len(one[0]) if one["comment"] else one[0], text)
    for found in _KEY.finditer(plain):
        key = found[1] if found[1] is not None else found[2]
        result.setdefault(key, plain.count("\n", 0, found.start()) + 1)
    return result
