"""Reading the parameters of the model `tensorrt_llm` by the table in parameter_table.py."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...runtime.errors import InvalidArgumentError, UnsupportedError
from ...runtime.executors.options import CPU
from .parameter_table import ANY, DRAFT_HEADS, PARAMETERS, Parameter
from .settings import Settings

__all__ = [
    "PARAMETERS",
    "Parameter",
    "Settings",
    "in_repository",
    "is_silent",
    "parameter",
    "read_model_config",
    "read_parameters",
    "read_value",
]

_BY_KEY: Mapping[str, Parameter] = {one.key: one for one in PARAMETERS}
_PATHS = ("engine_dir", "draft", "lora_prefetch_dir")
# Values that are the engine's own default, so that an option of that value is not given.
_UNSET = {"max_batch_size": 0, "max_num_tokens": 0, "max_queue_size": 0, "kv_cache_bytes": 0}
_LOGITS = {"TYPE_FP32": "float32", "TYPE_FP16": "float16"}


def parameter(key: str) -> Parameter:
    """Return a key's row; InvalidArgumentError names the nearest key there is."""
    if key in _BY_KEY:
        return _BY_KEY[key]
    near = difflib.get_close_matches(key, _BY_KEY, n=1, cutoff=0.5)
    raise InvalidArgumentError(
        f"{key if key.isidentifier() else repr(key)} is no parameter of tensorrt_llm"
        + (f"; did you mean {near[0]}?" if near else "; remove it")
        + " (plansmith triton-repo --list-parameters shows all)"
    )


def in_repository(text: str, repository: Path | str | None) -> Path:
    """Return a path of a config.pbtxt; a relative one starts at the repository, the directory of the models.

    `..` is taken off by name, as it was put there, also where the repository is a symbolic link.
    """
    return Path(text if repository is None else os.path.normpath(Path(repository) / text))


def read_parameters(
    texts: Mapping[str, str], repository: Path | str | None = None
) -> tuple[Settings, list[str]]:
    """Return the settings that the parameters' texts ask for, and notes on those that have no effect.

    texts : by key; an empty text is as none
    repository : where relative paths start; None = the working directory
    raises InvalidArgumentError that names the key, its value and what is wanted: an unknown key, a bad value, a
        `${...}` that was not filled, two keys that contradict; UnsupportedError for what cannot be done here
    """
    found: dict[str, Any] = {}
    sources: dict[str, str] = {}
    notes: list[str] = []
    for key, text in texts.items():
        row = parameter(key)
        value = read_value(row, text)
        if value is None and not text.strip():
            continue
        if row.becomes == "refused" and not is_silent(row, text):
            raise UnsupportedError(f"{key} is {text!r}: {row.meaning}")
        if row.becomes == "ignored" and not is_silent(row, text):
            notes.append(f"{key} is {text!r} and has no effect: {row.meaning}")
        if row.of_gpu and texts.get("target", "").strip() in ("", CPU):
            if not is_silent(row, text):
                notes.append(
                    f"{key} is {text!r} and has no effect: the target is cpu, and it is of GPU targets"
                )
            continue
        if " " in row.becomes:
            _put(found, sources, row, value, text)
    return _settings(found, notes, repository), notes


def read_value(row: Parameter, text: str) -> Any:
    """Return a parameter's value, None for an empty text; InvalidArgumentError names key, value and what is wanted."""
    if "${" in text:
        raise InvalidArgumentError(
            f"{row.key} is {text!r}, a variable of the template that was not filled; give it a value, or make it "
            "empty for the default"
        )
    if not text.strip():
        return None
    try:
        return row.read(text.strip())
    except ValueError as error:
        raise InvalidArgumentError(f"{row.key} is {text!r}, it must be {error}") from None


def is_silent(row: Parameter, text: str) -> bool:
    """Return whether a value that is ignored or refused asks for nothing."""
    return ANY in row.silent or text.strip().lower() in row.silent


def _put(found: dict[str, Any], sources: dict[str, str], row: Parameter, value: Any, text: str) -> None:
    """Keep a value; two keys may say the same, not differ."""
    name = row.becomes
    if name.split()[1] in _UNSET and value == 0:
        return
    if name in found and found[name] != value:
        raise InvalidArgumentError(
            f"{row.key} is {text!r} and {sources[name]} says otherwise; they are one setting, leave one of them empty"
        )
    found[name], sources[name] = value, row.key


