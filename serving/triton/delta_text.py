"""The text of a stream's answers, each made by itself: put together they are the text of all tokens at once.

What a decoder keeps between tokens (the bytes of an incomplete character, a run of byte-fallback tokens, a space that
belongs to the next word) depends on few tokens before. An answer brings those as its prefix: they are decoded first and
their text, which earlier answers gave, is thrown away. `PrefixRule` says how many they must be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ...runtime.errors import UnsupportedError
from ...runtime.tokenizer import Tokenizer

# Tokens of their own in a prefix. An incomplete character of byte-level BPE is at most 3 tokens; decoders that strip do
# so to the first two characters or last two, and a token has one or more.
_NUM_ANCHORS = 4


class TextStream(Protocol):
    """Text from tokens one at a time; runtime.detokenizer.Detokenizer is one."""

    def push(self, token_id: int) -> str:
        """Return the text that this token makes certain."""

    def flush(self) -> str:
        """Return the rest; the stream has ended."""


StreamMaker = Callable[[], TextStream]


def delta_text(
    detokenizer_factory: StreamMaker, prefix_ids: Sequence[int], new_ids: Sequence[int], is_final: bool
) -> str:
    """Return the text that new tokens make certain behind those of the prefix. Any thread.

    An incomplete character at the end is held back: its tokens are in the next answer's prefix. So is a run of
    byte-fallback tokens until it ends.

    prefix_ids : the tokens right before the new ones, as many as PrefixRule says, or all there are
    is_final : no tokens follow, so that nothing is held back
    """
    stream = detokenizer_factory()
    for token_id in prefix_ids:
        stream.push(token_id)
    text = "".join([stream.push(token_id) for token_id in new_ids])
    return text + stream.flush() if is_final else text


def stream_maker(tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> StreamMaker:
    """Return what makes new text streams of a tokenizer, whatever its decoder."""
    try:
        tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    except UnsupportedError:
        return lambda: WholeTextStream(tokenizer, skip_special_tokens)
    return lambda: tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)


class WholeTextStream:
    """For a decoder that cannot run on a stream: decodes all tokens so far each time, which costs O(n) a token."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._num_given = 0

    def push(self, token_id: int) -> str:
        """Return what is new but for U+FFFD at the end, which may become a character."""
        self._ids.append(token_id)
        return self._rest(self._tokenizer.decode(self._ids, skip_special_tokens=self._skip).rstrip("\ufffd"))

    def flush(self) -> str:
        """Return what was held back."""
        return self._rest(self._tokenizer.decode(self._ids, skip_special_tokens=self._skip))

    def _rest(self, text: str) -> str:
        new, self._num_given = text[self._num_given :], max(self._num_given, len(text))
        return new


class PrefixRule:
    """How far back an answer's prefix goes. Any thread.

    It begins at a token that comes out by itself (no special token, no byte of a run, no piece of a character: such
    a one leaves every decoder in the same state, whatever came before) and holds enough of them.

    least : tokens that `keep` keeps even so
    """

    def __init__(self, tokenizer: Tokenizer, least: int = 0) -> None:
        self._least = least
        self._make = stream_maker(tokenizer)
        self._is_anchor: dict[int, bool] = {}

    def start(self, token_ids: Sequence[int], end: int) -> int:
        """Return where the prefix of an answer whose new tokens begin at `end` begins: token_ids[start:end].

        token_ids : what is one text, from its first token
        """
        missing = _NUM_ANCHORS
        for start in range(end - 1, -1, -1):
            missing -= self._comes_out(token_ids[start])
            if not missing:
                return start
        return 0

    def keep(self, token_ids: list[int]) -> list[int]:
        """Return the last of these tokens, the prefix of what follows them.

        token_ids : a text from its first token on, or what `keep` kept and the tokens after it
        """
        end = len(token_ids)
        return token_ids[min(self.start(token_ids, end), max(end - self._least, 0)) :]

    def _comes_out(self, token_id: int) -> bool:
        known = self._is_anchor.get(token_id)
        if known is None:
            known = self._is_anchor[token_id] = bool(self._make().push(token_id))
        return known
