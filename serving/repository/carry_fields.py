"""What becomes of the fields of an older config.pbtxt that are no parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ...runtime.errors import InvalidArgumentError
from .carry_rows import Carried
from .model_config import ModelConfig
from .old_repository import OldRepository
from .template import read_template

INSTANCE_COUNTS = {
    "preprocessing": "preprocessing_instance_count",
    "postprocessing": "postprocessing_instance_count",
    "tensorrt_llm_bls": "bls_instance_count",
}
# Types that a repository chooses: variable -> (a tensor that has it, of tensorrt_llm)
_TYPES = {
    "logits_datatype": ("context_logits", "generation_logits", "draft_logits"),
    "prompt_embedding_table_data_type": ("prompt_embedding_table",),
    "encoder_input_features_data_type": ("encoder_input_features",),
}
_OPEN = ("tensorrt_llm", "ensemble", "tensorrt_llm_bls")  # clients call these
# What postprocessing once took and gave back as it was; the ensemble has it from tensorrt_llm.
_HANDED_ON = {
    ("postprocessing", prefix + name)
    for name in ("CUM_LOG_PROBS", "OUTPUT_LOG_PROBS", "CONTEXT_LOGITS", "GENERATION_LOGITS", "BATCH_INDEX")
    for prefix in ("", "OUT_")
}
_READ = {
    "name", "platform", "backend", "max_batch_size", "input", "output", "instance_group", "parameters",
    "dynamic_batching", "model_transaction_policy", "ensemble_scheduling",
}  # fmt: skip


def carry_batching(carried: Carried, old: OldRepository) -> None:
    """Take over sizes, queue policy and types of tensorrt_llm."""
    config = old.configs["tensorrt_llm"]
    message, variables = config.message, carried.overrides.variables
    if "max_batch_size" in config.unfilled:
        carried.unfilled.append("tensorrt_llm.max_batch_size")
    else:
        _carry_batch_size(carried, old)
    if "decoupled" in config.unfilled:
        carried.unfilled.append("tensorrt_llm.decoupled")
    else:
        value = "true" if message.model_transaction_policy.decoupled else "false"
        variables["decoupled_mode"] = value
        carried.add("tensorrt_llm", "decoupled", value, value, "carried")
    _carry_queue(carried, config)
    _carry_types(carried, config)
    backend = message.backend
    if backend and "${" not in backend and backend != "python":
        carried.add(
            "tensorrt_llm", "backend", backend, "python", "changed", "the engine runs in the Python backend"
        )


def _carry_batch_size(carried: Carried, old: OldRepository) -> None:
    """Take over tensorrt_llm's max_batch_size for all models."""
    size = max(1, old.configs["tensorrt_llm"].message.max_batch_size)
    carried.overrides.variables["triton_max_batch_size"] = str(size)
    for model, one in old.configs.items():
        was = one.message.max_batch_size
        why = (
            "all models take the same requests"
            if was
            else "Triton does not load these models without batches"
        )
        if was != size and "max_batch_size" not in one.unfilled:
            carried.add(model, "max_batch_size", was, size, "changed", why)
        elif model == "tensorrt_llm":
            carried.add(model, "max_batch_size", was, size, "carried")


def _carry_queue(carried: Carried, config: ModelConfig) -> None:
    batching = config.message.dynamic_batching
    policy = batching.default_queue_policy
    variables = carried.overrides.variables
    actions = policy.DESCRIPTOR.fields_by_name["timeout_action"].enum_type.values_by_number
    found = {
        "max_queue_delay_microseconds": (batching.max_queue_delay_microseconds, 0),
        "max_queue_size": (policy.max_queue_size, 0),
        "default_timeout_microseconds": (policy.default_timeout_microseconds, 0),
        "allow_timeout_override": (policy.allow_timeout_override, False),
        "timeout_action": (actions[policy.timeout_action].name, "REJECT"),
    }
    for name, (value, default) in found.items():
        if name in config.unfilled:
            carried.unfilled.append(f"tensorrt_llm.{name}")
        elif value != default:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            variables[name] = text
            carried.add("tensorrt_llm", name, text, text, "carried")
    _note_batching(carried, config)


def _note_batching(carried: Carried, config: ModelConfig) -> None:
    """Note what Triton's batcher was told of sizes and order, which are the engine's here."""
    batching = config.message.dynamic_batching
    preferred = list(batching.preferred_batch_size)
    size = config.message.max_batch_size
    if preferred and "preferred_batch_size" not in config.unfilled and preferred != [size]:
        carried.add(
            "tensorrt_llm",
            "preferred_batch_size",
            preferred,
            [size],
            "changed",
            "the engine forms batches itself",
        )
    for name in ("preserve_ordering", "priority_levels", "default_priority_level", "priority_queue_policy"):
        if getattr(batching, name):
            why = "the engine has its own order: the tensor priority of each request"
            carried.add("tensorrt_llm", name, _short(getattr(batching, name)), "", "not carried", why)


