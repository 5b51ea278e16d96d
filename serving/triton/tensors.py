"""The inputs of tensorrt_llm: what each is, and a request's tensors checked and taken apart row by row.

On the wire a tensor has the batch dimension in front: [B, ...]. A tensor of one value a row comes as [B, 1], or as [B]
where the model's configuration reshapes it to []. With max_batch_size 0 there is no batch dimension, and one value is
[1] or []. All of these are read; `input_ids` tells which it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.errors import InvalidArgumentError, ShapeError

__all__ = ["INPUTS", "Inputs", "TensorSpec", "triton_type"]

_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_FLOATS = ("FP32", "FP16")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One input.

    types : Triton's names of the types that are read, the declared one first
    dims : without the batch dimension; -1 = any
    is_scalar : the configuration reshapes [1] to []
    is_ragged : allow_ragged_batch
    is_required : not optional
    low, high : of a value, both inclusive; None = no limit. A float is finite besides
    """

    name: str
    types: tuple[str, ...]
    dims: tuple[int, ...] = (1,)
    is_scalar: bool = False
    is_ragged: bool = False
    is_required: bool = False
    low: float | None = None
    high: float | None = None

    @property
    def is_single(self) -> bool:
        """Whether a row has one value."""
        return self.dims == (1,)


def _scalar(name: str, *types: str, low: float | None = None, high: float | None = None) -> TensorSpec:
    return TensorSpec(name, types, is_scalar=True, low=low, high=high)


def _required(name: str, kind: str, low: float) -> TensorSpec:
    return TensorSpec(name, (kind,), is_scalar=True, is_required=True, low=low)


def _one(name: str, kind: str, low: float | None = None, high: float | None = None) -> TensorSpec:
    return TensorSpec(name, (kind,), is_ragged=True, low=low, high=high)


def _ragged(name: str, *types: str, dims: tuple[int, ...] = (-1,)) -> TensorSpec:
    return TensorSpec(name, types, dims, is_ragged=True)


_SPECS = (
    # The prompt and its end.
    _ragged("input_ids", "INT32"),
    _required("input_lengths", "INT32", low=1),
    _required("request_output_len", "INT32", low=1),
    _scalar("end_id", "INT32", low=-1),
    _scalar("pad_id", "INT32"),
    _ragged("stop_words_list", "INT32", dims=(2, -1)),
    _ragged("bad_words_list", "INT32", dims=(2, -1)),
    _scalar("min_tokens", "INT32", low=0),
    # Sampling. runtime_top_k_min is the name under which the older backend looked for runtime_top_p_min.
    _scalar("temperature", "FP32", low=0),
    _scalar("runtime_top_k", "INT32", low=0),
    _scalar("runtime_top_p", "FP32", high=1),
    _scalar("runtime_top_p_min", "FP32", low=0, high=1),
    _scalar("runtime_top_k_min", "FP32", low=0, high=1),
    _scalar("runtime_top_p_decay", "FP32", low=0, high=1),
    _scalar("runtime_top_p_reset_ids", "INT32", low=-1),
    _scalar("min_p", "FP32", low=0, high=1),
    _scalar("repetition_penalty", "FP32", low=0),
    _scalar("presence_penalty", "FP32"),
    _scalar("frequency_penalty", "FP32"),
    _scalar("no_repeat_ngram_size", "INT32", low=0),
    _scalar("seed", "UINT64"),
    _ragged("embedding_bias", *_FLOATS),
    _scalar("num_return_sequences", "INT32", low=1),
    # Beams. early_stopping was declared BOOL and read as INT32.
    _scalar("beam_width", "INT32", low=1),
    _scalar("len_penalty", "FP32"),
    _scalar("early_stopping", "BOOL", "INT32", low=0),
    _scalar("beam_search_diversity_rate", "FP32", low=0),
    # What the answers have.
    _scalar("streaming", "BOOL"),
    _scalar("stop", "BOOL"),
    _scalar("exclude_input_in_output", "BOOL"),
    _scalar("return_log_probs", "BOOL"),
    _scalar("return_context_logits", "BOOL"),
    _scalar("return_generation_logits", "BOOL"),
    _scalar("return_perf_metrics", "BOOL"),
    _scalar("return_kv_cache_reuse_stats", "BOOL"),
    _scalar("return_num_input_tokens", "BOOL"),
    _scalar("return_num_output_tokens", "BOOL"),
    # Drafts.
    _ragged("draft_input_ids", "INT32"),
    _ragged("draft_logits", *_FLOATS, dims=(-1, -1)),
    _scalar("draft_acceptance_threshold", "FP32", low=0, high=1),
    _one("lookahead_window_size", "INT32", low=1),
    _one("lookahead_ngram_size", "INT32", low=1),
    _one("lookahead_verification_set_size", "INT32", low=0),
    _scalar("max_draft_len", "INT32", low=0),
    # Structured output, adapters, the cache, the queue.
    _one("guided_decoding_guide_type", "STRING"),
    _one("guided_decoding_guide", "STRING"),
    _scalar("lora_task_id", "UINT64"),
    _ragged("lora_weights", "FP16", "FP32", dims=(-1, -1)),
    _ragged("lora_config", "INT32", dims=(-1, 3)),
    _ragged("retention_token_range_starts", "INT32"),
    _ragged("retention_token_range_ends", "INT32"),
    _ragged("retention_token_range_priorities", "INT32"),
    _ragged("retention_token_range_durations_ms", "INT32"),
    _one("retention_decode_priority", "INT32", low=0, high=100),
    _one("retention_decode_duration_ms", "INT32", low=-1),
    _scalar("cache_salt", "STRING"),
    _scalar("priority", "FP32", low=0, high=1),
    _scalar("timeout_ms", "INT32", low=0),
    # Of models that this engine does not run: unsupported.py.
    _ragged("encoder_input_features", *_FLOATS, dims=(-1, -1)),
    _scalar("encoder_output_lengths", "INT32"),
    _ragged("decoder_input_ids", "INT32"),
    _scalar("decoder_input_lengths", "INT32"),
    _ragged("prompt_embedding_table", "FP16", "FP32", dims=(-1, -1)),
    _ragged("prompt_table_extra_ids", "UINT64"),
    _scalar("prompt_vocab_size", "INT32"),
    _ragged("multimodal_embedding", *_FLOATS, dims=(-1, -1)),
    _ragged("cross_attention_mask", "BOOL", dims=(-1, -1)),
    TensorSpec("skip_cross_attn_blocks", ("BOOL",), is_ragged=True),
    TensorSpec("mrope_rotary_cos_sin", ("FP32",), (-1,)),
    TensorSpec("mrope_position_deltas", ("INT64",)),
    _ragged("context_phase_params", "UINT8"),
)