def _settings(found: Mapping[str, Any], notes: list[str], repository: Path | str | None) -> Settings:
    values: dict[str, dict[str, Any]] = {"setting": {}, "option": {}}
    for becomes, value in found.items():
        kind, name = becomes.split()
        values[kind][name] = in_repository(value, repository) if name in _PATHS else value
    settings = values["setting"]
    _apply_gpu_keys(settings)
    if "engine_dir" not in settings:
        raise InvalidArgumentError(
            "gpt_model_path is empty, it must be an engine directory; write the repository with: plansmith "
            "triton-repo ENGINE_DIR -o REPO"
        )
    _apply_decoding_mode(settings, notes)
    return Settings(**settings, options=values["option"])


def _apply_gpu_keys(settings: dict[str, Any]) -> None:
    """Turn gpu_device_ids and cuda_graph_mode, which are no settings of their own, into device and cuda_graphs."""
    ids = settings.pop("gpu_device_ids", ())
    if len(ids) > 1:
        raise UnsupportedError(
            f"gpu_device_ids is {','.join(ids)!r}, and an engine runs on one GPU; name one, and start a server for "
            "each of the others"
        )
    for one in ids:
        if settings.setdefault("device", one) != one:
            raise InvalidArgumentError(
                f"gpu_device_ids is {one!r} and device says otherwise; they are one setting, leave one of them empty"
            )
    mode = settings.pop("cuda_graph_mode", None)
    graphs = settings.get("cuda_graphs", "auto")
    if mode is not None and graphs == ("off" if mode else "own"):
        raise InvalidArgumentError(
            f"cuda_graph_mode is {str(mode).lower()!r} and cuda_graphs is {graphs!r}; they are one setting, leave one "
            "of them empty"
        )
    if mode is False:
        settings["cuda_graphs"] = "off"


def _apply_decoding_mode(settings: dict[str, Any], notes: list[str]) -> None:
    """Turn decoding_mode, which is no setting of its own, into speculation."""
    mode = settings.pop("decoding_mode", "auto")
    if mode in DRAFT_HEADS:
        raise UnsupportedError(
            f"decoding_mode is {mode!r}: draft heads cannot be run; leave it empty, and take speculation ngram or a "
            "draft model (draft_engine_dir)"
        )
    if mode == "lookahead":
        if settings.get("speculation", "auto") not in ("auto", "ngram") or settings.get("draft"):
            raise InvalidArgumentError(
                "decoding_mode is 'lookahead', which is speculation ngram, and speculation or draft_engine_dir says "
                "otherwise; leave one of them empty"
            )
        settings["speculation"] = "ngram"
        notes.append(
            "decoding_mode is 'lookahead': speculation ngram takes its place; the tokens are the same"
        )
    elif mode != "auto":
        notes.append(f"decoding_mode is {mode!r} and has no effect: each request says how it samples")


def read_model_config(
    config: Mapping[str, Any], repository: Path | str | None = None
) -> tuple[Settings, list[str]]:
    """Return settings and notes from Triton's JSON of config.pbtxt, what is no parameter in it included.

    config : json.loads(args["model_config"])
    repository : Path(args["model_repository"]).parent: Triton gives the model's own directory
    raises as read_parameters
    """
    texts = {key: one.get("string_value", "") for key, one in config.get("parameters", {}).items()}
    settings, notes = read_parameters(texts, repository)
    options = dict(settings.options)
    policy = config.get("dynamic_batching", {}).get("default_queue_policy", {})
    if queue := int(policy.get("max_queue_size", 0)):
        options.setdefault("max_queue_size", queue)
    made = dataclasses.replace(
        settings,
        options=options,
        logits_dtype=_logits_dtype(config),
        is_decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
        max_batch_size=int(config.get("max_batch_size", 0)),
    )
    return made, notes


def _logits_dtype(config: Mapping[str, Any]) -> str:
    kinds = {
        one["name"]: one.get("data_type", "")
        for one in (*config.get("input", ()), *config.get("output", ()))
        if one.get("name") in ("draft_logits", "context_logits", "generation_logits")
    }
    if len(set(kinds.values())) > 1 or not set(kinds.values()) <= _LOGITS.keys():
        said = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
        raise InvalidArgumentError(
            f"the logits of config.pbtxt have the types {said}; give all of them TYPE_FP32, or all TYPE_FP16"
        )
    return _LOGITS[next(iter(kinds.values()), "TYPE_FP32")]
