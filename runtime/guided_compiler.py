"""Grammars compiled by llguidance, within limits of size, memory and time, and kept for the next request."""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .errors import InvalidArgumentError, UnsupportedError
from .guided_grammar import grammar_source

if TYPE_CHECKING:
    from .guided import GuidedParams
    from .tokenizer import Tokenizer

# Compiled grammars kept for the next request with the same one.
MAX_COMPILED = 64
# llguidance's own limits end a compile within a second or two; this one holds where they do not.
COMPILE_TIMEOUT_S = 5.0
# Compiles that were given up and still run. More at a time are refused.
_MAX_ABANDONED = 2
# 1 to 2 KB each: what one request's lexer may grow to. Any JSON takes some hundreds.
_MAX_LEXER_STATES = 50_000


class GuideCompiler:
    """Compiles grammars for one tokenizer and keeps the last MAX_COMPILED. Any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Read the vocabulary (0.2 s for 50,000 tokens).

        vocab_size : the model's V; rows behind the tokenizer's are never allowed
        eos_ids : at least one; stand for the end of a grammar
        raises UnsupportedError without llguidance or for a tokenizer whose tokens are not bytes of text
        """
        llg = _llguidance()
        self.eos_ids = frozenset(eos_ids)
        try:
            # A tokenizer may hold more tokens than the model has rows for; those are cut from the masks.
            self._tokenizer = llg.LLTokenizer(
                tokenizer.to_json(), n_vocab=max(vocab_size, tokenizer.vocab_size), eos_token=list(eos_ids)
            )
        except ValueError as error:
            raise UnsupportedError(f"the tokenizer cannot be used for structured output: {error}") from error
        self.num_words = (self._tokenizer.vocab_size + 31) // 32  # of llguidance's masks
        self.num_mask_words = (vocab_size + 31) // 32  # of the core's
        self._lock = threading.Lock()
        self._compiled: collections.OrderedDict[str, Any] = collections.OrderedDict()

    def matcher(self, params: GuidedParams) -> Any:
        """Return a new llguidance.LLMatcher at the grammar's beginning.

        raises InvalidArgumentError with llguidance's text for a grammar that cannot be compiled within the limits
        """
        source = grammar_source(params)
        with self._lock:
            found = self._compiled.get(source)
            if found is not None:
                self._compiled.move_to_end(source)
                return found.deep_copy()
        made = _within_time(lambda: self._compile(source))
        with self._lock:
            self._compiled[source] = made
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return made.deep_copy()

    def _compile(self, source: str) -> Any:
        llg = _llguidance()
        limits = llg.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        matcher = llg.LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # shows what only fails in use, and makes what copies share
        error = error_of(matcher)
        if error.startswith("NoExtension"):
            raise InvalidArgumentError(
                "guided allows no text at all; change the grammar so that something fits"
            )
        if error:
            raise InvalidArgumentError(f"guided cannot be compiled: {error}")
        return matcher


def error_of(matcher: Any) -> str:
    """Return llguidance's message of a matcher that has failed, else ""."""
    return str(matcher.get_error()).replace("<non-verbose/>", "").strip() if matcher.is_error() else ""


def _within_time(make: Callable[[], Any]) -> Any:
    """Return make(), or raise when it takes longer than COMPILE_TIMEOUT_S; it then goes on alone."""
    result: list[Any] = []
    error: list[BaseException] = []

    def run() -> None:
        try:
            result.append(make())
        except BaseException as raised:
            error.append(raised)
        finally:
            _compiling.release()

    if not _compiling.acquire(timeout=COMPILE_TIMEOUT_S):
        raise InvalidArgumentError("guided: other grammars have been compiled for too long; try again later")
    thread = threading.Thread(target=run, name="plansmith-grammar", daemon=True)
    thread.start()
    thread.join(COMPILE_TIMEOUT_S)
    if thread.is_alive():
        raise InvalidArgumentError(
            f"guided was not compiled within {COMPILE_TIMEOUT_S:g} s; make the grammar simpler: fewer alternatives, "
            "shorter repetitions"
        )
    if error:
        raise error[0]
    return result[0]


_compiling = threading.BoundedSemaphore(_MAX_ABANDONED)


_compilers: weakref.WeakKeyDictionary[Tokenizer, dict[Any, GuideCompiler]] = weakref.WeakKeyDictionary()
_compilers_lock = threading.Lock()


def compiler_of(tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> GuideCompiler:
    """Return the one compiler of a tokenizer with these sizes and ids. Raises like GuideCompiler."""
    with _compilers_lock:
        of_tokenizer = _compilers.setdefault(tokenizer, {})
        key = (vocab_size, eos_ids)
        if key not in of_tokenizer:
            of_tokenizer[key] = GuideCompiler(tokenizer, vocab_size, eos_ids)
        return of_tokenizer[key]


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UnsupportedError(
            f"guided needs llguidance, which cannot be imported ({error}); pip install 'plansmith[guided]'"
        ) from error
    return llguidance
