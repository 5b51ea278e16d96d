"""What all requests share: the engine, the settings, the state of the server. One event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

from ...runtime.async_engine import AsyncEngine
from ...runtime.tokenizer import Tokenizer
from ..metrics.collector import EngineMetrics
from ..send_budget import SendBudget
from .errors import ApiError, bad_request
from .lifecycle import Lifecycle
from .prefix import PrefixHasher
from .settings import Settings
from .token_text import TokenTexts
from .tools import ToolFormat, tool_format_of

T = TypeVar("T")
# Text of a prompt, in characters, that is worked on beside the event loop: some ms of tokenizing or templates.
LONG_TEXT = 8192
_NUM_HELPERS = 2  # threads for long prompts; more at once wait for each other, not the loop for them


class Context:
    """One engine that is served."""

    def __init__(self, engine: AsyncEngine, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings
        self.lifecycle = Lifecycle(engine, settings)
        self.budget = SendBudget()
        self.metrics = EngineMetrics(engine)
        self.num_streams = 0
        self.tool_format: ToolFormat | None = tool_format_of(engine.tokenizer, settings.tool_format)
        self.prefixes = PrefixHasher(settings.prefix_hash_key, engine.stats().tokens_per_block)
        self.token_texts = None if engine.tokenizer is None else TokenTexts(engine.tokenizer)
        self._helpers = concurrent.futures.ThreadPoolExecutor(_NUM_HELPERS, "plansmith-prompts")

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's; raises ApiError 400 for an engine without."""
        if self.engine.tokenizer is None:
            raise bad_request("the engine has no tokenizer; give prompts as token ids", code="unsupported")
        return self.engine.tokenizer

    async def beside(self, num_characters: int, work: Callable[[], T]) -> T:
        """Return work(), run on a helper thread when its text is long."""
        if num_characters <= LONG_TEXT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._helpers, work)

    def adapter_of(self, model: str | None) -> str | None:
        """Return the LoRA adapter that a request's model names, None for the model itself; ApiError 404 for neither."""
        if model is None or model in self.settings.model_names:
            return None
        if model in self.engine.adapters:
            return model
        known = ", ".join(repr(name) for name in (*self.settings.model_names, *self.engine.adapters))
        raise ApiError(
            404,
            f"there is no model {model[:200]!r}; there are {known}",
            param="model",
            code="model_not_found",
        )

    def interval_s(self) -> float:
        """Return the least time between two chunks of one stream."""
        fixed = self.settings.stream_interval_s
        return self.budget.interval_s(self.num_streams) if fixed is None else fixed

    def close(self) -> None:
        """Let the helper threads end."""
        self._helpers.shutdown(wait=False, cancel_futures=True)
