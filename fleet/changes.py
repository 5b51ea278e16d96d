"""Which inputs of a unit differ from those of a record, told so that one line says what somebody did."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

Pair = tuple[str | None, str | None]
"""An input's text in a record and now; None = there is none."""

# What a hash that differs means.
_WORDS = {
    "checkpoint": "weights or config changed",
    "spec": "what is read of the config changed",
    "sources": "plansmith's builder changed",
    "kernels.sources": "plansmith's device kernels changed",
    "tokenizer": "its files changed",
    "original": "the unquantized checkpoint changed",
}
# What follows from another input: (what follows, from what), by the beginnings of their names.
_FOLLOWS = (
    ("spec", "checkpoint"),
    ("precision.quantization", "checkpoint"),
    ("kernels.key", "kernels.sources"),
    ("kernels.key", "kernels.triton"),
    ("kernels.sources", "sources"),
    ("precision.", "precision.name"),
    ("compute", "precision.name"),
    ("target.", "target.name"),
)


@dataclasses.dataclass(frozen=True)
class Change:
    """An input that differs. old, new : its text in the record and now; None = there is none."""

    input: str
    old: str | None
    new: str | None

    def __str__(self) -> str:
        if self.input in _WORDS and self.old and self.new:
            return f"{self.input}: {_WORDS[self.input]}"
        return f"{self.input}: {_shown(self.old)} -> {_shown(self.new)}"


def explain(changes: Mapping[str, Pair]) -> tuple[Change, ...]:
    """Return the changes that say why, without those that follow from them: of 30 inputs of a new draft, its name."""
    own = {name: pair for name, pair in changes.items() if not name.startswith("draft.")}
    drafts = {name.removeprefix("draft."): pair for name, pair in changes.items() if name not in own}
    named = drafts.get("precision.name")
    if named is not None and None in named:  # all of it came or went
        own["draft"] = named
    else:
        fresh = {name: pair for name, pair in drafts.items() if changes.get(name) != pair}
        own |= {f"draft.{name}": pair for name, pair in fresh.items() if not _follows(name, fresh)}
    return tuple(Change(name, *pair) for name, pair in sorted(own.items()) if not _follows(name, own))


def _follows(name: str, changes: Mapping[str, Pair]) -> bool:
    return any(
        name.startswith(consequence) and name != cause and cause in changes for consequence, cause in _FOLLOWS
    )


def _shown(text: str | None) -> str:
    if text is None or text == "null":
        return "none"
    if re.fullmatch(r"[0-9a-f]{64}", text):
        return f"{text[:12]}…"
    return text or "nothing"
