"""The text of one sequence as its answers come, up to a stop word."""

from __future__ import annotations

from collections.abc import Sequence

from .delta_text import StreamMaker


class SequenceText:
    """Text from tokens, answer by answer. One thread at a time.

    A stop word stays in the text, which ends with it. It is looked for in the text, so it is found however the tokens
    cut it: in pieces, in several answers, or grown together with what follows; then the rest of that token is cut.

    stop_words : those complete first count
    min_tokens : before so many tokens no stop word counts
    """

    def __init__(self, make_stream: StreamMaker, stop_words: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._stream = make_stream()
        self._stop_words = tuple(stop_words)
        self._longest = max(map(len, stop_words), default=0)
        self._min_tokens = min_tokens
        self._tail = ""  # the last of the text, in which a stop word may have begun
        self.num_tokens = 0
        self.text = ""  # all of it
        self.is_stopped = False

    def prompt(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens that come before the output; no stop word is looked for in it."""
        text = "".join([self._stream.push(token_id) for token_id in token_ids])
        self.text += text
        return text

    def push(self, token_ids: Sequence[int], *, is_final: bool) -> tuple[str, int]:
        """Return the text that new tokens add, and how many of them count: all, or those up to a stop word.

        is_final : no more tokens follow
        """
        start = len(self.text)
        num_used = 0
        for token_id in token_ids:
            if self.is_stopped:
                break
            num_used += 1
            self.num_tokens += 1
            self._add(self._stream.push(token_id))
        if is_final and not self.is_stopped:
            self._add(self._stream.flush())
        return self.text[start:], num_used

    def _add(self, text: str) -> None:
        if self._stop_words and self.num_tokens >= self._min_tokens:
            text = self._cut(text)
        self.text += text
        if self._longest > 1:
            self._tail = (self._tail + text)[-(self._longest - 1) :]

    def _cut(self, text: str) -> str:
        """Return new text up to the end of the stop word that is complete first."""
        searched = self._tail + text
        ends = []
        for word in self._stop_words:
            # Only one that ends in the new text; those before were in texts too short to stop.
            at = searched.find(word, max(0, len(self._tail) - len(word) + 1))
            if at >= 0:
                ends.append(at + len(word))
        if not ends:
            return text
        self.is_stopped = True
        return searched[len(self._tail) : min(ends)]
