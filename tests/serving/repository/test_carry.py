"""Older repositories, filled and unfilled, and what is taken from them."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from old_repos import FILLED, MODELS, edit, write_old
from plansmith.runtime.errors import InvalidArgumentError, UnsupportedError
from plansmith.serving.repository.carry import Carried, carry_over
from plansmith.serving.repository.model_config import read_config
from plansmith.serving.repository.old_repository import read_repository
from plansmith.serving.repository.plan import Overrides, make_plan
from plansmith.serving.repository.template import fill
from plansmith.serving.triton.parameters import read_parameters
from tritonclient.grpc import model_config_pb2


def carry(old: Path, engine_dir: Path, own: Overrides | None = None) -> Carried:
    return carry_over(read_repository(old), engine_dir, own or Overrides())


def row(carried: Carried, model: str, key: str) -> tuple[str, str, str, str]:
    found = [one for one in carried.rows if (one.model, one.key) == (model, key)]
    assert len(found) == 1, (model, key, found)
    return found[0].old, found[0].new, found[0].state, found[0].why


def written(carried: Carried, engine_dir: Path, model: str) -> Any:
    plan = make_plan(engine_dir, Path("/repo"), carried.overrides)
    text = fill(model, plan.variables[model], plan.extra[model])
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def parameters(config: Any) -> dict[str, str]:
    return {key: one.string_value for key, one in config.parameters.items()}


def test_an_unfilled_repository_gives_the_defaults(engine_dir: Path, tmp_path: Path) -> None:
    carried = carry(write_old(tmp_path / "old"), engine_dir)
    assert not carried.rows and carried.overrides == Overrides()
    assert len(carried.unfilled) > 60
    assert {"tensorrt_llm.max_batch_size", "tensorrt_llm.max_beam_width"} <= set(carried.unfilled)
    assert {"tensorrt_llm_bls.instance_group count", "preprocessing.tokenizer_dir"} <= set(carried.unfilled)
    for model in MODELS:
        plan = make_plan(engine_dir, Path("/repo"), Overrides())
        text = fill(model, plan.variables[model], plan.extra[model])
        assert written(carried, engine_dir, model) == text_format.Parse(text, model_config_pb2.ModelConfig())


def test_a_filled_repository_is_carried_over(engine_dir: Path, tmp_path: Path) -> None:
    carried = carry(write_old(tmp_path / "old", FILLED), engine_dir)
    engine = written(carried, engine_dir, "tensorrt_llm")
    assert (engine.max_batch_size, engine.model_transaction_policy.decoupled) == (8, True)
    assert engine.dynamic_batching.max_queue_delay_microseconds == 100
    assert engine.dynamic_batching.default_queue_policy.max_queue_size == 17
    logits = {one.name: one.data_type for one in engine.output}
    assert logits["context_logits"] == logits["generation_logits"] == model_config_pb2.TYPE_FP16
    counts = {
        one: written(carried, engine_dir, one).instance_group[0].count for one in MODELS if one != "ensemble"
    }
    assert counts == {"preprocessing": 2, "tensorrt_llm": 1, "postprocessing": 3, "tensorrt_llm_bls": 4}

    texts = parameters(engine)
    settings, notes = read_parameters(texts)
    assert settings.engine_dir == engine_dir and not notes
    assert settings.exclude_input and settings.max_kv_tokens == 2560
    assert settings.options["enable_block_reuse"] is False
    assert settings.options["scheduler_policy"] == "max_utilization"
    assert parameters(written(carried, engine_dir, "preprocessing"))["add_special_tokens"] == "False"

    assert row(carried, "tensorrt_llm", "max_batch_size") == ("8", "8", "carried", "")
    assert row(carried, "tensorrt_llm", "batch_scheduler_policy")[2] == "carried"
    old, new, state, why = row(carried, "tensorrt_llm", "gpt_model_path")
    assert (old, new, state) == (FILLED["engine_dir"], str(engine_dir), "changed") and why
    assert row(carried, "tensorrt_llm", "kv_cache_free_gpu_mem_fraction")[:3] == ("0.85", "0.85", "carried")
    assert row(carried, "tensorrt_llm", "backend")[:3] == ("tensorrtllm", "python", "changed")
    assert row(carried, "preprocessing", "tokenizer_dir")[1:3] == (f"{engine_dir}/tokenizer", "changed")
    assert all(one.why for one in carried.rows if one.state != "carried")


@pytest.mark.parametrize(
    ("key", "value", "new", "state"),
    [
        ("decoding_mode", "lookahead", "speculation = ngram", "changed"),
        ("decoding_mode", "medusa", "", "not carried"),
        ("decoding_mode", "top_k", "", "not carried"),
        ("max_beam_width", "4", "1", "changed"),
        ("max_attention_window_size", "16", "", "not carried"),
        ("max_attention_window_size", "4096", "4096", "carried"),
        ("guided_decoding_backend", "xgrammar", "llguidance", "changed"),
        ("batch_scheduler_policy", "guaranteed_completion", "guaranteed_no_evict", "changed"),
        ("sink_token_length", "4", "", "not carried"),
        ("encoder_model_path", "/enc", "", "not carried"),
        ("lora_prefetch_dir", "/loras", "/loras", "carried"),
        ("lora_prefetch_dir", "loras", "", "not carried"),
        ("lora_prefetch_dir", "/models/engines/llama/1-gpu/lora", "ENGINE/lora", "changed"),
        ("enable_kv_cache_reuse", "true", "true", "carried"),
        ("kv_cache_host_memory_bytes", "45000000000", "45000000000", "carried"),
        ("gpu_device_ids", "0,1;2,3", "", "not carried"),
        ("gpu_device_ids", "1", "1", "carried"),
        ("cuda_graph_mode", "true", "true", "carried"),
        ("cuda_graph_cache_size", "16", "16", "carried"),
        ("gpu_weights_percent", "0.5", "0.5", "carried"),
        ("kv_cache_free_gpu_mem_fraction", "0.5", "0.5", "carried"),
        ("multi_block_mode", "false", "", "not carried"),
    ],
)
def test_a_parameter(engine_dir: Path, tmp_path: Path, key: str, value: str, new: str, state: str) -> None:
    variable = {"encoder_model_path": "encoder_engine_dir"}.get(key, key)
    carried = carry(write_old(tmp_path / "old", FILLED, **{variable: value}), engine_dir)
    expected = new.replace("ENGINE", str(engine_dir))
    assert row(carried, "tensorrt_llm", key)[:3] == (value, expected, state)
    settings, _ = read_parameters(parameters(written(carried, engine_dir, "tensorrt_llm")))
    settings.open_arguments()  # whatever was carried, the engine takes


def test_silent_parameters_make_no_rows(engine_dir: Path, tmp_path: Path) -> None:
    more = {"enable_trt_overlap": "False", "normalize_log_probs": "True", "recv_poll_period_ms": "0"}
    keys = {one.key for one in carry(write_old(tmp_path / "old", FILLED, **more), engine_dir).rows}
    assert not keys & {*more, "executor_worker_path", "gpt_model_type", "FORCE_CPU_ONLY_INPUT_TENSORS"}


def test_looks_do_not_matter(engine_dir: Path, tmp_path: Path) -> None:
    old = write_old(tmp_path / "old", FILLED)
    plain = carry(old, engine_dir)
    for model in MODELS:
        path = old / model / "config.pbtxt"
        text = path.read_text()
        text = re.sub(r"(?m)^(.*\S.*)$", r"\1   # ${comment} \" ' {", text)
        text = text.replace('string_value: "', "string_value:\n\t'").replace('"\n', "'\n")
        text = re.sub(r"string_value:\n\t'([^'\"\n]*)\"", r"string_value:\n\t'\1'", text)
        path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert carry(old, engine_dir) == plain


def test_custom_names_stay_with_their_clients(engine_dir: Path, tmp_path: Path) -> None:
    old = write_old(tmp_path / "old", FILLED, tensorrt_llm_model_name="llama_engine")
    for model, name in (("tensorrt_llm", "llama_engine"), ("ensemble", "llama"), ("preprocessing", "pre")):
        edit(old, model, f'name: "{model}"', f'name: "{name}"')
        (old / model).rename(old / name)
    carried = carry(old, engine_dir)
    assert carried.overrides.names == {"tensorrt_llm": "llama_engine", "ensemble": "llama"}
    ensemble = written(carried, engine_dir, "ensemble")
    assert ensemble.name == "llama"
    assert [one.model_name for one in ensemble.ensemble_scheduling.step][1] == "llama_engine"
    bls = written(carried, engine_dir, "tensorrt_llm_bls")
    assert parameters(bls)["tensorrt_llm_model_name"] == "llama_engine"
    assert row(carried, "preprocessing", "name")[:3] == ("pre", "preprocessing", "changed")


def test_what_its_owner_added_is_carried_or_named(engine_dir: Path, tmp_path: Path) -> None:
    old = write_old(tmp_path / "old", FILLED)
    extra = 'parameters { key: "my_table" value: { string_value: "a\\"b" } }\n'
    for model, text in (
        ("preprocessing", extra),
        ("tensorrt_llm", 'version_policy { all {} }\nmodel_warmup { name: "w" batch_size: 1 }\n'),
        ("postprocessing", 'input [ { name: "MINE" data_type: TYPE_BOOL dims: [ 1 ] optional: true } ]\n'),
    ):
        with (old / model / "config.pbtxt").open("a") as file:
            file.write(text)
    edit(old, "tensorrt_llm", "count: 1", "count: 2")
    edit(old, "tensorrt_llm", "kind : KIND_CPU", "kind : KIND_GPU")
    (old / "reranker").mkdir()
    (old / "reranker" / "config.pbtxt").write_text('backend: "onnxruntime"\n')
    carried = carry(old, engine_dir)
    assert parameters(written(carried, engine_dir, "preprocessing"))["my_table"] == 'a"b'
    for model, key in (
        ("tensorrt_llm", "version_policy"),
        ("tensorrt_llm", "model_warmup"),
        ("postprocessing", "tensor MINE"),
        ("reranker", "the model itself"),
    ):
        assert row(carried, model, key)[2] == "not carried"
    assert row(carried, "tensorrt_llm", "instance_group count")[:3] == ("2", "1", "changed")
    assert row(carried, "tensorrt_llm", "instance_group kind")[:3] == ("KIND_GPU", "KIND_CPU", "changed")


def test_types_that_changed_since_are_named(engine_dir: Path, tmp_path: Path) -> None:
    old = write_old(tmp_path / "old", FILLED)
    edit(
        old,
        "ensemble",
        'name: "top_k"\n    data_type: TYPE_INT32',
        'name: "top_k"\n    data_type: TYPE_UINT32',
    )
    handed_on = 'input [ { name: "CUM_LOG_PROBS" data_type: TYPE_FP32 dims: [ -1 ] } ]\n'
    with (old / "postprocessing" / "config.pbtxt").open("a") as file:
        file.write(handed_on)
    carried = carry(old, engine_dir)
    assert row(carried, "ensemble", "tensor top_k")[:3] == ("TYPE_UINT32", "TYPE_INT32", "changed")
    assert [one.key for one in carried.rows if one.key.startswith("tensor ")] == ["tensor top_k"]


def test_the_engine_among_a_draft_and_a_target(engine_dir: Path, tmp_path: Path) -> None:
    old = write_old(tmp_path / "old", FILLED, tensorrt_llm_model_name="tensorrt_llm_target")
    for name in ("tensorrt_llm_draft", "tensorrt_llm_target"):
        shutil.copytree(old / "tensorrt_llm", old / name)
        edit(old, name, 'name: "tensorrt_llm"', f'name: "{name}"')
    shutil.rmtree(old / "tensorrt_llm")
    edit(old, "tensorrt_llm_bls", "${tensorrt_llm_draft_model_name}", "tensorrt_llm_draft")
    assert read_repository(old).configs["tensorrt_llm"].name == "tensorrt_llm_target"
    carried = carry(old, engine_dir)
    for model, key in (
        ("tensorrt_llm_draft", "the model itself"),
        ("tensorrt_llm_bls", "tensorrt_llm_draft_model_name"),
    ):
        assert row(carried, model, key)[2] == "not carried"


def test_a_tokenizer_that_is_there_is_kept(engine_dir: Path, tmp_path: Path) -> None:
    mine = tmp_path / "tokenizer"
    mine.mkdir()
    (mine / "tokenizer.json").write_bytes((engine_dir / "tokenizer" / "tokenizer.json").read_bytes())
    carried = carry(write_old(tmp_path / "old", FILLED, tokenizer_dir=str(mine)), engine_dir)
    assert row(carried, "postprocessing", "tokenizer_dir")[1:3] == (str(mine), "carried")
    for model in ("preprocessing", "postprocessing", "tensorrt_llm_bls"):
        assert parameters(written(carried, engine_dir, model))["tokenizer_dir"] == str(mine)


def test_the_command_line_counts_more(engine_dir: Path, tmp_path: Path) -> None:
    own = Overrides(
        {"triton_max_batch_size": "2", "bls_instance_count": "9"},
        {("tensorrt_llm", "enable_kv_cache_reuse"): "true"},
    )
    carried = carry(write_old(tmp_path / "old", FILLED), engine_dir, own)
    both = own.over(carried.overrides)
    assert both.variables["triton_max_batch_size"] == "2"
    assert both.parameters["tensorrt_llm", "enable_kv_cache_reuse"] == "true"
    for model, key, new in (
        ("tensorrt_llm", "max_batch_size", "2"),
        ("tensorrt_llm_bls", "instance_group count", "9"),
        ("tensorrt_llm", "enable_kv_cache_reuse", "true"),
    ):
        assert row(carried, model, key)[1:] == (new, "changed", "the command line says so")


def test_without_a_batch_dimension(engine_dir: Path, tmp_path: Path) -> None:
    carried = carry(write_old(tmp_path / "old", FILLED, triton_max_batch_size="0"), engine_dir)
    assert row(carried, "tensorrt_llm", "max_batch_size")[:3] == ("0", "1", "changed")


@pytest.mark.parametrize(
    ("model", "old", "new", "says"),
    [
        ("tensorrt_llm", 'key: "max_beam_width"', 'key: "max_beam_widht"', r"widht.*did you mean max_beam_width"),
        ("tensorrt_llm", 'string_value: "max_utilization"', 'string_value: "fast"', r"policy is 'fast', it must be"),
        ("preprocessing", 'key: "add_special_tokens"', 'key: "add_special_token"', r"did you mean add_special_tokens"),
        ("preprocessing", 'string_value: "False"', 'string_value: "maybe"', r"of preprocessing is 'maybe'"),
        ("tensorrt_llm", "dynamic_batching {", "dynamic_batchin {", r'no field named "dynamic_batchin"'),
        ("ensemble", "dims: [ 1 ]", "dims: [ one ]", r"the line is: dims: \[ one \]"),
        ("postprocessing", "data_type: TYPE_INT32", "data_type: INT32", r"INT32"),
        ("tensorrt_llm_bls", "output [", "output [ [", r"the line is"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_file_and_line(
    engine_dir: Path, tmp_path: Path, model: str, old: str, new: str, says: str
) -> None:
    path = edit(write_old(tmp_path / "old", FILLED), model, old, new)
    line = path.read_text()[: path.read_text().index(new)].count("\n") + 1
    with pytest.raises(InvalidArgumentError, match=says) as error:
        carry(path.parents[1], engine_dir)
    text = str(error.value)
    number = re.search(rf"{re.escape(str(path))}, line (\d+)", text)
    assert number is not None and "\n" not in text, text
    # The parser tells where it noticed; a parameter's line is that of its key.
    assert abs(int(number[1]) - line) <= 2, text


def test_two_keys_of_one_setting(engine_dir: Path, tmp_path: Path) -> None:
    old = write_old(tmp_path / "old", FILLED)
    with (old / "tensorrt_llm" / "config.pbtxt").open("a") as file:
        file.write('parameters { key: "enable_block_reuse" value: { string_value: "true" } }\n')
    with pytest.raises(InvalidArgumentError, match=r"enable_block_reuse is 'true'.*'False'"):
        carry(old, engine_dir)


def test_places_without_a_repository(engine_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="is no directory"):
        read_repository(tmp_path / "none")
    with pytest.raises(InvalidArgumentError, match=r"has no MODEL/config\.pbtxt"):
        read_repository(tmp_path)
    old = write_old(tmp_path / "old")
    (old / "tensorrt_llm" / "config.pbtxt").unlink()
    with pytest.raises(InvalidArgumentError, match="none of the models"):
        read_repository(old)
    (old / "tensorrt_llm" / "config.pbtxt").mkdir()
    with pytest.raises(InvalidArgumentError, match=r"tensorrt_llm/config\.pbtxt cannot be read"):
        read_repository(old)


def test_a_name_that_is_not_its_directory(engine_dir: Path, tmp_path: Path) -> None:
    path = edit(write_old(tmp_path / "old"), "tensorrt_llm", 'name: "tensorrt_llm"', 'name: "other"')
    with pytest.raises(InvalidArgumentError, match="says name 'other'"):
        carry(path.parents[1], engine_dir)


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = write_old(tmp_path / "old")
    monkeypatch.setitem(sys.modules, "tritonclient.grpc", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'plansmith\[triton\]'"):
        read_config(old / "ensemble" / "config.pbtxt")