INPUTS: Mapping[str, TensorSpec] = {spec.name: spec for spec in _SPECS}


def triton_type(array: NDArray[Any]) -> str:
    """Return Triton's name of an array's type; numpy's where Triton has none."""
    if array.dtype.kind in "OSU":
        return "STRING"
    return _NAMES.get(array.dtype, str(array.dtype))


class Inputs:
    """A request's tensors, all of one form: [B, *dims]. The arrays are the caller's; nothing here writes to them.

    num_rows : B
    notes : what was found and has no effect, for a log
    """

    def __init__(self, tensors: Mapping[str, NDArray[Any]], parameters: Mapping[str, Any]) -> None:
        """Take a request apart.

        tensors : by name, see the module; BYTES are arrays of objects
        parameters : the request's parameters; one that has the name of an input of one value stands for that input
            where the tensor is not there
        raises : InvalidArgumentError for an unknown name or a wrong type, ShapeError for a wrong rank or batch size
        """
        self.num_rows = 1
        self.notes: list[str] = []
        self._arrays: dict[str, NDArray[Any]] = {}
        self._is_batched = True
        if "input_ids" in tensors:
            ids = tensors["input_ids"]
            self._is_batched = ids.ndim != 1
            self.num_rows = ids.shape[0] if ids.ndim == 2 else 1
        for name, array in tensors.items():
            spec = INPUTS.get(name)
            if spec is None:
                raise InvalidArgumentError(
                    f"{name} is no input of this model; leave it out, or send it as a request parameter"
                )
            self._arrays[name] = self._of_one_form(spec, array)
        if not self.num_rows:
            raise ShapeError("input_ids has shape [0, ...], wanted at least one row")
        for name, value in parameters.items():
            self._add_parameter(name, value)

    def __contains__(self, name: str) -> bool:
        """Tell whether the tensor is there and has elements."""
        return name in self._arrays and self._arrays[name].size > 0

    def has(self, names: Iterable[str]) -> list[str]:
        """Return those of the names that are there with elements."""
        return [name for name in names if name in self]

    def row(self, name: str, row_idx: int) -> NDArray[Any] | None:
        """Return a row of an input, shape = its dims; None when it is not there or has no elements."""
        return self._arrays[name][row_idx] if name in self else None

    def integer(self, name: str, row_idx: int) -> int | None:
        """Return the integer of a row, within the limits of its spec; None when it is not there."""
        value = self._single(name, row_idx)
        return None if value is None else int(value)

    def number(self, name: str, row_idx: int) -> float | None:
        """Return the float of a row, finite and within the limits of its spec; None when it is not there."""
        value = self._single(name, row_idx)
        return None if value is None else float(value)

    def flag(self, name: str, row_idx: int) -> bool | None:
        """Return the boolean of a row; None when it is not there."""
        value = self._single(name, row_idx)
        return None if value is None else bool(value)

    def text(self, name: str, row_idx: int) -> str | None:
        """Return the text of a row; None when it is not there.

        A length in front, 4 bytes little-endian as Triton packs strings, is taken off: some clients pack twice.
        raises InvalidArgumentError for bytes that are no UTF-8
        """
        if name not in self:
            return None
        value = self._arrays[name][row_idx].reshape(-1)[0]
        if isinstance(value, str):
            return value
        data = bytes(value)
        if len(data) >= 4 and int.from_bytes(data[:4], "little") == len(data) - 4:
            data = data[4:]
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(
                f"{name} has bytes that are no UTF-8 ({error.reason} at byte {error.start}), wanted text"
            ) from None

    def integers(self, name: str, row_idx: int) -> list[int] | None:
        """Return the integers of a row, flat; None when it is not there or empty."""
        row = self.row(name, row_idx)
        return None if row is None else [int(value) for value in row.reshape(-1).tolist()]

    def _single(self, name: str, row_idx: int) -> Any:
        if name not in self:
            return None
        spec = INPUTS[name]
        value = self._arrays[name][row_idx].item()
        is_in = isinstance(value, bool) or math.isfinite(value)
        is_in = (
            is_in and (spec.low is None or value >= spec.low) and (spec.high is None or value <= spec.high)
        )
        if not is_in:
            where = f" of row {row_idx}" if self.num_rows > 1 else ""
            raise InvalidArgumentError(f"{name}{where} is {value}, wanted {_limits(spec)}")
        return value

    def _of_one_form(self, spec: TensorSpec, array: NDArray[Any]) -> NDArray[Any]:
        """Return a tensor as [B, *dims]."""
        got = triton_type(array)
        if got not in spec.types:
            raise InvalidArgumentError(f"{spec.name} is {got}, wanted {' or '.join(spec.types)}")
        shape = array.shape
        if not self._is_batched:
            shape = (1, *shape)
        wanted = (self.num_rows, *spec.dims)
        if spec.is_single and len(shape) == 1:
            shape = (*shape, 1)
        fits = len(shape) == len(wanted) and all(
            want in (-1, have) for want, have in zip(wanted, shape, strict=True)
        )
        # An optional tensor may come empty, as another model's output that has nothing to say.
        if not fits and not (array.size == 0 and len(shape) == len(wanted) and shape[0] == self.num_rows):
            raise ShapeError(
                f"{spec.name} has shape {list(array.shape)}, wanted {self._wanted(spec)}{self._why()}"
            )
        return array.reshape(shape)

    def _wanted(self, spec: TensorSpec) -> str:
        dims = [str(dim) if dim >= 0 else "n" for dim in spec.dims]
        front = [str(self.num_rows)] if self._is_batched else []
        forms = [f"[{', '.join(front + dims)}]"]
        if spec.is_single:
            forms.append(f"[{', '.join(front)}]")
        return " or ".join(forms)

    def _why(self) -> str:
        if not self._is_batched:
            return ", as input_ids has no batch dimension"
        return f", with the {self.num_rows} rows of input_ids" if self.num_rows > 1 else ""

    def _add_parameter(self, name: str, value: Any) -> None:
        spec = INPUTS.get(name)
        if spec is None or not spec.is_single:
            if name != "request_type":
                self.notes.append(f"request parameter {name!r} is not known and has no effect")
            return
        if name in self:
            self.notes.append(f"request parameter {name!r} has no effect beside the tensor of that name")
            return
        array = np.empty((self.num_rows, 1), object if spec.types == ("STRING",) else _DTYPES[spec.types[0]])
        try:
            with np.errstate(over="ignore"):  # then it is infinite, which is refused where it is read
                array[:] = _parameter_value(spec, value)
        except (TypeError, ValueError, OverflowError):
            raise InvalidArgumentError(
                f"the request parameter {name} is {value!r}, wanted {_LITERALS.get(spec.types[0], 'a number')}"
            ) from None
        self._arrays[name] = array


_LITERALS = {
    "BOOL": "true or false",
    "STRING": "text",
    "INT32": "a 32-bit integer",
    "UINT64": "an integer >= 0",
}


def _parameter_value(spec: TensorSpec, value: Any) -> Any:
    """Return a parameter's value for an array of the input's type; TypeError, ValueError or OverflowError else."""
    kind = spec.types[0]
    if kind in ("BOOL", "STRING"):
        if not isinstance(value, bool if kind == "BOOL" else str):
            raise TypeError
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError
    if kind.startswith("FP"):
        return value
    info = np.iinfo(_DTYPES[kind])
    if value != int(value) or not info.min <= value <= info.max:
        raise ValueError
    return int(value)


def _limits(spec: TensorSpec) -> str:
    if spec.low is not None and spec.high is not None:
        return f"{spec.low:g} to {spec.high:g}"
    if spec.low is not None:
        return f"at least {spec.low:g}"
    return f"at most {spec.high:g}" if spec.high is not None else "a finite number"
