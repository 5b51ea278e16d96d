"""The text of /metrics, under the names that Triton's metrics have."""

from __future__ import annotations

from ...runtime.async_engine import AsyncEngine


class Metrics:
    """What one engine tells about itself."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def observe(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count a finished request."""

    def text(self) -> bytes:
        """Return the text of the metrics."""
        return b""
