"""The templates: the older tensors exactly, ours beside them, and an ensemble that is wired right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from old_repos import tensors
from plansmith.runtime.errors import InvalidArgumentError
from plansmith.serving.repository.plan import Overrides, make_plan
from plansmith.serving.repository.template import (
    MODELS,
    fill,
    parameter_variables,
    quoted,
    template_dir,
)
from plansmith.serving.triton.input_specs import OLDER_NAMES
from plansmith.serving.triton.parameters import PARAMETERS
from plansmith.serving.triton.tensors import INPUTS
from tritonclient.grpc import model_config_pb2

# Other copies of the older repositories have these as well, or in another form.
OTHERS = {
    ("tensorrt_llm", "input"): {
        "return_num_input_tokens": "BOOL 1 os",
        "return_num_output_tokens": "BOOL 1 os",
        "return_kv_cache_reuse_stats": "BOOL 1 os",
        "min_length": "INT32 1 os",  # min_tokens and seed, before
        "random_seed": "UINT64 1 os",
    },
    ("ensemble", "input"): {
        "return_num_input_tokens": "BOOL 1 o",
        "return_num_output_tokens": "BOOL 1 o",
        "return_kv_cache_reuse_stats": "BOOL 1 o",
        "min_length": "INT32 1 o",  # min_tokens and seed, before
        "random_seed": "UINT64 1 o",
    },
    ("tensorrt_llm_bls", "input"): {
        "return_num_input_tokens": "BOOL 1 os",
        "return_num_output_tokens": "BOOL 1 os",
        "return_kv_cache_reuse_stats": "BOOL 1 os",
        "min_length": "INT32 1 o",  # min_tokens and seed, before
        "random_seed": "UINT64 1 o",
    },
    **{
        (model, "output"): {"num_input_tokens": "INT32 1 ", "num_output_tokens": "INT32 1 "}
        for model in ("tensorrt_llm", "ensemble", "tensorrt_llm_bls")
    },
    ("preprocessing", "input"): {"IMAGES": "STRING -1 o"},
    ("preprocessing", "output"): {"IMAGE_SIZES": "INT64 -1,2 "},
}
# Without one of these Triton may never answer, so the models ask for them.
REQUIRED_BY_THE_MODEL = {
    ("ensemble", "input"): {"text_input": "STRING 1 o", "max_tokens": "INT32 1 o"},
    ("preprocessing", "input"): {"QUERY": "STRING 1 o", "REQUEST_OUTPUT_LEN": "INT32 1 o"},
}
OWN = {
    ("tensorrt_llm", "input"): {
        "no_repeat_ngram_size": "INT32 1 os",
        "min_p": "FP32 1 os",
        "cache_salt": "STRING 1 os",
        "priority": "FP32 1 os",
        "timeout_ms": "INT32 1 os",
        "max_draft_len": "INT32 1 os",
    },
    ("tensorrt_llm", "output"): {
        "prefix_ids": "INT32 -1,-1 ",
        "is_final": "BOOL 1 ",
        "finish_reasons": "INT32 -1 ",
    },
    ("postprocessing", "input"): {"PREFIX_IDS": "INT32 -1,-1 o", "IS_FINAL": "BOOL 1 o"},
}
TYPES = {
    "${logits_datatype}": "FP32",
    "${encoder_input_features_data_type}": "FP16",
}


@pytest.fixture(scope="module")
def configs(engine_dir: Path) -> dict[str, Any]:
    plan = make_plan(engine_dir, Path("/repo"), Overrides())
    texts = {model: fill(model, plan.variables[model], plan.extra[model]) for model in MODELS}
    assert not any("${" in text for text in texts.values())
    return {model: text_format.Parse(text, model_config_pb2.ModelConfig()) for model, text in texts.items()}


def described(tensor: Any) -> str:
    kind = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
    flags = "o" * getattr(tensor, "optional", False) + "R" * getattr(tensor, "allow_ragged_batch", False)
    flags += "s" * (tensor.HasField("reshape") and not tensor.reshape.shape)
    return f"{kind} {','.join(map(str, tensor.dims))} {flags}"


@pytest.mark.parametrize("kind", ["input", "output"])
@pytest.mark.parametrize("model", MODELS)
def test_tensors_are_the_older_ones_and_ours_are_optional(
    configs: dict[str, Any], model: str, kind: str
) -> None:
    has = {one.name: described(one) for one in getattr(configs[model], kind)}
    assert len(has) == len(getattr(configs[model], kind)), "a tensor is declared twice"
    older = {
        name: f"{TYPES.get(type_, type_)} {dims} {flags}"
        for of, is_, name, type_, dims, flags in tensors()
        if (of, is_) == (model, kind)
    } | OTHERS.get((model, kind), {})
    older |= REQUIRED_BY_THE_MODEL.get((model, kind), {})
    assert {name: has.get(name) for name in older} == older
    more = {name: text for name, text in has.items() if name not in older}
    if (model, kind) in OWN:
        assert more == OWN[model, kind]
    if kind == "input":
        assert all("o" in text.split(" ")[2] for text in more.values())


def test_every_input_that_is_read_is_declared_as_it_is_read(configs: dict[str, Any]) -> None:
    declared = {one.name: one for one in configs["tensorrt_llm"].input}
    undeclared = {"runtime_top_k_min", "multimodal_embedding"}  # never were
    assert INPUTS.keys() - undeclared == declared.keys() - OLDER_NAMES.keys()
    for name, tensor in declared.items():
        assert described(tensor).split(" ")[0] in INPUTS[OLDER_NAMES.get(name, name)].types, name


def test_models_are_configured_for_the_python_backend(configs: dict[str, Any]) -> None:
    for model, config in configs.items():
        assert config.name == model and config.max_batch_size == 8
        if model == "ensemble":
            continue
        assert config.backend == "python"
        assert [(one.kind, one.count) for one in config.instance_group] == [
            (model_config_pb2.ModelInstanceGroup.KIND_CPU, 1)
        ]
        assert config.model_transaction_policy.decoupled == model.startswith("tensorrt_llm")
        code = (template_dir() / model / "1" / "model.py").read_text()
        assert "import TritonPythonModel" in code and "plansmith.serving.triton" in code
    assert configs["tensorrt_llm"].dynamic_batching.preferred_batch_size == [8]
    assert not configs["postprocessing"].HasField("dynamic_batching")  # one instance needs no order kept


def test_the_ensemble_reaches_every_input_and_output(configs: dict[str, Any]) -> None:
    ensemble = configs["ensemble"]
    steps = ensemble.ensemble_scheduling.step
    assert [one.model_name for one in steps] == ["preprocessing", "tensorrt_llm", "postprocessing"]
    kinds = {one.name: one.data_type for one in ensemble.input}
    used, made = set(), set(kinds)
    for step in steps:
        config = configs[step.model_name]
        inputs = {one.name: one for one in config.input}
        outputs = {one.name: one.data_type for one in config.output}
        for name, source in step.input_map.items():
            used.add(source)
            assert kinds[source] == inputs[name].data_type, (step.model_name, name)
        assert all(name in step.input_map for name, one in inputs.items() if not one.optional)
        for name, sink in step.output_map.items():
            assert sink not in made
            made.add(sink)
            kinds[sink] = outputs[name]
    assert {one.name for one in ensemble.input} <= used
    assert {one.name: one.data_type for one in ensemble.output}.items() <= kinds.items()
    tokens = {"output_ids", "sequence_length", "context_phase_params", "prefix_ids", "is_final"}
    own = {one.name for one in configs["tensorrt_llm"].output} - tokens
    assert {one.name for one in ensemble.output} == own | {"text_output"}


def test_parameters_of_the_template_are_those_of_the_table() -> None:
    left_out = {
        "worker_path",
        "EXECUTION_ENV_PATH",
        "max_num_sequences",
        "enable_block_reuse",
        "max_queue_size",
    }
    table = {row.key: row.variable for row in PARAMETERS if row.key not in left_out}
    assert parameter_variables("tensorrt_llm") == table


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_comes_back_from_between_quotes(text: str) -> None:
    parsed = text_format.Parse(f'name: "{quoted(text)}"', model_config_pb2.ModelConfig())
    assert parsed.name == text


def test_a_value_that_looks_like_a_variable_is_refused(engine_dir: Path) -> None:
    plan = make_plan(engine_dir, Path("/repo"), Overrides(parameters={("preprocessing", "mine"): "${x}"}))
    with pytest.raises(InvalidArgumentError, match=r"mine of preprocessing is '\${x}'"):
        fill("preprocessing", plan.variables["preprocessing"], plan.extra["preprocessing"])
