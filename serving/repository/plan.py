"""What a repository is made of before it is written: names, values of variables, parameters."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from pathlib import Path

from ...runtime.errors import InvalidArgumentError, UnsupportedError
from ...runtime.manifest import Manifest, load_manifest
from ..triton.parameters import PARAMETERS, parameter, read_value
from .template import MODELS, parameter_variables

# Variables that are no parameters, with what they are unless said otherwise; max_batch_size is the engine's.
_COMMON = {
    "triton_backend": "python",
    "decoupled_mode": "true",
    "max_queue_delay_microseconds": "0",
    "max_queue_size": "0",
    "timeout_action": "REJECT",
    "default_timeout_microseconds": "0",
    "allow_timeout_override": "false",
    "logits_datatype": "TYPE_FP32",
    "prompt_embedding_table_data_type": "TYPE_FP16",
    "encoder_input_features_data_type": "TYPE_FP16",
    "preprocessing_instance_count": "1",
    "postprocessing_instance_count": "1",
    "bls_instance_count": "1",
}
_NAME_VARIABLES = {
    "tensorrt_llm": "tensorrt_llm_model_name",
    "ensemble": "ensemble_model_name",
    "tensorrt_llm_bls": "bls_model_name",
}
_SWITCHES = {"add_special_tokens": "true", "skip_special_tokens": "true", "accumulate_tokens": "false"}
ALIASES = {"enable_block_reuse": "enable_kv_cache_reuse", "max_num_sequences": "max_num_seqs"}
"""Other names of parameters of tensorrt_llm; the templates have one of each."""
_FOLLOWS_ENGINE = ("gpt_model_path", "tensorrt_llm_model_name")  # not to be set by hand


@dataclasses.dataclass
class Overrides:
    """What differs from the defaults.

    variables : of the templates, by name; those of _COMMON and triton_max_batch_size
    parameters : (model, key) -> text
    names : model -> the name of its directory; for tensorrt_llm, ensemble and tensorrt_llm_bls
    """

    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    parameters: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    names: dict[str, str] = dataclasses.field(default_factory=dict)

    def over(self, other: Overrides) -> Overrides:
        """Return both, these where both say something."""
        return Overrides(
            {**other.variables, **self.variables},
            {**other.parameters, **self.parameters},
            {**other.names, **self.names},
        )


@dataclasses.dataclass(frozen=True)
class RepositoryPlan:
    """What is written.

    engine_dir : absolute
    names : model -> its directory
    variables : model -> all variables of its template
    extra : model -> parameters that its template does not have
    """

    engine_dir: Path
    names: Mapping[str, str]
    variables: Mapping[str, Mapping[str, str]]
    extra: Mapping[str, Mapping[str, str]]

    def parameters(self, model: str) -> dict[str, str]:
        """Return all parameters of a model as they will be written."""
        variables = self.variables[model]
        own = {key: variables[name] for key, name in parameter_variables(model).items()}
        return {**own, **self.extra[model]}


def make_plan(
    engine_dir: Path,
    out_dir: Path,
    overrides: Overrides,
    *,
    tokenizer_dir: Path | None = None,
    relative: bool = False,
) -> RepositoryPlan:
    """Return the plan of a repository for an engine.

    out_dir : where the repository will be; relative paths start there
    tokenizer_dir : instead of the engine's own
    relative : write paths relative to the repository, so that both can be moved together
    raises EngineFileError for a directory that is no engine, InvalidArgumentError for values that cannot be,
        UnsupportedError for an engine without a tokenizer when none is given
    """
    manifest = load_manifest(engine_dir)
    engine = _written(engine_dir, out_dir, relative)
    tokenizer = _tokenizer(manifest, tokenizer_dir, overrides)
    names = {model: overrides.names.get(model, model) for model in MODELS}
    common = {**_COMMON, "triton_max_batch_size": str(manifest.limits.max_batch_size), **overrides.variables}
    common.update({variable: names[model] for model, variable in _NAME_VARIABLES.items()})
    common["postprocessing_batching"] = _keeping_order(common["postprocessing_instance_count"])
    defaults = {
        "gpt_model_path": engine,
        "tokenizer_dir": _written(tokenizer, out_dir, relative),
        "tensorrt_llm_model_name": names["tensorrt_llm"],
        **_SWITCHES,
    }
    variables: dict[str, dict[str, str]] = {}
    extra: dict[str, dict[str, str]] = {}
    for model in MODELS:
        own = {key: text for (of, key), text in overrides.parameters.items() if of == model}
        if model == "tensorrt_llm_bls":
            own = {**_of_text_models(overrides), **own}
        known = parameter_variables(model)
        start = {**common}
        for key, variable in known.items():
            start[variable] = own.get(key, defaults.get(key, _default(model, key)))
        variables[model] = start
        extra[model] = {key: text for key, text in own.items() if key not in known and text}
    return RepositoryPlan(Path(os.path.abspath(engine_dir)), names, variables, extra)  # noqa: PTH100


def tokenizer_in(folder: Path) -> Path | None:
    """Return the folder that has tokenizer.json: this one, or an engine directory's tokenizer/."""
    both = (folder, folder / "tokenizer")
    return next((one for one in both if (one / "tokenizer.json").is_file()), None)


