"""The table of inputs against the model's configuration, and both forms of every tensor on the wire."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plansmith.runtime.errors import InvalidArgumentError, ShapeError
from plansmith.serving.triton.input_specs import OLDER_NAMES
from plansmith.serving.triton.tensors import INPUTS, Inputs, TensorSpec, triton_type

CONFIG = Path(__file__).parents[3] / "triton_repo" / "tensorrt_llm" / "config.pbtxt"
NOT_DECLARED = {"runtime_top_k_min", "multimodal_embedding"}  # names that the older backend read all the same
DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "STRING": object,
}
NO_LIMIT = {
    *("pad_id", "presence_penalty", "frequency_penalty", "seed", "len_penalty", "lora_task_id"),
    *("encoder_output_lengths", "decoder_input_lengths", "prompt_vocab_size", "mrope_position_deltas"),
}
SHARES = {
    "runtime_top_p_min",
    "runtime_top_k_min",
    "runtime_top_p_decay",
    "min_p",
    "draft_acceptance_threshold",
    "priority",
}
AT_LEAST = {
    -1: {"end_id", "runtime_top_p_reset_ids", "retention_decode_duration_ms"},
    0: {
        *(
            "min_tokens",
            "temperature",
            "runtime_top_k",
            "repetition_penalty",
            "no_repeat_ngram_size",
            "timeout_ms",
        ),
        *("early_stopping", "beam_search_diversity_rate", "lookahead_verification_set_size", "max_draft_len"),
    },
    1: {
        *("input_lengths", "request_output_len", "beam_width"),
        *("lookahead_window_size", "lookahead_ngram_size"),
    },
}
SPECS = sorted(INPUTS.values(), key=lambda spec: spec.name)
SINGLES = [spec for spec in SPECS if spec.is_single]


def ids(*rows: list[int]) -> np.ndarray[Any, Any]:
    return np.array(rows, np.int32)


def array_of(spec: TensorSpec, shape: tuple[int, ...], kind: str | None = None) -> np.ndarray[Any, Any]:
    """Return an array of ones of an input's type."""
    array = np.ones(shape, DTYPES[kind or spec.types[0]])
    if array.dtype == object:
        array[...] = b"1"
    return array


def inputs_of(name: str, array: Any, num_rows: int = 1, *, batched: bool = True) -> Inputs:
    prompt = np.ones((num_rows, 3), np.int32) if batched else np.ones(3, np.int32)
    return Inputs({"input_ids": prompt, name: array}, {})


def test_the_table_is_what_the_configuration_declares() -> None:
    text = CONFIG.read_text(encoding="utf-8")
    block = text[text.index("input [") : text.index("output [")]
    declared = {}
    for line in block.splitlines():
        found = re.search(r'name: "(\w+)" data_type: (\S+) dims: \[ ([^\]]*) \]', line)
        if found is None:
            continue
        name, kind, dims = found.groups()
        if name in OLDER_NAMES:  # renamed before they are read
            continue
        declared[name] = (
            tuple(int(dim) for dim in dims.split(",")),
            "reshape: { shape: [ ] }" in line,
            "allow_ragged_batch: true" in line,
            "optional: true" not in line,
        )
        if kind.startswith("TYPE_"):
            assert kind == f"TYPE_{INPUTS[name].types[0]}", name
    ours = {
        spec.name: (spec.dims, spec.is_scalar, spec.is_ragged, spec.is_required)
        for spec in SPECS
        if spec.name not in NOT_DECLARED
    }
    assert len(declared) > 60 and declared == ours


