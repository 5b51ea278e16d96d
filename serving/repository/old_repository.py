"""Reading a model repository of TensorRT-LLM: which of its models does what."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from ...runtime.errors import InvalidArgumentError
from .model_config import ModelConfig, read_config
from .template import MODELS

# model -> (inputs that it has, outputs that it has); a model is known by its tensors where its name is its owner's.
_TENSORS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "preprocessing": (frozenset({"QUERY", "REQUEST_OUTPUT_LEN"}), frozenset({"INPUT_ID"})),
    "tensorrt_llm": (frozenset({"input_lengths", "request_output_len"}), frozenset({"output_ids"})),
    "postprocessing": (frozenset({"TOKENS_BATCH"}), frozenset({"OUTPUT"})),
    "ensemble": (frozenset({"text_input"}), frozenset({"text_output"})),
    "tensorrt_llm_bls": (frozenset({"text_input"}), frozenset({"text_output"})),
}


@dataclasses.dataclass(frozen=True)
class OldRepository:
    """An older repository.

    path : of it
    configs : model -> its configuration; tensorrt_llm is always there
    others : directories of models that are none of ours
    """

    path: Path
    configs: Mapping[str, ModelConfig]
    others: tuple[ModelConfig, ...]


def read_repository(path: Path) -> OldRepository:
    """Return a repository whose configurations can all be read.

    raises InvalidArgumentError: no directory, no tensorrt_llm in it, a file that is damaged
    """
    if not path.is_dir():
        raise InvalidArgumentError(f"{path} is no directory; give --from a Triton model repository")
    try:
        files = sorted(one for one in path.glob("*/config.pbtxt"))
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error.strerror}; check its rights") from error
    if not files:
        raise InvalidArgumentError(
            f"{path} has no MODEL/config.pbtxt; give --from the directory that holds the models' directories"
        )
    found = [read_config(one) for one in files]
    configs = _by_role(found)
    if "tensorrt_llm" not in configs:
        names = ", ".join(one.name for one in found)
        raise InvalidArgumentError(
            f"none of the models in {path} ({names}) is an inflight_batcher_llm engine, which takes "
            "request_output_len and gives output_ids; give --from a repository that has one"
        )
    taken = {one.path for one in configs.values()}
    return OldRepository(path, configs, tuple(one for one in found if one.path not in taken))


def _by_role(found: list[ModelConfig]) -> dict[str, ModelConfig]:
    """Return which model does what: by its usual name, else by its tensors, the ensemble's own engine first."""
    candidates = {model: [one for one in found if _does(one, model)] for model in MODELS}
    used = _called(found)
    result = {}
    for model, those in candidates.items():
        ranked = sorted(
            those,
            key=lambda one: (one.name != model, one.name not in used, "draft" in one.name, one.name),
        )
        if ranked:
            result[model] = ranked[0]
    return result


def _does(config: ModelConfig, model: str) -> bool:
    message = config.message
    inputs, outputs = _TENSORS[model]
    is_ensemble = message.platform == "ensemble" or message.HasField("ensemble_scheduling")
    return (
        inputs <= {one.name for one in message.input}
        and outputs <= {one.name for one in message.output}
        and is_ensemble == (model == "ensemble")
    )


def _called(found: list[ModelConfig]) -> set[str]:
    """Return the models that an ensemble's steps or a model of calls name."""
    steps = {step.model_name for one in found for step in one.message.ensemble_scheduling.step}
    return steps | {one.parameters().get("tensorrt_llm_model_name", "") for one in found}
