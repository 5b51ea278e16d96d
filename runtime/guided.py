"""Structured output: what restricts a request's text, compiled by llguidance into masks that the core applies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class GuidedParams:
    """What the text of a request must be; exactly one of these. Checked when made."""

    json_schema: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    choice: Sequence[str] | None = None
    json: bool = False


class GuideHandle:
    """A psm_guide for one request. The engine owns it once a submission with `struct` succeeds."""

    struct: Any  # psm_guide*

    def close(self) -> None:
        """Release it; only when no submission succeeded."""


def guide_of(
    params: GuidedParams, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]
) -> GuideHandle:
    """Return a new guide for one request (clones of it serve num_return_sequences). Any thread.

    vocab_size : the model's V, which may be more than the tokenizer's
    eos_ids : every id that ends the request; allowed exactly where the grammar may end
    raises InvalidArgumentError for what cannot be compiled, UnsupportedError without llguidance
    """
    raise NotImplementedError
