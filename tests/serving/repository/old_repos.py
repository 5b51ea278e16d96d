"""Older repositories as tests need them: as they were shipped, or filled."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from plansmith.serving.triton.parameters import PARAMETERS

MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")
_OWN_FROM = [row.key for row in PARAMETERS].index("target")
_PARAMETERS = {
    "preprocessing": {"tokenizer_dir": "tokenizer_dir", "add_special_tokens": "add_special_tokens"},
    "postprocessing": {"tokenizer_dir": "tokenizer_dir", "skip_special_tokens": "skip_special_tokens"},
    "tensorrt_llm_bls": {
        "accumulate_tokens": "accumulate_tokens",
        "tensorrt_llm_model_name": "tensorrt_llm_model_name",
        "tensorrt_llm_draft_model_name": "tensorrt_llm_draft_model_name",
    },
    "tensorrt_llm": {
        row.key: row.variable
        for row in PARAMETERS[:_OWN_FROM]
        if row.key not in ("worker_path", "EXECUTION_ENV_PATH", "max_num_sequences")
    },
    "ensemble": {},
}
_COUNTS = {
    "preprocessing": "${preprocessing_instance_count}",
    "postprocessing": "${postprocessing_instance_count}",
    "tensorrt_llm_bls": "${bls_instance_count}",
    "tensorrt_llm": "1",
}
FILLED = {
    "triton_backend": "tensorrtllm",
    "triton_max_batch_size": "8",
    "decoupled_mode": "True",
    "max_queue_delay_microseconds": "100",
    "max_queue_size": "17",
    "logits_datatype": "TYPE_FP16",
    "prompt_embedding_table_data_type": "TYPE_FP16",
    "encoder_input_features_data_type": "TYPE_FP16",
    "preprocessing_instance_count": "2",
    "postprocessing_instance_count": "3",
    "bls_instance_count": "4",
    "batching_strategy": "inflight_fused_batching",
    "engine_dir": "/models/engines/llama/1-gpu",
    "tokenizer_dir": "/models/hf/llama",
    "max_beam_width": "1",
    "max_tokens_in_paged_kv_cache": "2560",
    "kv_cache_free_gpu_mem_fraction": "0.85",
    "enable_kv_cache_reuse": "False",
    "batch_scheduler_policy": "max_utilization",
    "exclude_input_in_output": "True",
    "skip_special_tokens": "True",
    "add_special_tokens": "False",
    "accumulate_tokens": "false",
    "tensorrt_llm_model_name": "tensorrt_llm",
    "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
}


def tensors() -> Iterator[tuple[str, str, str, str, str, str]]:
    """Give model, kind, name, type, dims and flags of every tensor."""
    model = ""
    for line in (Path(__file__).parent / "tensors.txt").read_text().splitlines():
        if line.startswith("["):
            model = line.strip("[]")
        elif line and not line.startswith("#"):
            kind, name, type_, dims, flags = [*line.split(" "), ""][:5]
            yield model, kind, name, type_, dims, flags


def config_text(model: str) -> str:
    """Return a config.pbtxt as it was shipped: several lines a tensor, comments, variables."""
    templated = "${prompt_embedding_table_data_type}"  # in later copies; in earlier ones FP16
    lines = [
        "# Copyright (c) the owners. ${not_a_variable} in a comment",
        "",
        f'name: "{model}"',
        'platform: "ensemble"' if model == "ensemble" else f'backend: "{_backend(model)}"',
        "max_batch_size: ${triton_max_batch_size}",
    ]
    if model in ("tensorrt_llm", "tensorrt_llm_bls"):
        lines += ["", "model_transaction_policy {", "  decoupled: ${decoupled_mode}", "}"]
    if model == "tensorrt_llm":
        lines += [
            "dynamic_batching {",
            "    preferred_batch_size: [ ${triton_max_batch_size} ]",
            "    max_queue_delay_microseconds: ${max_queue_delay_microseconds}",
            "    default_queue_policy: { max_queue_size: ${max_queue_size} }",
            "}",
        ]
    for kind in ("input", "output"):
        blocks = [
            _tensor(name, templated if name == "prompt_embedding_table" else type_, dims, flags)
            for of, is_, name, type_, dims, flags in tensors()
            if (of, is_) == (model, kind)
        ]
        lines += [f"{kind} [", ",\n".join(blocks), "]"]
    if model in _COUNTS:
        count = _COUNTS[model]
        lines += ["instance_group [", "  {", f"    count: {count}", "    kind : KIND_CPU", "  }", "]"]
    for key, variable in _PARAMETERS[model].items():
        value = f'string_value: "${{{variable}}}"'
        lines += ["parameters: {", f'  key: "{key}"', "  value: {", f"    {value}", "  }", "}"]
    if model == "ensemble":
        lines.append(_STEPS)
    return "\n".join(lines) + "\n"


def write_old(folder: Path, filled: Mapping[str, str] | None = None, **changes: str) -> Path:
    """Write an older repository and return it.

    filled : values of its variables; None = as shipped
    changes : further ones; those of FILLED where only these are given
    """
    values = dict(FILLED if filled is None and changes else filled or {}) | changes
    for model in MODELS:
        target = folder / model
        (target / "1").mkdir(parents=True)
        (target / "1" / "model.py").write_text("# somebody's\n")
        (target / "config.pbtxt").write_text(fill(config_text(model), values))
    return folder


def fill(text: str, values: Mapping[str, str]) -> str:
    """Return a text with the variables that have values filled."""
    return re.sub(r"\$\{(\w+)\}", lambda one: values.get(one[1], one[0]), text)


def edit(repository: Path, model: str, old: str, new: str) -> Path:
    """Replace the first `old` in a model's configuration; returns the file."""
    path = repository / model / "config.pbtxt"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return path


def _backend(model: str) -> str:
    return "${triton_backend}" if model == "tensorrt_llm" else "python"


def _tensor(name: str, type_: str, dims: str, flags: str) -> str:
    kind = type_ if type_.startswith("$") else f"TYPE_{type_}"
    lines = [
        "  {",
        f'    name: "{name}"',
        f"    data_type: {kind}",
        f"    dims: [ {dims.replace(',', ', ')} ]",
    ]
    if "s" in flags:
        lines.append("    reshape: { shape: [ ] }")
    if "R" in flags:
        lines.append("    allow_ragged_batch: true")
    if "o" in flags:
        lines.append("    optional: true")
    return "\n".join([*lines, "  }"])


_STEPS = """ensemble_scheduling {
  step [
    { model_name: "preprocessing" model_version: -1
      input_map { key: "QUERY" value: "text_input" }
      output_map { key: "INPUT_ID" value: "_INPUT_ID" } },
    { model_name: "${tensorrt_llm_model_name}" model_version: -1
      input_map { key: "input_ids" value: "_INPUT_ID" }
      output_map { key: "output_ids" value: "_TOKENS_BATCH" } },
    { model_name: "postprocessing" model_version: -1
      input_map { key: "TOKENS_BATCH" value: "_TOKENS_BATCH" }
      output_map { key: "OUTPUT" value: "text_output" } }
  ]
}"""
