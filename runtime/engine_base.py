"""What the two engines share: opening, turning prompts into requests, routing events to them."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from numpy.typing import NDArray

from .adapters import AdapterTable
from .chat import Message
from .detokenizer import Detokenizer
from .errors import Error, InternalError, InvalidArgumentError, NotFoundError, ShutdownError, UnsupportedError
from .events import EndEvent, Event, TokenEvent
from .executor import Executor, Int32Array, ModelInfo
from .executors.options import GpuOptions
from .guided import GuideHandle, guide_of
from .kv_events import KvEvent
from .manifest import Manifest
from .native_engine import EngineOptions, NativeEngine, Submission
from .opening import CpuOptions, plan_opening
from .profile import OpProfile
from .prompts import Prompt, bad_words_ids, check_lengths, check_token_ids, encode_prompt
from .request import RequestState, Sink
from .sampling import SamplingParams
from .stats import EngineStats, IterationStats
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .executors.executor import DeviceUse, TensorRtExecutor

_EngineT = TypeVar("_EngineT", bound="EngineBase")
# So many of the prompt's last tokens tell the detokenizer how the text goes on; a character has at most 4 bytes.
_PRIMING_TOKENS = 8


class EngineBase:
    """An engine with its tokenizer. Made by `open` or `from_executor`.

    tokenizer : None for an engine without one, which takes and gives ids only
    target : what is open of the engine directory, never "auto"; None over an executor of the caller's
    """

    target: str | None = None

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
        self._adapters = AdapterTable(
            self._core, self._model_info, None if manifest is None else manifest.model
        )
        self._gpu: TensorRtExecutor | None = None
        self._client_ids = itertools.count(1)
        self._states: dict[int, RequestState] = {}

    @classmethod
    def open(
        cls: type[_EngineT],
        engine_dir: Path | str,
        target: str = "cpu",
        *,
        draft: Path | str | None = None,
        speculation: str = "auto",
        num_threads: int = 0,
        pin_threads: bool = False,
        isa: str | None = None,
        max_adapters: int | None = None,
        max_adapter_rank: int | None = None,
        weights: str = "auto",
        profile: bool = False,
        device: int | str | None = None,
        cuda_graphs: str = "auto",
        cuda_graph_cache_size: int = 0,
        gpu_weights_percent: float | None = None,
        verify_hashes: bool = False,
        **options: Any,
    ) -> _EngineT:
        """Open one target of an engine directory.

        target : one of the directory's; "auto" = the first that a GPU here runs, else cpu. The default is cpu, so that
            what an engine does is not a matter of the machine
        draft : another engine directory, of a smaller model with the same vocabulary, that proposes tokens
        speculation : "auto": by `draft`, or the draft the engine was built with (plansmith build --draft), where there
            is one; "model": the same, or an error; "ngram": by lookup in prompt and output; "off"
        num_threads : of the cpu target; 0 = one a core
        pin_threads, isa, max_adapters, max_adapter_rank, weights : see cpu_executor
        profile : note the time of each op of the cpu target for `profile()`; costs less than 1 % of a step
        device, cuda_graphs : of a GPU target: which GPU, by its index or UUID (None = the first that runs the plan),
            and who captures decode steps ("auto", "own", "off"); see GpuOptions
        cuda_graph_cache_size : graphs kept at a time of those that this program captures; 0 = 64
        gpu_weights_percent : share of the weights that stay on the GPU, of a plan built with weight streaming; None =
            as many as fit
        verify_hashes : read every file of the target and compare its sha256; sizes are always compared
        options : fields of EngineOptions, but draft_mode and draft_executor. max_num_tokens 0 = 512 on the cpu target,
            or the engine's limit where that is less or prompts are not cut. kv_cache_bytes 0 = on a GPU target,
            kv_cache_free_gpu_mem_fraction (0.9) of the memory that is free beside the plan
        raises EngineFileError for a damaged directory or a target that is not in it, UnsupportedError for a target
            that this installation cannot run, InvalidArgumentError for a draft that does not fit, with the command
            that builds one that does
        """
        opening = plan_opening(engine_dir, target, draft, speculation, options, device)
        manifest = opening.manifest
        cpu = CpuOptions(num_threads, pin_threads, isa, max_adapters, max_adapter_rank, weights, profile)
        opening.check_files(hashes=verify_hashes)
        gpu = GpuOptions(device, cuda_graphs, cuda_graph_cache_size, gpu_weights_percent)
        gpu.check()
        # Weights and vocabulary are read side by side: each takes about as long.
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(_tokenizer, manifest.root / "tokenizer")
            executor, made, gpu_executor = opening.executors(cpu, gpu)
        try:
            tokenizer = reading.result()
        except BaseException:
            for one in (executor, made.draft_executor):
                if one is not None:
                    one.close()
            raise
        engine = cls(executor, made, tokenizer, manifest.model.eos_token_ids, manifest)
        engine._gpu, engine.target = gpu_executor, opening.target
        return engine

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

    def device_use(self) -> DeviceUse | None:
        """Return the memory of the GPU that the engine runs on, and the page-locked memory it holds; None on cpu."""
        return None if self._gpu is None else self._gpu.device_use()

    def device_failure(self) -> str | None:
        """Return why the engine's GPU does nothing any more, so that only a new process helps; None while it works."""
        return None if self._gpu is None else self._gpu.failure

    @property
    def model_info(self) -> ModelInfo:
        """The model's sizes and the engine's limits."""
        return self._model_info

    @property
    def options(self) -> EngineOptions:
        """What the engine was opened with, 0 where that is the default."""
        return self._options

    def stats(self) -> EngineStats:
        """Return totals since the start and the state now."""
        return self._core.stats()

    def iteration_stats(self) -> list[IterationStats]:
        """Take the records of past steps, oldest first; each is given once."""
        return self._core.iteration_stats(max(1, self._options.iter_stats_max_iterations))

    def profile(self) -> list[OpProfile]:
        """Return what each op of the target took so far, a draft's left out. Any thread, also while the engine runs.

        raises UnsupportedError unless the engine was opened with profile=True
        """
        return self._core.profile()

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
        self._adapters.id_of(params.adapter)

    def load_adapter(self, name: str, path: Path | str) -> int:
        """Load a LoRA adapter for requests to name in SamplingParams.adapter, and return its id.

        path : a directory that PEFT wrote, or with the pair of arrays of TensorRT-LLM
        Waits for the step in progress, so an asyncio program calls it with asyncio.to_thread.
        raises CheckpointError for a damaged directory, ShapeError for one of another model, InvalidArgumentError for a
            name that is taken, OutOfMemoryError when no more fit, UnsupportedError for an executor without adapters
        """
        return self._adapters.load(name, path)

    def load_adapter_arrays(self, name: str, config: NDArray[Any], weights: NDArray[Any]) -> int:
        """Load a LoRA adapter given as the pair of arrays of TensorRT-LLM, and return its id.

        config : (n, 3) integers: module id, layer, rank
        weights : (n, row length) float16 or float32; a row is A (rank, in), then B (out, rank), then zeros
        Both may have a leading dimension of 1. Waits and raises like load_adapter: CheckpointError for what these
        arrays never are, or an engine without a manifest, which alone tells the sizes they are cut by.
        """
        return self._adapters.load_arrays(name, config, weights)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter and what is cached with it; waits like load_adapter.

        raises NotFoundError, or InvalidArgumentError while requests use it
        """
        self._adapters.unload(name)

    @property
    def adapters(self) -> dict[str, int]:
        """The loaded adapters: name -> id."""
        return dict(self._adapters.ids)

    def kv_events(self) -> list[KvEvent]:
        """Take the changes of the prefix cache since the last call, oldest first; needs EngineOptions.max_kv_events."""
        return self._core.kv_events()

    @property
    def num_open_requests(self) -> int:
        """How many requests have not been given their last delta yet; any thread, and it costs nothing."""
        return len(self._states)

    def cancel(self, request_id: int) -> None:
        """Ask for a request's end by its id; a final delta "cancelled" follows. Nothing if it has already ended."""
        with contextlib.suppress(NotFoundError, ShutdownError):
            self._core.cancel(request_id)

    def cancel_all(self) -> None:
        """Ask for the end of every request whose submission has returned; each gets its final delta."""
        for state in list(self._states.values()):
            self._cancel(state.request_id)

    def _guide(self, params: SamplingParams | None) -> GuideHandle | None:
        """Return the guide of a request, which `_start` or `close` of it consumes. May take seconds. Any thread."""
        if params is None or params.guided is None:
            return None
        if self.tokenizer is None:
            raise InvalidArgumentError(
                "the engine has no tokenizer, which guided needs to read a grammar's text; leave guided out"
            )
        return guide_of(params.guided, self.tokenizer, self._model_info.vocab_size, self._end_ids(params))

    def _end_ids(self, params: SamplingParams) -> tuple[int, ...]:
        return tuple(params.stop_token_ids) + (() if params.ignore_eos else self.eos_token_ids)

    def _start(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        sink: Sink,
        *,
        new_text: bool = False,
        guide: GuideHandle | None = None,
    ) -> RequestState:
        """Submit a request whose deltas go to `sink`, on the thread that routes events.

        guide : of `_guide(params)`; the caller closes it when this fails
        """
        params = params or SamplingParams()
        prompt_ids = encode_prompt(prompt, self.tokenizer, self._model_info.vocab_size)
        end_ids = self._end_ids(params)
        state = RequestState(
            prompt_ids.tolist(), params, end_ids, self._detokenizers(params, prompt_ids, new_text), sink
        )
        client_id = next(self._client_ids)
        submission = Submission(
            prompt_ids,
            params,
            max_tokens=self._max_tokens(params, len(prompt_ids)),
            end_ids=end_ids,
            bad_words=bad_words_ids(params, self.tokenizer),
            client_id=client_id,
            adapter_id=self._adapters.id_of(params.adapter),
            guide=None if guide is None else guide.struct,
        )
        self._states[client_id] = state  # before the submission: events may come before it returns
        try:
            state.request_id = self._core.submit(submission)
        except BaseException:
            self._states.pop(client_id, None)  # a close beside it may have failed it already
            raise
        return state

    def _max_tokens(self, params: SamplingParams, prompt_len: int) -> int:
        if params.max_tokens is not None:
            return params.max_tokens
        # A prompt that leaves no room gets 1, and the core's message about its length.
        return max(1, params.min_tokens, self._model_info.max_seq_len - prompt_len)

    def _detokenizers(
        self, params: SamplingParams, prompt_ids: Int32Array, new_text: bool
    ) -> Callable[[], Detokenizer] | None:
        """Return what makes the detokenizer of each output; None = no text."""
        if self.tokenizer is None or not params.detokenize:
            if params.stop_strings:
                why = "detokenize=False" if self.tokenizer is not None else "an engine without a tokenizer"
                raise InvalidArgumentError(f"stop strings are matched on text, which {why} does not make")
            return None
        tokenizer = self.tokenizer

        def make() -> Detokenizer:
            detokenizer = tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
            if not new_text:
                detokenizer.prime(prompt_ids[-_PRIMING_TOKENS:].tolist())
            return detokenizer

        return make

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
            if isinstance(event, EndEvent) and event.is_final:
                del self._states[event.client_id]
            try:
                if _give(event, state):
                    self._cancel(event.request_id)
            except (Exception, SystemExit) as error:  # one request's text or sink must not stop the others
                self._cancel(event.request_id)
                with contextlib.suppress(
                    Exception, SystemExit
                ):  # the sink may be what fails; the state has the error
                    state.fail(InternalError(f"handling a token failed: {type(error).__name__}: {error}"))

    def _cancel(self, request_id: int | None) -> None:
        """Cancel a request that has got an id."""
        if request_id is not None:
            self.cancel(request_id)

    def _fail_all(self, error: Error) -> None:
        for client_id in list(self._states):
            state = self._states.pop(client_id, None)
            if state is not None:
                with contextlib.suppress(Exception, SystemExit):  # one sink must not leave the others waiting
                    state.fail(error)


def _give(event: Event, state: RequestState) -> bool:
    """Give an event to its request; returns whether to cancel the request."""
    if isinstance(event, TokenEvent):
        return state.on_token(event)
    if isinstance(event, EndEvent):
        return state.on_end(event)
    state.on_context(event)
    return False


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


def check_streaming(params: SamplingParams | None) -> None:
    """Refuse to stream outputs that are chosen at the end; beams merely come late."""
    if params is not None and params.num_sequences > params.n:
        raise InvalidArgumentError(
            f"best_of {params.best_of} with n {params.n} cannot be streamed: which outputs are the best is known only "
            "at the end; use generate, or leave best_of out"
        )


def _tokenizer(directory: Path) -> Tokenizer | None:
    return Tokenizer.from_directory(directory) if (directory / "tokenizer.json").is_file() else None