def test_the_limits_of_values() -> None:
    ours: dict[tuple[float | None, float | None], set[str]] = {}
    for spec in SINGLES:
        if spec.types[0] not in ("BOOL", "STRING") or spec.low is not None:
            ours.setdefault((spec.low, spec.high), set()).add(spec.name)
    want = {(low, None): names for low, names in AT_LEAST.items()}
    want |= {(0, 1): SHARES, (None, None): NO_LIMIT, (None, 1): {"runtime_top_p"}}
    assert ours == want | {(0, 100): {"retention_decode_priority"}, (1, 1024): {"num_return_sequences"}}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_each_input_is_read_in_each_of_its_types_and_forms(spec: TensorSpec, num_rows: int) -> None:
    dims = tuple(4 if dim < 0 else dim for dim in spec.dims)
    forms = [(num_rows, *dims)] + ([(num_rows,)] if spec.is_single else [])
    for kind in spec.types:
        for shape in forms:
            inputs = inputs_of(spec.name, array_of(spec, shape, kind), num_rows)
            assert inputs.num_rows == num_rows and spec.name in inputs
            for i in range(num_rows):
                row = inputs.row(spec.name, i)
                assert row is not None and row.shape == dims and triton_type(row) == kind


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_each_input_is_read_without_a_batch_dimension(spec: TensorSpec) -> None:
    dims = tuple(4 if dim < 0 else dim for dim in spec.dims)
    for shape in [dims] + ([()] if spec.is_single else []):
        row = inputs_of(spec.name, array_of(spec, shape), batched=False).row(spec.name, 0)
        assert row is not None and row.shape == dims


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_another_type_rank_or_batch_size_is_an_error_that_names_the_input(spec: TensorSpec) -> None:
    dims = tuple(4 if dim < 0 else dim for dim in spec.dims)
    other = next(kind for kind in DTYPES if kind not in spec.types)
    with pytest.raises(InvalidArgumentError, match=rf"^{spec.name} is {other}, wanted {spec.types[0]}"):
        inputs_of(spec.name, array_of(spec, (2, *dims), other), 2)
    if spec.name == "input_ids":
        return
    for shape in [(3, *dims), (2, 1, *dims), (2, *dims, 1), ()]:
        with pytest.raises(
            ShapeError, match=rf"^{spec.name} has shape .*, wanted \[2, .*2 rows of input_ids"
        ):
            inputs_of(spec.name, array_of(spec, shape), 2)
    with pytest.raises(ShapeError, match=rf"^{spec.name} has shape .*no batch dimension"):
        inputs_of(spec.name, array_of(spec, (1, 1, *dims)), batched=False)


@pytest.mark.parametrize("shape", [(), (1, 2, 3), (1, 1, 1, 1)])
def test_a_prompt_of_another_rank_is_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"^input_ids has shape"):
        Inputs({"input_ids": np.ones(shape, np.int32)}, {})


def test_a_batch_without_rows_is_an_error() -> None:
    with pytest.raises(ShapeError, match="at least one row"):
        Inputs({"input_ids": np.ones((0, 3), np.int32)}, {})


def test_a_type_that_triton_has_not_is_named_as_numpy_does() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^temperature is complex64, wanted FP32"):
        inputs_of("temperature", np.ones((1, 1), np.complex64))


def test_an_unknown_input_is_an_error() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^image_embeddings is no input"):
        inputs_of("image_embeddings", np.ones((1, 1), np.float32))


def test_a_tensor_without_elements_is_as_good_as_none() -> None:
    for name, shape in [("stop_words_list", (2, 2, 0)), ("embedding_bias", (2, 0)), ("end_id", (2, 0))]:
        inputs = inputs_of(name, array_of(INPUTS[name], shape), 2)
        assert name not in inputs and inputs.row(name, 1) is None
    assert inputs_of("end_id", array_of(INPUTS["end_id"], (2, 0)), 2).integer("end_id", 0) is None


def test_values_become_pythons_own() -> None:
    tensors = {
        "input_ids": ids([1, 2]),
        "seed": np.array([[2**64 - 1]], np.uint64),
        "runtime_top_p": np.array([0.5], np.float32),
        "streaming": np.array([[True]]),
        "retention_token_range_starts": ids([0, 7]),
    }
    inputs = Inputs(tensors, {})
    assert inputs.integer("seed", 0) == 2**64 - 1 and type(inputs.integer("seed", 0)) is int
    assert inputs.number("runtime_top_p", 0) == 0.5 and type(inputs.number("runtime_top_p", 0)) is float
    assert inputs.flag("streaming", 0) is True and inputs.flag("stop", 0) is None
    starts = inputs.integers("retention_token_range_starts", 0)
    assert starts == [0, 7] and all(type(one) is int for one in starts)


@pytest.mark.parametrize(
    "spec", [spec for spec in SINGLES if spec.types[0] in ("INT32", "FP32")], ids=lambda s: s.name
)
def test_values_outside_the_limits_are_errors_that_name_input_and_row(spec: TensorSpec) -> None:
    step = 1 if spec.types[0] == "INT32" else 0.001
    bad: list[float] = [] if spec.types[0] == "INT32" else [float("nan"), float("inf"), float("-inf")]
    bad += [] if spec.low is None else [spec.low - step]
    bad += [] if spec.high is None else [spec.high + step]
    for value in bad:
        array = np.full(
            (2, 1), 1 if spec.high is None or spec.high >= 1 else spec.high, DTYPES[spec.types[0]]
        )
        array[1] = value
        inputs = inputs_of(spec.name, array, 2)
        inputs.number(spec.name, 0)
        with pytest.raises(InvalidArgumentError, match=rf"^{spec.name} of row 1 is .*, wanted"):
            inputs.number(spec.name, 1)
    for limit in (spec.low, spec.high):
        if limit is not None:
            assert (
                inputs_of(spec.name, np.full((1, 1), limit, DTYPES[spec.types[0]])).number(spec.name, 0)
                == limit
            )


