"""Structured output: what restricts a request's text, compiled by llguidance into masks that the core applies.

    engine.generate(prompt, SamplingParams(max_tokens=200, guided=GuidedParams(regex=r"[0-9]{4}-[0-9]{2}")))

A grammar is compiled on the thread that submits, within limits, so that one which cannot be compiled is an error there
and costs nobody else. The masks are made on a thread of the core's, beside the model's step.

- Where the grammar is complete, every end id of the request is allowed, and where nothing may follow, they alone.
- An end id that a grammar also takes as text (of stop_token_ids) ends the output there, like a stop string: the output
  is then a beginning of the language, as it is when max_tokens runs out.
- min_tokens forbids end ids: a grammar that is complete before fails the request (INVALID_ARGUMENT), as do logit_bias
  and bad_words that forbid everything the grammar allows.
- ignore_eos cannot go with a grammar, whose end is an end id; it is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._native import native
from .errors import InvalidArgumentError
from .guided_compiler import GuideCompiler, compiler_of, error_of

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

_OK, _ERROR_EXECUTOR, _ERROR_INTERNAL = 0, 8, 12
_KINDS = ("json_schema", "regex", "ebnf", "choice", "json")


@dataclasses.dataclass(frozen=True)
class GuidedParams:
    """What the text of a request must be; exactly one of the first five. Checked when made, compiled at submission.

    json_schema : JSON that fits the schema, given as text or as Python objects
    regex : text that the expression matches as a whole (Rust's syntax: no look-around, no back-references;
        its classes of digits and letters are those of all scripts, so [0-9] for a number that a program reads)
    ebnf : text of a grammar, `root ::= ...` as xgrammar and llama.cpp have it, or llguidance's Lark (`start: ...`)
    choice : one of these strings
    json : any JSON object or array
    whitespace_pattern : what may stand between the tokens of JSON, as an expression; "" = nothing, None = up to 20
        blanks, tabs and line breaks
    """

    json_schema: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    choice: Sequence[str] | None = None
    json: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        """Raise InvalidArgumentError naming the parameter, what it got and what it can be."""
        given = [
            name for name in _KINDS if getattr(self, name) not in (None, False) or self._is_false_schema(name)
        ]
        if len(given) != 1:
            raise InvalidArgumentError(
                f"guided has {' and '.join(given) or 'nothing'}, it must have exactly one of {', '.join(_KINDS)}"
            )
        for name in ("regex", "ebnf", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, str) or (not value and name != "whitespace_pattern")
            ):
                raise InvalidArgumentError(f"guided.{name} is {value!r}, it must be text")
        if not isinstance(self.json, bool):
            raise InvalidArgumentError(
                f"guided.json is {self.json!r}, it must be True or False; a schema goes into json_schema"
            )
        if not isinstance(self.json_schema, (str, Mapping, bool, type(None))):
            raise InvalidArgumentError(
                f"guided.json_schema is a {type(self.json_schema).__name__}, it must be JSON text or a mapping"
            )
        if self.whitespace_pattern is not None and self.json_schema is None and not self.json:
            raise InvalidArgumentError(
                "guided.whitespace_pattern goes with json_schema or json only; leave it out"
            )
        if self.choice is not None:
            object.__setattr__(self, "choice", self._checked_choice())

    def _is_false_schema(self, name: str) -> bool:
        return name == "json_schema" and self.json_schema is False

    def _checked_choice(self) -> tuple[str, ...]:
        choice = self.choice
        if isinstance(choice, str) or not isinstance(choice, Sequence) or not choice:
            raise InvalidArgumentError(f"guided.choice is {choice!r}, it must be a list of texts")
        for text in choice:
            if not isinstance(text, str) or not text:
                raise InvalidArgumentError(
                    f"guided.choice has {text!r}, every entry must be a non-empty text"
                )
        return tuple(choice)


class _Guide:
    """One psm_guide.self: a matcher that stands behind the accepted tokens and then `_ahead`.

    Only one call at a time, as psm_guide promises; from any thread.
    """

    def __init__(self, matcher: Any, compiler: GuideCompiler, end_ids: frozenset[int]) -> None:
        self.error_text = native().ffi.NULL
        self._matcher = matcher
        self._compiler = compiler
        self._end_ids = end_ids
        self._ahead: list[int] = []
        self._ended = False

    def clone(self) -> _Guide:
        """Return another guide at the beginning, where this one is."""
        return _Guide(self._matcher.deep_copy(), self._compiler, self._end_ids)

    def accept(self, tokens: Sequence[int]) -> None:
        """Move past generated tokens. An end id ends the output."""
        for i, token in enumerate(tokens):
            if token in self._end_ids:
                self._ended = True
                tokens = tokens[:i]
                break
        num_moved = self._move_to(tokens)
        if num_moved < len(tokens):
            raise ValueError(f"token {tokens[num_moved]} was generated, which the grammar does not allow")
        self._ahead.clear()

    def fill_mask(self, ahead: Sequence[int], mask: Any) -> None:
        """Write what may follow `ahead` to the core's mask, (V + 31) / 32 words."""
        ffi, compiler = native().ffi, self._compiler
        num_bytes = 4 * compiler.num_mask_words
        if self._ended or not self._end_ids.isdisjoint(ahead) or self._move_to(ahead) < len(ahead):
            ffi.memmove(mask, bytes(num_bytes), num_bytes)
            return
        if compiler.num_words == compiler.num_mask_words:
            self._matcher.unsafe_compute_mask_ptr(int(ffi.cast("uintptr_t", mask)), num_bytes)
        else:
            ffi.memmove(mask, self._matcher.compute_bitmask()[:num_bytes], num_bytes)
        if self._matcher.is_error():
            raise RuntimeError(error_of(self._matcher))
        if self._end_ids != compiler.eos_ids and self._matcher.is_accepting():
            for token in compiler.eos_ids:
                mask[token // 32] &= ~(1 << token % 32) & 0xFFFFFFFF
            for token in self._end_ids:
                mask[token // 32] |= 1 << token % 32

    def _move_to(self, tokens: Sequence[int]) -> int:
        """Stand behind `tokens` (from the accepted ones on), as far as they are allowed; return how many were."""
        same = 0
        for mine, wanted in zip(self._ahead, tokens, strict=False):
            if mine != wanted:
                break
            same += 1
        num_back = len(self._ahead) - same
        if num_back > 0 and not self._matcher.rollback(num_back):
            raise RuntimeError(error_of(self._matcher))
        rest = list(tokens[same:])
        num_moved = self._matcher.try_consume_tokens(rest) if rest else 0
        if num_moved < len(rest) and self._matcher.is_error():  # a limit of the compiler's, not the token
            raise RuntimeError(error_of(self._matcher))
        self._ahead[same:] = rest[:num_moved]
        return same + int(num_moved)


class GuideHandle:
    """A psm_guide for one request, at its beginning.

    struct : psm_guide*, for psm_request.guide. The engine owns what it stands for once a submission succeeds.
    """

    def __init__(self, guide: _Guide) -> None:
        self.struct = native().new("psm_guide")
        for name, callback in _callbacks().items():
            setattr(self.struct, name, callback)
        self.struct.self = _keep(guide)

    def close(self) -> None:
        """Release it. Only when no submission with it succeeded."""
        _live.pop(_number_of(self.struct.self), None)


def guide_of(
    params: GuidedParams, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]
) -> GuideHandle:
    """Return a new guide for one request; the core clones it for further sequences. Any thread.

    It may take some seconds for a grammar that is new and large: not on the thread of an event loop.

    vocab_size : the model's V, which may be more than the tokenizer's
    eos_ids : every id that ends the request; they are allowed exactly where the grammar may end
    raises InvalidArgumentError for what cannot be compiled and for no eos_ids, UnsupportedError without llguidance
    """
    if not eos_ids:
        raise InvalidArgumentError(
            "guided needs an id that ends the output when the grammar does, and there is none; leave ignore_eos out, "
            "or give stop_token_ids where the model has no end id"
        )
    for token in eos_ids:
        if not 0 <= token < vocab_size:
            raise InvalidArgumentError(f"the end id {token} is not in the vocabulary of {vocab_size}")
    compiler = compiler_of(tokenizer, vocab_size, tokenizer.eos_token_ids or tuple(eos_ids))
    return GuideHandle(_Guide(compiler.matcher(params), compiler, frozenset(eos_ids)))


# ---------------------------------------------------------------- what the core calls

# psm_guide.self -> the guide. A number rather than an address: one that is closed twice, or late, harms nobody.
_live: dict[int, _Guide] = {}
_numbers = itertools.count(1)


def _keep(guide: _Guide) -> Any:
    number = next(_numbers)
    _live[number] = guide
    return native().ffi.cast("void*", number)


def _number_of(pointer: Any) -> int:
    return int(native().ffi.cast("uintptr_t", pointer))


@functools.cache
def _callbacks() -> dict[str, Any]:
    """Return the functions of every psm_guide. Nothing is raised into the core, not even a KeyboardInterrupt."""
    ffi = native().ffi
    types = {name: field.type for name, field in ffi.typeof("psm_guide").fields}

    def failed(guide: _Guide, error: BaseException) -> int:
        text = str(error) or type(error).__name__
        guide.error_text = ffi.new("char[]", text.encode("utf-8", "replace"))
        return _ERROR_EXECUTOR

    def fill_mask(pointer: Any, ahead: Any, num_ahead: int, mask: Any) -> int:
        guide = _live.get(_number_of(pointer))
        if guide is None:
            return _ERROR_INTERNAL
        try:
            guide.fill_mask(ffi.unpack(ahead, num_ahead) if num_ahead else (), mask)
        except BaseException as error:
            return failed(guide, error)
        return _OK

    def accept(pointer: Any, tokens: Any, num_tokens: int) -> int:
        guide = _live.get(_number_of(pointer))
        if guide is None:
            return _ERROR_INTERNAL
        try:
            guide.accept(ffi.unpack(tokens, num_tokens))
        except BaseException as error:
            return failed(guide, error)
        return _OK

    def clone(pointer: Any, out: Any) -> int:
        guide = _live.get(_number_of(pointer))
        if guide is None:
            return _ERROR_INTERNAL
        try:
            out[0] = _keep(guide.clone())
        except BaseException as error:
            return failed(guide, error)
        return _OK

    def close(pointer: Any) -> None:
        _live.pop(_number_of(pointer), None)

    def last_error(pointer: Any) -> Any:
        guide = _live.get(_number_of(pointer))
        return ffi.NULL if guide is None else guide.error_text

    return {
        "fill_mask": ffi.callback(types["fill_mask"], fill_mask, error=_ERROR_EXECUTOR),
        "accept": ffi.callback(types["accept"], accept, error=_ERROR_EXECUTOR),
        "clone": ffi.callback(types["clone"], clone, error=_ERROR_EXECUTOR),
        "close": ffi.callback(types["close"], close),
        "last_error": ffi.callback(types["last_error"], last_error, error=ffi.NULL),
    }
