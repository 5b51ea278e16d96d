"""Text from tokens one at a time: what comes out, put together, is the full decode of all tokens.

A tokenizer's decoder is a chain of stages over the list of token texts (tokenizer.json, "decoder"). Each stage here
does the same on a stream, keeping only what a later token can still change: the bytes of an incomplete character, a
run of byte-fallback tokens, trailing characters that may be stripped. So a token costs O(1), whatever its position.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

TokenText = Callable[[int], "str | None"]


class Stage(Protocol):
    """One decoder of the chain, on a stream."""

    def push(self, text: str) -> str | None:
        """Take one token's text; return what is certain now, None while there is nothing to pass on."""

    def flush(self) -> str:
        """Return what was kept; the stream has ended."""


class Detokenizer:
    """A stream of one request's text. Not for use by several threads at once.

    token_text : id -> text in the tokenizer's own alphabet, None = the token is not part of the text
    stages : the decoder's chain
    """

    def __init__(self, token_text: TokenText, stages: Sequence[Stage]) -> None:
        self._token_text = token_text
        self._stages = stages

    def prime(self, token_ids: Sequence[int]) -> None:
        """Take tokens whose text is already out (the prompt's end), so that the text goes on after them."""
        for token_id in token_ids:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Return the text that this token makes certain; never a part of a character."""
        text = self._token_text(token_id)
        return "" if text is None else self._run(0, text)

    def flush(self) -> str:
        """Return the rest; bytes that never became a character come out as U+FFFD."""
        out = ""
        for i, stage in enumerate(self._stages):
            rest = stage.flush()
            if rest:
                out += self._run(i + 1, rest)
        return out

    def _run(self, first: int, text: str) -> str:
        for stage in self._stages[first:]:
            passed = stage.push(text)
            if passed is None:
                return ""
            text = passed
        return text


class ByteLevelStage:
    """Byte-level BPE: each character of a token stands for one byte, and the bytes are UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, text: str) -> str | None:
        """Return the characters completed by this token's bytes."""
        try:
            data = bytes(_BYTE_OF_CHAR[char] for char in text)
        except KeyError:  # an added token, written as itself
            data = text.encode()
        return self._decoder.decode(data) or None

    def flush(self) -> str:
        """Return U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", final=True)


class ByteFallbackStage:
    """Tokens <0x00>..<0xFF> are bytes. A run of them is text if all of it is UTF-8, else one U+FFFD a byte.

    That rule is the tokenizers library's, so a run can only come out when it ends.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, text: str) -> str | None:
        """Return the run before this token and its text, or None for one byte more."""
        byte = _fallback_byte(text)
        if byte is None:
            return self.flush() + text
        self._run.append(byte)
        return None

    def flush(self) -> str:
        """Return the run so far."""
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)


class ReplaceStage:
    """Replaces a fixed string in each token."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content

    def push(self, text: str) -> str | None:
        """Return the token with the replacement."""
        return text.replace(self._pattern, self._content)

    def flush(self) -> str:
        """Return nothing; nothing is kept."""
        return ""


class StripStage:
    """Strips up to `start` characters `content` from the beginning of the text and up to `stop` from its end."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop
        self._tail = ""

    def push(self, text: str) -> str | None:
        """Return the text but for a beginning to strip and an end that may be one."""
        while self._start and text:
            if text[0] != self._content:
                self._start = 0
                break
            text, self._start = text[1:], self._start - 1
        text = self._tail + text
        kept = 0
        while kept < min(self._stop, len(text)) and text[-1 - kept] == self._content:
            kept += 1
        cut = len(text) - kept
        out, self._tail = text[:cut], text[cut:]
        return out or None

    def flush(self) -> str:
        """Return nothing: what was kept is what is stripped."""
        self._tail = ""
        return ""


class MetaspaceStage:
    """SentencePiece's space mark becomes a space; those of the first token are dropped if one was prepended."""

    def __init__(self, mark: str, *, drop_first: bool) -> None:
        self._mark = mark
        self._drop = drop_first

    def push(self, text: str) -> str | None:
        """Return the token with spaces."""
        space, self._drop = ("" if self._drop else " "), False
        return text.replace(self._mark, space)

    def flush(self) -> str:
        """Return nothing; nothing is kept."""
        return ""


class JoinStage:
    """A tokenizer without a decoder: its tokens joined by spaces."""

    def __init__(self) -> None:
        self._separator = ""

    def push(self, text: str) -> str | None:
        """Return the token behind a space, the first one without."""
        separator, self._separator = self._separator, " "
        return separator + text

    def flush(self) -> str:
        """Return nothing; nothing is kept."""
        return ""


StageMaker = Callable[[], Stage]


def stage_makers(decoder: Mapping[str, Any] | None) -> list[StageMaker] | None:
    """Return what makes the stages of a tokenizer.json decoder, or None when one cannot run on a stream.

    Fuse makes one text of all tokens, which a stream is anyway. Strip after it works on the whole text; before it,
    on each token, which no language model's tokenizer does.
    """
    if decoder is None:
        return [JoinStage]
    makers: list[StageMaker] = []
    fused = False
    for part in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
        kind = part["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused:
            makers.append(_strip_maker(part["content"], part["start"], part["stop"]))
        elif fused or (makers and makers[-1] is ByteFallbackStage):
            return None  # it would see other pieces here than the tokenizer's own chain gives it
        elif kind == "ByteLevel":
            makers.append(ByteLevelStage)
            fused = True
        elif kind == "ByteFallback":
            makers.append(ByteFallbackStage)
        elif kind == "Replace" and "String" in part["pattern"]:
            makers.append(_replace_maker(part["pattern"]["String"], part["content"]))
        elif kind == "Metaspace":
            makers.append(_metaspace_maker(part))
        else:
            return None
    return makers


def _replace_maker(pattern: str, content: str) -> StageMaker:
    return lambda: ReplaceStage(pattern, content)


def _strip_maker(content: str, start: int, stop: int) -> StageMaker:
    return lambda: StripStage(content, start, stop)


def _metaspace_maker(part: Mapping[str, Any]) -> StageMaker:
    # Files from before prepend_scheme have add_prefix_space, true unless given.
    scheme = part.get("prepend_scheme", "always" if part.get("add_prefix_space", True) else "never")
    return lambda: MetaspaceStage(part["replacement"], drop_first=scheme != "never")


def token_bytes(text: str, makers: Sequence[StageMaker] | None) -> bytes:
    """Return the bytes that one token adds inside a text; not valid UTF-8 where it is a part of a character.

    text : the token in the tokenizer's own alphabet
    makers : of stage_makers
    """
    if makers and ByteLevelStage in makers:
        try:
            return bytes(_BYTE_OF_CHAR[char] for char in text)
        except KeyError:  # an added token, written as itself
            return text.encode()
    byte = _fallback_byte(text)
    return text.replace("\u2581", " ").encode() if byte is None else bytes([byte])


def _fallback_byte(text: str) -> int | None:
    if len(text) != 6 or not text.startswith("<0x") or text[5] != ">":
        return None
    try:
        return int(text[3:5], 16)
    except ValueError:
        return None


def _byte_chars() -> dict[str, int]:
    """Return byte-level BPE's alphabet: printable Latin-1 characters are themselves, the rest follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_chars()