@settings(deadline=None)
@given(text=st.text())
def test_a_text_is_read_packed_or_not(text: str) -> None:
    data = text.encode()
    packed = struct.pack("<I", len(data)) + data
    for form in (data, packed, text):
        array = np.empty((1, 1), object)
        array[0, 0] = form
        assert inputs_of("guided_decoding_guide", array).text("guided_decoding_guide", 0) == text


def test_a_length_in_front_that_is_none_is_text() -> None:
    for data in (b"\x04\x00\x00\x00abc", b"\x02\x00\x00\x00abc", b"\x00\x00\x00", b""):
        array = np.array([[data]], object)
        assert inputs_of("cache_salt", array).text("cache_salt", 0) == data.decode()


def test_numpys_bytes_and_texts_are_texts_too() -> None:
    for array in (np.array([[b"ab"]]), np.array([["ab"]]), np.array([b"ab"], object)):
        assert inputs_of("cache_salt", array).text("cache_salt", 0) == "ab"


def test_bytes_that_are_no_text_are_an_error_that_names_the_input() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"^guided_decoding_guide has bytes that are no UTF-8.*byte 1"
    ):
        inputs_of("guided_decoding_guide", np.array([[b"a\xff"]], object)).text("guided_decoding_guide", 0)


PARAMETERS = [
    ("temperature", 1, 1.0),
    ("temperature", 0.5, 0.5),
    ("runtime_top_k", 40, 40),
    ("runtime_top_k", 40.0, 40),
    ("seed", 2**64 - 1, 2**64 - 1),
    ("streaming", True, 1),
    ("beam_width", 2, 2),
]


@pytest.mark.parametrize(("name", "value", "want"), PARAMETERS)
def test_a_request_parameter_stands_for_the_input_of_its_name(name: str, value: Any, want: float) -> None:
    inputs = Inputs({"input_ids": ids([1], [2])}, {name: value})
    assert [inputs.number(name, i) if want != 2**64 - 1 else inputs.integer(name, i) for i in range(2)] == [
        want
    ] * 2
    assert inputs.notes == []


def test_a_text_is_a_parameter_too() -> None:
    inputs = Inputs({"input_ids": ids([1])}, {"cache_salt": "tenant \u00fc"})
    assert inputs.text("cache_salt", 0) == "tenant \u00fc"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "warm"),
        ("temperature", True),
        ("temperature", 10**400),
        ("runtime_top_k", 1.5),
        ("runtime_top_k", 2**31),
        ("runtime_top_k", None),
        ("runtime_top_k", [4]),
        ("seed", -1),
        ("seed", float("nan")),
        ("seed", float("inf")),
        ("streaming", 1),
        ("streaming", "true"),
        ("cache_salt", 5),
    ],
)
def test_a_parameter_that_the_input_cannot_be_is_an_error(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^the request parameter {name} is .*, wanted"):
        Inputs({"input_ids": ids([1])}, {name: value})


def test_a_float_parameter_too_large_for_the_input_is_an_error() -> None:
    inputs = Inputs({"input_ids": ids([1])}, {"temperature": 1e300})
    with pytest.raises(InvalidArgumentError, match=r"^temperature is inf"):
        inputs.number("temperature", 0)


def test_other_parameters_have_no_effect_and_are_noted() -> None:
    tensors = {"input_ids": ids([1]), "temperature": np.array([[0.5]], np.float32)}
    inputs = Inputs(tensors, {"temperature": 0.9, "x-trace": "7", "input_ids": 4, "request_type": "any"})
    assert inputs.number("temperature", 0) == 0.5
    assert [note.split("'")[1] for note in inputs.notes] == ["temperature", "x-trace", "input_ids"]


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(sorted(INPUTS)),
    shape=st.lists(st.integers(0, 3), max_size=4),
    kind=st.sampled_from(sorted(DTYPES)),
    num_rows=st.integers(1, 3),
    batched=st.booleans(),
)
def test_any_array_is_read_or_refused_by_name(
    name: str, shape: list[int], kind: str, num_rows: int, batched: bool
) -> None:
    array = array_of(INPUTS[name], tuple(shape), kind)
    try:
        inputs = inputs_of(name, array, num_rows, batched=batched)
    except (InvalidArgumentError, ShapeError) as error:
        assert name in str(error) or "input_ids" in str(error)
        return
    for i in range(inputs.num_rows):
        row = inputs.row(name, i)
        assert row is None or (
            row.ndim == len(INPUTS[name].dims) and row.size == array.size // inputs.num_rows
        )