def _of_text_models(overrides: Overrides) -> dict[str, str]:
    """Return what the models of text were told about tokens, for the one that does their work itself."""
    keys = {
        "tokenizer_dir": "preprocessing",
        "add_special_tokens": "preprocessing",
        "skip_special_tokens": "postprocessing",
    }
    told = {key: overrides.parameters.get((model, key)) for key, model in keys.items()}
    return {key: text for key, text in told.items() if text is not None}


def _keeping_order(num_instances: str) -> str:
    return "" if num_instances.strip() == "1" else "dynamic_batching { preserve_ordering: true }"


def _default(model: str, key: str) -> str:
    return parameter(key).default if model == "tensorrt_llm" else ""


def _written(path: Path, out_dir: Path, relative: bool) -> str:
    """Return a path as it is written; symbolic links stay, so that what they lead to can be replaced."""
    absolute = os.path.abspath(path)  # noqa: PTH100
    return os.path.relpath(absolute, os.path.abspath(out_dir)) if relative else absolute  # noqa: PTH100


def _tokenizer(manifest: Manifest, given: Path | None, overrides: Overrides) -> Path:
    if given is not None:
        if (found := tokenizer_in(given)) is None:
            raise InvalidArgumentError(
                f"{given} has no tokenizer.json; give --tokenizer-dir a directory that has one"
            )
        return found
    own = manifest.root / "tokenizer"
    told = all(
        (model, "tokenizer_dir") in overrides.parameters for model in ("preprocessing", "postprocessing")
    )
    if not told and not (own / "tokenizer.json").is_file():
        raise UnsupportedError(
            f"{manifest.root} has no tokenizer, which preprocessing and postprocessing need; give one with "
            "--tokenizer-dir DIR"
        )
    return own


def read_assignments(texts: list[str]) -> dict[tuple[str, str], str]:
    """Return the parameters of --set MODEL.KEY=VALUE; without MODEL. it is tensorrt_llm's.

    raises InvalidArgumentError for what is no assignment, a key that tensorrt_llm does not have, a value it refuses
    """
    result = {}
    for text in texts:
        left, equals, value = text.partition("=")
        model, dot, key = left.strip().rpartition(".")
        model = model if dot else "tensorrt_llm"
        if not equals or not key or model not in MODELS:
            raise InvalidArgumentError(
                f"--set {text!r} is no MODEL.KEY=VALUE; the models are {', '.join(MODELS)}, and a KEY alone is of "
                "tensorrt_llm"
            )
        check_parameter(model, key, value)
        if (model, key) == ("tensorrt_llm", "tokenizer_dir"):
            raise InvalidArgumentError(
                f"--set {text!r}: the engine has its own tokenizer; for the models of text give --tokenizer-dir"
            )
        if key in _FOLLOWS_ENGINE:
            raise InvalidArgumentError(
                f"--set {text!r}: {key} follows from ENGINE_DIR and the names of the models; leave it out"
            )
        result[model, ALIASES.get(key, key) if model == "tensorrt_llm" else key] = value
    return result


def check_parameter(model: str, key: str, value: str) -> None:
    """Refuse a parameter that a model does not take, naming the nearest one; models of text take others' keys too."""
    if model == "tensorrt_llm":
        read_value(parameter(key), value)
        return
    known = parameter_variables(model)
    if key in known or not key:
        if key in _SWITCHES and value.strip().lower() not in ("true", "false", "1", "0", ""):
            raise InvalidArgumentError(f"{key} of {model} is {value!r}, it must be true or false")
        return
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    if near:
        said = key if key.isidentifier() else repr(key)
        raise InvalidArgumentError(f"{said} is no parameter of {model}; did you mean {near[0]}?")


def all_parameters() -> list[dict[str, str]]:
    """Return the table of tensorrt_llm's parameters for people: key, default, becomes, meaning."""
    return [
        {"key": one.key, "default": one.default, "becomes": one.becomes, "meaning": one.meaning}
        for one in PARAMETERS
    ]
