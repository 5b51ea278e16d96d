"""One row of a request's batch: what the engine is asked for, and what the client wants to see of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ...runtime.engine_base import EngineBase
    from .settings import Settings


@dataclasses.dataclass(frozen=True)
class LoraRequest:
    """An adapter named by a request, with its arrays where the request brings them.

    weights : (n, row length) float16 or float32; None = it is in the cache
    config : (n, 3) int32: module id, layer, rank
    """

    task_id: int
    weights: NDArray[Any] | None = None
    config: NDArray[np.int32] | None = None


@dataclasses.dataclass(frozen=True)
class RowDefaults:
    """What the model's parameters say where a request is silent.

    vocab_size : V of the model
    max_beam_width : of the parameters; a wider beam is refused
    exclude_input : leave the prompt out of output_ids
    logits_dtype : of draft_logits and of the logits in answers: float32 or float16
    max_seq_len : a longer request_output_len is lowered to what the prompt leaves of it; None = not here
    own_end_ids : the engine's end tokens, its tokenizer's and its manifest's; a request that names one of them has them
        all
    """

    vocab_size: int
    max_beam_width: int = 1
    exclude_input: bool = False
    logits_dtype: type[np.floating[Any]] = np.float32
    max_seq_len: int | None = None
    own_end_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, settings: Settings, engine: EngineBase) -> RowDefaults:
        """Return those of a model with these settings and this engine."""
        return cls(
            vocab_size=engine.model_info.vocab_size,
            max_beam_width=settings.max_beam_width,
            exclude_input=settings.exclude_input,
            logits_dtype=np.float16 if settings.logits_dtype == "float16" else np.float32,
            max_seq_len=engine.model_info.max_seq_len,
            own_end_ids=frozenset(engine.eos_token_ids),
        )


@dataclasses.dataclass(frozen=True)
class Row:
    """One row, checked as far as that needs no engine.

    prompt_ids : (n,) int32, trimmed to input_lengths
    params : fields of SamplingParams by name; the host makes SamplingParams of them, whose errors name the field.
        What end_id and wants mean for the engine is in them (stop_token_ids, ignore_eos, logprobs, ...); the adapter
        alone is not: the host asks LoraCache for its name
    streaming : answers as tokens come
    exclude_input : leave the prompt out of output_ids
    end_id : as it was sent: ends generation besides the words; None = the engine's own end ids, -1 = none at all
    pad_id : as it was sent; -1 fills output_ids behind a sequence's end whatever it is, as it did before
    wants : which of "log_probs", "context_logits", "generation_logits", "perf_metrics", "num_input_tokens",
        "num_output_tokens" the answers have
    lora : None = the model alone
    row_idx : its place in the batch
    is_batch : the batch has more rows, so that answers carry batch_index
    num_beams : of the beams, so many are answered, the best first; None = all
    notes : what the request had that has no effect, for a log; what is of all rows is in the first one's
    """

    prompt_ids: NDArray[np.int32]
    params: Mapping[str, Any]
    streaming: bool = False
    exclude_input: bool = False
    end_id: int | None = None
    pad_id: int = -1
    wants: frozenset[str] = frozenset()
    lora: LoraRequest | None = None
    row_idx: int = 0
    is_batch: bool = False
    num_beams: int | None = None
    notes: tuple[str, ...] = ()
