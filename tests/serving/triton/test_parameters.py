"""The parameters of tensorrt_llm: what each becomes, what is refused, and how errors read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plansmith.runtime.engine import Engine
from plansmith.runtime.engine_options import EngineOptions
from plansmith.runtime.errors import EngineFileError, Error, InvalidArgumentError, UnsupportedError
from plansmith.runtime.manifest import load_manifest
from plansmith.serving.triton.parameter_text import plain
from plansmith.serving.triton.parameters import PARAMETERS, Settings, read_model_config, read_parameters
from tiny_engines import build_tiny

# The keys of the older backend's config.pbtxt.
OLDER_KEYS = set(
    """
gpt_model_type gpt_model_path encoder_model_path executor_worker_path max_beam_width FORCE_CPU_ONLY_INPUT_TENSORS
max_tokens_in_paged_kv_cache kv_cache_free_gpu_mem_fraction cross_kv_cache_fraction kv_cache_host_memory_bytes
kv_cache_onboard_blocks enable_kv_cache_reuse max_attention_window_size sink_token_length batch_scheduler_policy
enable_chunked_context enable_trt_overlap exclude_input_in_output normalize_log_probs cancellation_check_period_ms
stats_check_period_ms iter_stats_max_iterations request_stats_max_iterations recv_poll_period_ms gpu_device_ids
participant_ids num_nodes lora_cache_optimal_adapter_size lora_cache_max_adapter_size lora_cache_gpu_memory_fraction
lora_cache_host_memory_bytes lora_prefetch_dir decoding_mode lookahead_window_size lookahead_ngram_size
lookahead_verification_set_size medusa_choices eagle_choices speculative_decoding_fast_logits gpu_weights_percent
enable_context_fmha_fp32_acc multi_block_mode cuda_graph_mode cuda_graph_cache_size guided_decoding_backend
tokenizer_dir xgrammar_tokenizer_info_path
""".split()  # noqa: SIM905
)
CHECKED = [row.key for row in PARAMETERS if row.read is not plain]


def read(**texts: str) -> Settings:
    return read_parameters({"gpt_model_path": "/engine", **texts})[0]


def notes(**texts: str) -> list[str]:
    return read_parameters({"gpt_model_path": "/engine", **texts})[1]


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tiny_checkpoint("llama"), tmp_path_factory.mktemp("engine") / "llama")


def test_every_older_key_is_known_once() -> None:
    keys = [row.key for row in PARAMETERS]
    assert len(keys) == len(set(keys))
    assert set(keys) >= OLDER_KEYS


def test_every_row_becomes_something_that_exists() -> None:
    options = {field.name for field in dataclasses.fields(EngineOptions)}
    settings = {field.name for field in dataclasses.fields(Settings)}
    settings |= {"decoding_mode", "gpu_device_ids", "cuda_graph_mode"}  # what they become: tests below
    for row in PARAMETERS:
        kind, _, name = row.becomes.partition(" ")
        assert kind in ("option", "setting", "ignored", "refused"), row.key
        assert name in {"option": options, "setting": settings}.get(kind, {""}), row.key
        assert row.meaning


def test_the_defaults_that_are_written_are_those_of_the_engine() -> None:
    written = {row.key: row.default for row in PARAMETERS}
    settings, said = read_parameters({**written, "gpt_model_path": "/engine"})
    assert not said
    assert EngineOptions(**settings.options) == EngineOptions()
    same = dataclasses.replace(settings, options={}, max_adapters=None, max_adapter_rank=None)
    assert same == Settings(Path("/engine"))
    assert (settings.max_adapters, settings.max_adapter_rank) == (8, 64)  # what None stands for


@pytest.mark.parametrize("key", CHECKED)
def test_a_bad_value_is_named_with_its_key_and_what_is_wanted(key: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^{key} is '7,x', it must be .+") as error:
        read_parameters({"gpt_model_path": "/engine", key: "7,x"})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", [row.key for row in PARAMETERS])
def test_a_variable_that_was_not_filled_is_an_error_and_an_empty_text_is_none(key: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^{key} is '\$\{{x}}'.*not filled"):
        read_parameters({"gpt_model_path": "/engine", key: "${x}"})
    if key != "gpt_model_path":
        assert read_parameters({"gpt_model_path": "/engine", key: " "}) == (Settings(Path("/engine")), [])


@given(st.sampled_from(PARAMETERS), st.text(max_size=12))
def test_any_text_is_a_value_or_an_error_of_ours(row: Any, text: str) -> None:
    try:
        settings, _ = read_parameters({"gpt_model_path": "/engine", row.key: text})
    except Error as error:
        assert row.key in str(error)
    else:
        EngineOptions(**settings.options)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("batch_schedular_policy", "batch_scheduler_policy"),
        ("kv_cache_byte", "kv_cache_bytes"),
        ("zzz", "remove it"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(key: str, near: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{key} is no parameter of tensorrt_llm.*{near}"):
        read(**{key: "1"})


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12))
def test_any_unknown_key_is_an_error_of_one_line(key: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        read_parameters({"gpt_model_path": "/engine", f"kv_cache {key}": "1"})
    assert len(str(error.value).splitlines()) == 1


def test_settings() -> None:
    settings = read(
        exclude_input_in_output="True",
        max_beam_width="4",
        cancellation_check_period_ms="7",
        stats_check_period_ms="8",
        stream_interval_ms="2.5",
        lora_cache_max_adapter_size="16",
        lora_cache_host_memory_bytes="5",
        max_adapters="3",
        num_threads="2",
        weights="mapped",
        guided_decoding_backend="xgrammar",
        batch_scheduler_policy="MAX_UTILIZATION",
        queue_order="Shortest",
        kv_cache_host_memory_bytes="4096",
        enable_kv_cache_reuse="0",
        max_num_seqs="5",
        max_queue_size="9",
        max_attention_window_size="64, 128",
    )
    assert settings == Settings(
        Path("/engine"),
        exclude_input=True,
        max_beam_width=4,
        cancellation_check_period_ms=7,
        stats_check_period_ms=8,
        stream_interval_ms=2.5,
        max_adapter_rank=16,
        lora_host_memory_bytes=5,
        max_adapters=3,
        num_threads=2,
        weights="mapped",
        attention_windows=(64, 128),
        options={
            "scheduler_policy": "max_utilization",
            "queue_order": "shortest",
            "host_cache_bytes": 4096,
            "enable_block_reuse": False,
            "max_batch_size": 5,
            "max_queue_size": 9,
        },
    )


def test_the_engine_directory_is_wanted() -> None:
    with pytest.raises(InvalidArgumentError, match="gpt_model_path is empty"):
        read_parameters({})


def test_relative_paths_start_at_the_repository() -> None:
    texts = {"gpt_model_path": "../engines/a", "draft_engine_dir": "/b", "lora_prefetch_dir": "lora"}
    settings, _ = read_parameters(texts, "/srv/models")
    assert settings.engine_dir == Path("/srv/engines/a")
    assert (settings.draft, settings.lora_prefetch_dir) == (Path("/b"), Path("/srv/models/lora"))


def test_two_keys_of_one_setting_may_agree_not_differ() -> None:
    assert read(enable_kv_cache_reuse="true", enable_block_reuse="true").options == {
        "enable_block_reuse": True
    }
    with pytest.raises(InvalidArgumentError, match="enable_block_reuse is 'false' and enable_kv_cache_reuse"):
        read(enable_kv_cache_reuse="true", enable_block_reuse="false")
    assert read(max_num_sequences="4", max_num_seqs="0").options == {"max_batch_size": 4}


def test_decoding_modes() -> None:
    assert read(decoding_mode="lookahead").speculation == "ngram"
    assert "speculation ngram" in notes(decoding_mode="lookahead")[0]
    assert read(decoding_mode="auto").speculation == "auto" and not notes(decoding_mode="auto")
    assert "each request" in notes(decoding_mode="top_k")[0]
    for mode in ("medusa", "eagle", "redrafter"):
        with pytest.raises(UnsupportedError, match=f"decoding_mode is '{mode}'"):
            read(decoding_mode=mode)
    for other in ({"speculation": "off"}, {"draft_engine_dir": "/draft"}):
        with pytest.raises(InvalidArgumentError, match="decoding_mode is 'lookahead'"):
            read(decoding_mode="lookahead", **other)


@pytest.mark.parametrize(
    ("key", "silent", "refused"),
    [("sink_token_length", "0", "4"), ("num_nodes", "1", "2"), ("encoder_model_path", "", "/enc")],
)
def test_what_cannot_be_done_is_refused(key: str, silent: str, refused: str) -> None:
    assert not notes(**{key: silent})
    with pytest.raises(UnsupportedError, match=f"{key} is '{refused}'"):
        read(**{key: refused})


def test_what_has_no_effect_is_noted_unless_it_asks_for_nothing() -> None:
    assert not notes(kv_cache_free_gpu_mem_fraction="0.85")
    assert notes(multi_block_mode="false") and not notes(multi_block_mode="TRUE")
    assert not notes(executor_worker_path="/opt/worker", gpt_model_type="inflight_fused_batching")
    assert notes(gpt_model_type="V1") and notes(gpu_device_ids="0")


OF_GPU = {
    "gpu_device_ids": "0",
    "cuda_graph_mode": "true",
    "cuda_graph_cache_size": "8",
    "gpu_weights_percent": "0.5",
}


@pytest.mark.parametrize("key", OF_GPU)
def test_keys_of_gpu_targets_are_noted_on_cpu_alone(key: str) -> None:
    text = {key: OF_GPU[key]}
    (note,) = notes(**text)
    assert re.fullmatch(rf"{key} is '{OF_GPU[key]}' and has no effect: the target is cpu.*", note)
    assert read(**text) == Settings(Path("/engine"))
    assert not notes(target="sm89", **text) and not notes(target="auto", **text)


def test_keys_of_gpu_targets_that_ask_for_nothing_are_not_noted() -> None:
    assert not notes(cuda_graph_mode="False", cuda_graph_cache_size="0", gpu_weights_percent="1.0")
    assert not notes(enable_context_fmha_fp32_acc="true", multi_block_mode="true")
    assert "always split" in notes(target="sm89", multi_block_mode="false")[0]


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        ({"gpu_device_ids": "1"}, {"device": "1"}),
        ({"gpu_device_ids": " 1 ", "device": "1"}, {"device": "1"}),
        ({"gpu_device_ids": "GPU-1a2b"}, {"device": "GPU-1a2b"}),
        ({"cuda_graph_mode": "true"}, {}),
        ({"cuda_graph_mode": "true", "cuda_graphs": "own"}, {"cuda_graphs": "own"}),
        ({"cuda_graph_mode": "false", "cuda_graphs": "auto"}, {"cuda_graphs": "off"}),
        ({"cuda_graph_cache_size": "8"}, {"cuda_graph_cache_size": 8}),
        ({"gpu_weights_percent": "0.25"}, {"gpu_weights_percent": 0.25}),
        ({"gpu_weights_percent": "0"}, {"gpu_weights_percent": 0.0}),
    ],
)
def test_keys_of_gpu_targets(texts: dict[str, str], wanted: dict[str, Any]) -> None:
    expected = Settings(Path("/engine"), target="sm89", **{"cuda_graphs": "auto", **wanted})
    assert read(target="sm89", **texts) == expected


@pytest.mark.parametrize(
    ("texts", "error", "words"),
    [
        (
            {"gpu_device_ids": "0,1"},
            UnsupportedError,
            r"gpu_device_ids is '0,1', and an engine runs on one GPU",
        ),
        ({"gpu_device_ids": "0;1"}, UnsupportedError, "start a server for each"),
        ({"gpu_device_ids": "first"}, InvalidArgumentError, "it must be the number of a GPU"),
        (
            {"gpu_device_ids": "0", "device": "1"},
            InvalidArgumentError,
            "gpu_device_ids is '0' and device says",
        ),
        (
            {"cuda_graph_mode": "true", "cuda_graphs": "off"},
            InvalidArgumentError,
            "cuda_graph_mode is 'true'",
        ),
        ({"cuda_graph_mode": "false", "cuda_graphs": "own"}, InvalidArgumentError, "cuda_graphs is 'own'"),
        ({"cuda_graph_cache_size": "-1"}, InvalidArgumentError, "an integer from 0"),
        ({"gpu_weights_percent": "50"}, InvalidArgumentError, "at least 0 and at most 1"),
        ({"kv_cache_free_gpu_mem_fraction": "0"}, InvalidArgumentError, "above 0 and at most 1"),
    ],
)
def test_keys_of_gpu_targets_that_are_refused(texts: dict[str, str], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        read(target="sm89", **texts)


def test_tokens_of_the_kv_cache_become_bytes_of_whole_blocks(tiny: Path) -> None:
    manifest = load_manifest(tiny)
    settings, _ = read_parameters(
        {"gpt_model_path": str(tiny), "max_tokens_in_paged_kv_cache": "201", "num_threads": "1"}
    )
    arguments = settings.open_arguments()
    assert arguments["weights"] == "auto"
    token = manifest.model.kv_bytes_per_token(manifest.target("cpu").kv_dtype)
    assert arguments["kv_cache_bytes"] == 208 * token  # blocks of 8
    with Engine.open(**arguments) as engine:
        assert engine.stats().max_num_blocks * 8 == 208
    less, _ = read_parameters(
        {"gpt_model_path": str(tiny), "max_tokens_in_paged_kv_cache": "201", "kv_cache_bytes": "5000"}
    )
    assert less.open_arguments()["kv_cache_bytes"] == min(5000, 208 * token)


def test_a_draft_shares_the_budget(tiny: Path) -> None:
    texts = {"gpt_model_path": str(tiny), "max_tokens_in_paged_kv_cache": "200", "num_threads": "1"}
    alone = read_parameters(texts)[0].open_arguments()["kv_cache_bytes"]
    settings, _ = read_parameters({**texts, "draft_engine_dir": str(tiny)})
    assert settings.open_arguments()["kv_cache_bytes"] == 2 * alone
    with Engine.open(**settings.open_arguments()) as engine:
        assert engine.stats().max_num_blocks * 8 == 200


def test_limits_of_the_engine_are_named_before_it_is_opened(tiny: Path) -> None:
    def arguments(**texts: str) -> dict[str, Any]:
        return read_parameters({"gpt_model_path": str(tiny), **texts})[0].open_arguments()

    with pytest.raises(
        InvalidArgumentError, match=r"max_beam_width is 4, the engine.*at most 1.*--max-beam-width 4"
    ):
        arguments(max_beam_width="4")
    with pytest.raises(InvalidArgumentError, match="max_attention_window_size asks for 64 tokens in layer 1"):
        arguments(max_attention_window_size="128,64")
    assert arguments(max_attention_window_size="128,4096")["target"] == "cpu"
    with pytest.raises(EngineFileError, match="no target 'rtx-sm89'"):
        arguments(target="rtx-sm89")
    with pytest.raises(EngineFileError):
        read_parameters({"gpt_model_path": str(tiny.parent)})[0].open_arguments()


def config(**fields: Any) -> dict[str, Any]:
    return {"parameters": {"gpt_model_path": {"string_value": "/engine"}}, **fields}


def test_the_rest_of_the_configuration() -> None:
    settings, _ = read_model_config(
        config(
            max_batch_size=8,
            model_transaction_policy={"decoupled": True},
            dynamic_batching={"default_queue_policy": {"max_queue_size": 5}},
            output=[{"name": "context_logits", "data_type": "TYPE_FP16"}],
        )
    )
    assert (settings.max_batch_size, settings.is_decoupled, settings.logits_dtype) == (8, True, "float16")
    assert settings.options == {"max_queue_size": 5}
    plainest, _ = read_model_config(config())
    assert (plainest.is_decoupled, plainest.logits_dtype, plainest.options) == (False, "float32", {})


def test_types_of_logits_that_differ_are_named() -> None:
    outputs = [
        {"name": "context_logits", "data_type": "TYPE_FP16"},
        {"name": "generation_logits", "data_type": "TYPE_FP32"},
    ]
    with pytest.raises(InvalidArgumentError, match="context_logits TYPE_FP16, generation_logits TYPE_FP32"):
        read_model_config(config(output=outputs))
    with pytest.raises(InvalidArgumentError, match="TYPE_BF16"):
        read_model_config(config(input=[{"name": "draft_logits", "data_type": "TYPE_BF16"}]))
