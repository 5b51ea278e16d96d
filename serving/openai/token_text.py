"""The text and bytes of single tokens, for log-probabilities."""

from __future__ import annotations

from ...runtime.tokenizer import Tokenizer

_MAX_KEPT = 100_000


class TokenTexts:
    """Texts of tokens by themselves, kept. For one event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept: dict[int, tuple[str, tuple[int, ...]]] = {}

    def text(self, token_id: int) -> str:
        r"""Return a token's text; a part of a character is shown as its bytes, `bytes:\xe2\x82`."""
        return self._of(token_id)[0]

    def data(self, token_id: int) -> tuple[int, ...]:
        """Return a token's bytes, so that a client can put characters together that several tokens make."""
        return self._of(token_id)[1]

    def _of(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        found = self._kept.get(token_id)
        if found is None:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            found = self._kept[token_id] = self._make(token_id)
        return found

    def _make(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode(), tuple(data)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), tuple(data)
