"""What the two engines share: opening, turning prompts into requests, routing events to them."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .chat import Message
from .errors import (
    EngineFileError,
    Error,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ShutdownError,
    UnsupportedError,
)
from .events import Event, TokenEvent
from .executor import Executor, Int32Array, ModelInfo, cpu_executor
from .manifest import Manifest, load_manifest
from .native_engine import EngineOptions, NativeEngine
from .prompts import Prompt, bad_words_ids, check_lengths, check_token_ids, encode_prompt
from .request import RequestState, Sink
from .sampling import SamplingParams
from .stats import EngineStats, IterationStats
from .tokenizer import Tokenizer

_EngineT = TypeVar("_EngineT", bound="EngineBase")
# So many of the prompt's last tokens tell the detokenizer how the text goes on; a character has at most 4 bytes.
_PRIMING_TOKENS = 8
# A step of so many tokens keeps a CPU's matrix products at their peak already; longer ones only delay first tokens.
_CPU_TOKEN_BUDGET = 512


class EngineBase:
    """An engine with its tokenizer. Made by `open` or `from_executor`.

    tokenizer : None for an engine without one, which takes and gives ids only
    """

    def __init__(
        self,
        executor: Executor,
        options: EngineOptions | None = None,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        manifest: Manifest | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.manifest = manifest
        own = tokenizer.eos_token_ids if tokenizer is not None else ()
        self.eos_token_ids = tuple(dict.fromkeys([*own, *eos_token_ids]))
        self._options = options or EngineOptions()
        self._core = NativeEngine(executor, self._options)
        weakref.finalize(self, self._core.close)  # also at the interpreter's exit
        self._model_info = self._core.model_info()
        self._client_ids = itertools.count(1)
        self._states: dict[int, RequestState] = {}

    @classmethod
    def open(
        cls: type[_EngineT],
        engine_dir: Path | str,
        target: str = "cpu",
        *,
        num_threads: int = 0,
        pin_threads: bool = False,
        isa: str | None = None,
        max_batch_size: int = 0,
        max_num_tokens: int = 0,
        scheduler_policy: str = "guaranteed_no_evict",
        enable_chunked_context: bool = True,
        max_queue_size: int = 0,
        kv_cache_bytes: int = 0,
        iter_stats_max_iterations: int = 1000,
        manual_step: bool = False,
        verify_hashes: bool = False,
    ) -> _EngineT:
        """Open one target of an engine directory.

        num_threads : of the cpu target; 0 = one a core
        max_num_tokens : token budget of a step; 0 = 512 on the cpu target, or the engine's limit where that is less or
            prompts are not cut
        pin_threads, isa : see cpu_executor
        verify_hashes : read every file of the target and compare its sha256; sizes are always compared
        the others : see EngineOptions
        raises EngineFileError for a damaged directory or a target that is not in it, UnsupportedError for a target
            that this installation cannot run
        """
        manifest = load_manifest(engine_dir)
        if max_num_tokens == 0 and enable_chunked_context:
            max_num_tokens = min(max(_CPU_TOKEN_BUDGET, max_batch_size), manifest.limits.max_num_tokens)
        options = EngineOptions(
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            scheduler_policy=scheduler_policy,
            enable_chunked_context=enable_chunked_context,
            max_queue_size=max_queue_size,
            kv_cache_bytes=kv_cache_bytes,
            iter_stats_max_iterations=iter_stats_max_iterations,
            manual_step=manual_step,
        )
        plan = manifest.plan_path(target)
        if target != "cpu":
            raise UnsupportedError(
                f"target {target!r} is a TensorRT plan, and this version of the runtime runs cpu plans only; open "
                "the cpu target, or run the plan on its GPU with TensorRT"
            )
        manifest.check_files([target], hashes=verify_hashes)
        tokenizer_dir = manifest.root / "tokenizer"
        has_tokenizer = (tokenizer_dir / "tokenizer.json").is_file()
        tokenizer = Tokenizer.from_directory(tokenizer_dir) if has_tokenizer else None
        executor = cpu_executor(plan, num_threads=num_threads, pin_threads=pin_threads, isa=isa)
        try:
            _compare_limits(executor.describe(), manifest)
        except Error:
            executor.close()
            raise
        return cls(executor, options, tokenizer, manifest.model.eos_token_ids, manifest)

    @classmethod
    def from_executor(
        cls: type[_EngineT],
        executor: Executor,
        options: EngineOptions | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> _EngineT:
        """Start an engine on any executor, which it owns from here on."""
        return cls(executor, options, tokenizer, eos_token_ids)

    @property
    def model_info(self) -> ModelInfo:
        """The model's sizes and the engine's limits."""
        return self._model_info

    def stats(self) -> EngineStats:
        """Return totals since the start and the state now."""
        return self._core.stats()

    def iteration_stats(self) -> list[IterationStats]:
        """Take the records of past steps, oldest first; each is given once."""
        return self._core.iteration_stats(max(1, self._options.iter_stats_max_iterations))

    def chat_ids(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Return the prompt ids of a conversation by the model's chat template.

        variables : as ChatTemplate.render takes them
        raises UnsupportedError when the model has no template, InvalidArgumentError when it refuses the messages
        """
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise UnsupportedError(
                "the engine has no chat template; give the whole prompt as text, or build the engine from an "
                "instruct checkpoint"
            )
        text = self.tokenizer.chat_template.render(messages, **variables)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def check_prompt(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raise the InvalidArgumentError or ShapeError that a submission would for its ids and lengths."""
        vocab_size = self._model_info.vocab_size
        prompt_ids = encode_prompt(prompt, self.tokenizer, vocab_size)
        check_lengths(len(prompt_ids), params, self._model_info)
        check_token_ids(params, self.tokenizer, vocab_size)

    def _start(
        self, prompt: Prompt, params: SamplingParams | None, sink: Sink, *, new_text: bool = False
    ) -> RequestState:
        """Submit a request whose deltas go to `sink`, on the thread that routes events."""
        params = params or SamplingParams()
        prompt_ids = encode_prompt(prompt, self.tokenizer, self._model_info.vocab_size)
        end_ids = tuple(params.stop_token_ids) + (() if params.ignore_eos else self.eos_token_ids)
        state = RequestState(
            prompt_ids.tolist(), params, end_ids, self._detokenizer(params, prompt_ids, new_text), sink
        )
        client_id = next(self._client_ids)
        self._states[client_id] = state  # before the submission: events may come before it returns
        try:
            state.request_id = self._core.submit(
                prompt_ids,
                params,
                max_tokens=self._max_tokens(params, len(prompt_ids)),
                end_ids=end_ids,
                bad_words=bad_words_ids(params, self.tokenizer),
                client_id=client_id,
            )
        except BaseException:
            self._states.pop(client_id, None)  # a close beside it may have failed it already
            raise
        return state

    def _max_tokens(self, params: SamplingParams, prompt_len: int) -> int:
        if params.max_tokens is not None:
            return params.max_tokens
        # A prompt that leaves no room gets 1, and the core's message about its length.
        return max(1, params.min_tokens, self._model_info.max_seq_len - prompt_len)

    def _detokenizer(self, params: SamplingParams, prompt_ids: Int32Array, new_text: bool) -> Any:
        if self.tokenizer is None or not params.detokenize:
            if params.stop_strings:
                why = "detokenize=False" if self.tokenizer is not None else "an engine without a tokenizer"
                raise InvalidArgumentError(f"stop strings are matched on text, which {why} does not make")
            return None
        detokenizer = self.tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
        if not new_text:
            detokenizer.prime(prompt_ids[-_PRIMING_TOKENS:].tolist())
        return detokenizer

    def _pump(self, timeout_ms: int) -> int:
        """Poll once and give each event to its request; returns the number of events."""
        events = self._core.poll(timeout_ms)
        self._route(events)
        return len(events)

    def _route(self, events: Sequence[Event]) -> None:
        for event in events:
            state = self._states.get(event.client_id)
            if state is None:
                continue
            try:
                if not isinstance(event, TokenEvent):
                    del self._states[event.client_id]
                    state.on_end(event)
                elif state.on_token(event):
                    self._cancel(event.request_id)
            except (Exception, SystemExit) as error:  # one request's text or sink must not stop the others
                self._cancel(event.request_id)
                with contextlib.suppress(
                    Exception, SystemExit
                ):  # the sink may be what fails; the state has the error
                    state.fail(InternalError(f"handling a token failed: {type(error).__name__}: {error}"))

    def _cancel(self, request_id: int | None) -> None:
        """Cancel unless the request has ended or the engine is closed."""
        if request_id is None:
            return
        with contextlib.suppress(NotFoundError, ShutdownError):
            self._core.cancel(request_id)

    def _fail_all(self, error: Error) -> None:
        for client_id in list(self._states):
            state = self._states.pop(client_id, None)
            if state is not None:
                with contextlib.suppress(Exception, SystemExit):  # one sink must not leave the others waiting
                    state.fail(error)


def per_prompt(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams | None]:
    """Return one SamplingParams a prompt, whether one was given for all or one for each."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if len(params) != len(prompts):
        raise InvalidArgumentError(
            f"there are {len(prompts)} prompts and {len(params)} SamplingParams; give one for each, or one for all"
        )
    return list(params)


def _compare_limits(info: ModelInfo, manifest: Manifest) -> None:
    """Refuse a plan that is not the one the manifest describes."""
    wanted: Mapping[str, int] = {
        "vocab_size": manifest.model.vocab_size,
        "num_layers": manifest.model.num_layers,
        "max_seq_len": manifest.limits.max_seq_len,
        "tokens_per_block": manifest.limits.tokens_per_block,
    }
    for name, value in wanted.items():
        if getattr(info, name) != value:
            raise EngineFileError(
                f"the plan in {manifest.root} has {name} {getattr(info, name)}, manifest.json says {value}; "
                "build the engine again"
            )