def _carry_types(carried: Carried, config: ModelConfig) -> None:
    kinds = {one.name: one.data_type for one in (*config.message.input, *config.message.output)}
    names = config.message.input[0].DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    for variable, tensors in _TYPES.items():
        said = {names[kinds[one]].name for one in tensors if kinds.get(one)}
        if len(said) > 1:
            raise InvalidArgumentError(
                f"{config.path} has {', '.join(sorted(said))} for {', '.join(tensors)}; give all of them the same type"
            )
        if not said and any(one in kinds for one in tensors):
            carried.unfilled.append(f"tensorrt_llm.{variable}")
        for text in said:
            _check_type(config, variable, tensors[0], text)
            carried.overrides.variables[variable] = text
            carried.add("tensorrt_llm", variable, text, text, "carried")


def _check_type(config: ModelConfig, variable: str, tensor: str, text: str) -> None:
    can_be = ["TYPE_FP32", "TYPE_FP16", *(["TYPE_BF16"] if variable != "logits_datatype" else [])]
    if text not in can_be:
        raise InvalidArgumentError(
            f"{config.path}: {tensor} is {text}, it must be {' or '.join(can_be)}; correct it"
        )


def carry_instances(carried: Carried, model: str, config: ModelConfig) -> None:
    """Take over how many instances a model of text has; the engine's has one, and all run on the CPU."""
    groups = list(config.message.instance_group)
    if groups and model != "ensemble":
        _carry_count(carried, model, config, sum(one.count or 1 for one in groups))
        _note_kinds(carried, model, groups)


def _carry_count(carried: Carried, model: str, config: ModelConfig, count: int) -> None:
    if "count" in config.unfilled:
        carried.unfilled.append(f"{model}.instance_group count")
    elif model == "tensorrt_llm":
        if count != 1:
            carried.add(
                model,
                "instance_group count",
                count,
                1,
                "changed",
                "one process hosts an engine; its batch is the parallelism",
            )
    else:
        carried.overrides.variables[INSTANCE_COUNTS[model]] = str(count)
        carried.add(model, "instance_group count", count, count, "carried")


def _note_kinds(carried: Carried, model: str, groups: Sequence[Any]) -> None:
    kinds = groups[0].DESCRIPTOR.fields_by_name["kind"].enum_type.values_by_number
    for one in groups:
        kind = kinds[one.kind].name
        if kind not in ("KIND_CPU", "KIND_AUTO") or one.gpus:
            carried.add(
                model,
                "instance_group kind",
                kind,
                "KIND_CPU",
                "changed",
                "tensors come and go in host memory",
            )


def note_tensors(carried: Carried, model: str, config: ModelConfig) -> None:
    """Note tensors that the new model does not have, or has in another type."""
    known = _types_of_tensors(model)
    for one in (*config.message.input, *config.message.output):
        kinds = one.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
        was = kinds[one.data_type].name
        now = known.get(one.name)
        if now is None and (model, one.name) not in _HANDED_ON:
            why = "the models here neither read nor make it"
            carried.add(model, f"tensor {one.name}", was, "", "not carried", why)
        elif now is not None and one.data_type and not now.startswith("$") and was != now and model in _OPEN:
            why = "as in later repositories; clients must send and expect it so"
            carried.add(model, f"tensor {one.name}", was, now, "changed", why)


def _types_of_tensors(model: str) -> dict[str, str]:
    """Return the tensors of a template: name -> type, or the variable in its place."""
    return dict(re.findall(r'^  \{ name: "(\w+)" data_type: (\S+)', read_template(model), re.M))


def note_rest(carried: Carried, model: str, config: ModelConfig) -> None:
    """Note fields that have no place here."""
    for field, value in config.message.ListFields():
        if field.name not in _READ:
            why = "no setting of this repository; add it to the new config.pbtxt if it is still wanted"
            carried.add(model, field.name, _short(value), "", "not carried", why)


def note_steps(carried: Carried, old: OldRepository) -> None:
    """Note steps of the ensemble beyond the usual three."""
    ensemble = old.configs.get("ensemble")
    usual = {
        old.configs[one].name
        for one in ("preprocessing", "tensorrt_llm", "postprocessing")
        if one in old.configs
    }
    for step in () if ensemble is None else ensemble.message.ensemble_scheduling.step:
        if step.model_name not in usual and "${" not in step.model_name:
            why = "the ensemble has three steps: preprocessing, tensorrt_llm, postprocessing"
            carried.add("ensemble", f"step {step.model_name}", "", "", "not carried", why)


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
