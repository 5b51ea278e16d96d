"""What goes between the core and an executor: its description, a step's arrays, how its rows are drawn, copies of
blocks, parts of adapters.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._native import native

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
WordArray = NDArray[np.uint32]
RecordArray = NDArray[np.void]  # of one of the types below
MAX_TOP_LOGPROBS = 20  # PSM_MAX_TOP_LOGPROBS
ROW_BAD_LOGITS, ROW_FORBIDDEN, ROW_OVERFLOW = (
    -1,
    -2,
    -3,
)  # PSM_ROW_...: ROW_SAMPLE's token where there is none
# psm_sampling_row, psm_logit_edit and psm_row_sample, field by field: 32-bit words without padding.
SAMPLING_ROW = np.dtype(
    [
        ("seed", np.uint64),
        ("output_idx", np.int32),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),
        ("num_logprobs", np.int32),
        ("edit_begin", np.int32),
        ("edit_end", np.int32),
        ("mask_idx", np.int32),
        ("reserved", np.int32),
    ]
)
LOGIT_EDIT = np.dtype([("id", np.int32), ("factor", np.float32), ("minus", np.float32), ("plus", np.float32)])
ROW_SAMPLE = np.dtype(
    [
        ("token", np.int32),
        ("logprob", np.float32),
        ("num_top", np.int32),
        ("reserved", np.int32),
        ("top_ids", np.int32, MAX_TOP_LOGPROBS),
        ("top_logprobs", np.float32, MAX_TOP_LOGPROBS),
    ]
)
CANDIDATE = np.dtype([("logit", np.float32), ("token_id", np.int32)])  # psm_candidate
COPY_KINDS = ("device", "to_host", "from_host")  # in the order of psm_block_copy.kind


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """What an executor is and can take; all limits inclusive.

    max_logits_rows : most rows of logits in a step; 0 = max_batch_size
    max_adapters, max_adapter_rank : LoRA adapters it holds at a time, 0 = it takes none, and the most of each
    samples_rows : 1 = its collect draws tokens itself; 2 = its step also finds the largest logits of each row
    """

    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_batch_size: int
    max_num_tokens: int
    max_input_len: int
    max_seq_len: int
    tokens_per_block: int
    kv_bytes_per_block: int
    max_logits_rows: int = 0
    max_adapters: int = 0
    max_adapter_rank: int = 0
    samples_rows: int = 0

    @classmethod
    def from_struct(cls, struct: Any) -> ModelInfo:
        """Return the fields of a psm_model_info."""
        return cls(**{field.name: int(getattr(struct, field.name)) for field in dataclasses.fields(cls)})


@dataclasses.dataclass(frozen=True)
class Batch:
    """One mixed step as views of the core's arrays, valid during the call only; copy what you keep.

    Those that launch is given stay valid until collect has returned.

    input_ids, position_ids : (T,) int32
    query_lens, kv_lens : (B,) int32; cu_query_lens : (B + 1,)
    block_table : (B, stride) int32, -1 where unused
    logits_rows : (R,) int32, ascending
    native : the psm_batch pointer itself, for executors that pass it on
    adapter_slots : (B,) int32, the slot of a sequence's adapter, -1 = none; None = no adapters in this step
    candidates : (R, K) CANDIDATE, which step writes where describe says samples_rows = 2: the largest logits of each
        row, best first, the lower id of equal ones. A list that ends early ends with token_id -1, which each list
        begins with: a row that is left alone is drawn from its logits. None = none are wanted
    """

    input_ids: Int32Array
    position_ids: Int32Array
    query_lens: Int32Array
    kv_lens: Int32Array
    cu_query_lens: Int32Array
    block_table: Int32Array
    logits_rows: Int32Array
    native: Any = dataclasses.field(repr=False)
    adapter_slots: Int32Array | None = None
    candidates: RecordArray | None = None

    @classmethod
    def from_pointer(cls, batch: Any) -> Batch:
        """Return views over a psm_batch."""
        num_tokens, num_seqs = batch.num_tokens, batch.num_seqs
        table = _int32_view(batch.block_table, num_seqs * batch.block_table_stride)
        return cls(
            input_ids=_int32_view(batch.input_ids, num_tokens),
            position_ids=_int32_view(batch.position_ids, num_tokens),
            query_lens=_int32_view(batch.query_lens, num_seqs),
            kv_lens=_int32_view(batch.kv_lens, num_seqs),
            cu_query_lens=_int32_view(batch.cu_query_lens, num_seqs + 1),
            block_table=table.reshape(num_seqs, batch.block_table_stride),
            logits_rows=_int32_view(batch.logits_rows, batch.num_logits_rows),
            adapter_slots=_int32_view(batch.adapter_slots, num_seqs) if batch.adapter_slots else None,
            candidates=_candidates(batch) if batch.num_candidates > 0 else None,
            native=batch,
        )


@dataclasses.dataclass(frozen=True)
class StepSampling:
    """How each row of a step is to be drawn, as views of the core's arrays, valid until collect returns.

    rows : (R,) SAMPLING_ROW, in the order of the batch's logits_rows
    edits : (N,) LOGIT_EDIT; a row's are edits[edit_begin:edit_end]
    masks : (M, (V + 31) // 32) uint32, bit id % 32 of word id // 32: the token may be drawn
    native : the psm_step_sampling pointer itself, for executors that pass it on
    """

    rows: RecordArray
    edits: RecordArray
    masks: WordArray
    native: Any = dataclasses.field(repr=False)

    @classmethod
    def from_pointer(cls, sampling: Any) -> StepSampling:
        """Return views over a psm_step_sampling."""
        num_masks, mask_words = sampling.num_masks, sampling.mask_words
        masks = _view(sampling.masks, num_masks * mask_words, np.dtype(np.uint32))
        return cls(
            rows=_view(sampling.rows, sampling.num_rows, SAMPLING_ROW),
            edits=_view(sampling.edits, sampling.num_edits, LOGIT_EDIT),
            masks=masks.reshape(num_masks, mask_words),
            native=sampling,
        )


class BlockCopy(NamedTuple):
    """Copy the first num_tokens positions of block src to block dst, K and V of all layers.

    kind : "device", "to_host" or "from_host": which of the two is a host block
    """

    kind: str
    src: int
    dst: int
    num_tokens: int

    @classmethod
    def from_struct(cls, copy: Any) -> BlockCopy:
        """Return the fields of a psm_block_copy."""
        return cls(COPY_KINDS[copy.kind], copy.src, copy.dst, copy.num_tokens)

    def to_tuple(self) -> tuple[int, int, int, int]:
        """Return the fields as a psm_block_copy takes them."""
        return (COPY_KINDS.index(self.kind), self.src, self.dst, self.num_tokens)


class AdapterModule(NamedTuple):
    """One matrix's part of a LoRA adapter, y += scale * b (a x), valid during the call only.

    module : the matrix, PSM_LORA_... of plansmith.h
    a, b : (rank, in_features) and (out_features, rank) float32
    """

    layer_idx: int
    module: int
    scale: float
    a: Float32Array
    b: Float32Array

    @classmethod
    def from_struct(cls, module: Any) -> AdapterModule:
        """Return a psm_lora_module with views of its matrices."""
        a = _float_view(module.a, module.rank * module.in_features).reshape(module.rank, module.in_features)
        b = _float_view(module.b, module.out_features * module.rank).reshape(module.out_features, module.rank)
        return cls(module.layer_idx, module.module, module.scale, a, b)


def _candidates(batch: Any) -> RecordArray:
    rows, each = batch.num_logits_rows, batch.num_candidates
    return _view(batch.candidates, rows * each, CANDIDATE).reshape(rows, each)


def _view(pointer: Any, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    if count == 0:
        return np.empty(0, dtype)
    return np.frombuffer(native().ffi.buffer(pointer, count * dtype.itemsize), dtype)


def _float_view(pointer: Any, count: int) -> Float32Array:
    return np.frombuffer(native().ffi.buffer(pointer, count * 4), np.float32)


def _int32_view(pointer: Any, count: int) -> Int32Array:
    if count == 0:
        return np.empty(0, np.int32)
    return np.frombuffer(native().ffi.buffer(pointer, count * 4), np.int32)
