"""What becomes of one parameter of an older repository."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ...runtime.manifest import Manifest
from ..triton.parameters import Parameter, is_silent, parameter, read_value
from ..triton.settings import narrower_window
from .carry_rows import Row
from .plan import ALIASES, check_parameter, tokenizer_in

Outcome = tuple[Row | None, dict[str, str]]
"""The row of the report, None for a setting that asks for nothing; and the new parameters: key -> text."""

_TEXT_KEYS = {
    "tensorrt_llm_draft_model_name": "that model is not in the new repository; let the engine draft by itself: --set "
    "draft_engine_dir=DIR",
    "tokenizer_type": "the engine's tokenizer.json says what it is",
    "visual_model_path": "models with images cannot be run",
    "multimodal_model_path": "models with images cannot be run",
    "multimodal_encoders_name": "models with images cannot be run",
    "hf_model_path": "models with images cannot be run",
    "max_num_images": "models with images cannot be run",
    "gpt_model_type": "of an older preprocessing",
}


def carry_engine_parameter(key: str, old: str, text: str, manifest: Manifest) -> Outcome:
    """Return what becomes of a parameter of tensorrt_llm.

    text : its text, with the old engine's path replaced
    raises InvalidArgumentError for a key that it never had or a value that it refuses
    """
    row = parameter(key)
    value = read_value(row, text)
    if key == "gpt_model_path":
        return _engine_dir("tensorrt_llm", old, manifest), {}
    if value is None:
        return None, {}
    if row.becomes in ("ignored", "refused"):
        return (None if is_silent(row, text) else _dropped(key, old, row.meaning)), {}
    return _engine_setting(row, old, text, manifest)


def _engine_dir(model: str, old: str, manifest: Manifest) -> Row:
    new = os.path.abspath(manifest.root)  # noqa: PTH100
    if new == old:
        return Row(model, "gpt_model_path", old, new, "carried")
    return Row(model, "gpt_model_path", old, new, "changed", "the engine that the repository is for")


def _engine_setting(row: Parameter, old: str, text: str, manifest: Manifest) -> Outcome:
    """Return what becomes of a parameter that has an effect here."""
    key, value = row.key, read_value(row, text)
    if key == "decoding_mode":
        return _decoding_mode(old, str(value))
    if key == "gpu_device_ids" and len(value) > 1:
        return _dropped(
            key, old, "an engine runs on one GPU; say which: --set device=ID, a server for each"
        ), {}
    if key == "max_beam_width" and int(value) > (limit := manifest.limits.max_beam_width):
        why = f"the engine's limit; build it with --max-beam-width {value} for more"
        return _changed(key, old, str(limit), why), {key: str(limit)}
    if key == "max_attention_window_size" and (layer := narrower_window(value, manifest)) is not None:
        why = (
            f"layer {layer} would see fewer tokens than the model was made for; bound the memory with "
            "max_tokens_in_paged_kv_cache instead"
        )
        return _dropped(key, old, why), {}
    if key == "draft_engine_dir" or key == "lora_prefetch_dir":
        return _path(key, old, text)
    name = ALIASES.get(key, key)
    spelled = str(value) if row.becomes.endswith(("guided_backend", "scheduler_policy")) else text.strip()
    if spelled.lower() != text.strip().lower() or name != key:
        what = f"{name} is what it is called here" if name != key else row.meaning
        return _changed(key, old, spelled if name == key else f"{name} = {spelled}", what), {name: spelled}
    if text != old:
        return _changed(key, old, spelled, "it lay in the older engine's directory"), {name: spelled}
    return Row("tensorrt_llm", key, old, spelled, "carried"), {name: spelled}


def _decoding_mode(old: str, value: str) -> Outcome:
    if value == "auto":
        return None, {}
    if value == "lookahead":
        why = "proposals are looked up in prompt and output; the tokens are the same"
        return _changed("decoding_mode", old, "speculation = ngram", why), {"speculation": "ngram"}
    if value in ("medusa", "eagle", "redrafter", "explicit_draft_tokens"):
        why = "draft heads cannot be run; see speculation ngram, or draft_engine_dir"
        return _dropped("decoding_mode", old, why), {}
    return _dropped("decoding_mode", old, "each request says how it samples"), {}


def _path(key: str, old: str, text: str) -> Outcome:
    """Return what becomes of a path: a relative one was the server's working directory's, which is not known."""
    if not Path(text).is_absolute():
        why = f"a relative path started where the server did; give it with --set {key}=DIR"
        return _dropped(key, old, why), {}
    if text != old:
        return _changed(key, old, text, "it lay in the older engine's directory"), {key: text}
    return Row("tensorrt_llm", key, old, text, "carried"), {key: text}


def carry_text_parameter(
    model: str,
    key: str,
    old: str,
    text: str,
    manifest: Manifest,
    names: Mapping[str, str],
    keep_tokenizer: bool,
) -> Outcome:
    """Return what becomes of a parameter of another model; keys that it does not know go along, for its owner's code.

    names : of models that keep their own
    raises InvalidArgumentError for a key that is nearly one, or a value that is refused
    """
    if not text.strip():
        return None, {}
    if key in _TEXT_KEYS:
        return Row(model, key, old, "", "not carried", _TEXT_KEYS[key]), {}
    check_parameter(model, key, text)
    engine = os.path.abspath(manifest.root)  # noqa: PTH100
    if key == "gpt_model_path":
        return _engine_dir(model, old, manifest), {}
    if key == "tokenizer_dir":
        return _tokenizer(model, old, text, f"{engine}/tokenizer", keep_tokenizer)
    if key == "tensorrt_llm_model_name":
        return _engine_name(model, old, names.get("tensorrt_llm", "tensorrt_llm"))
    if text != old:
        return Row(model, key, old, text, "changed", "it lay in the older engine's directory"), {key: text}
    return Row(model, key, old, text, "carried"), {key: text}


def _tokenizer(model: str, old: str, text: str, own: str, keep: bool) -> Outcome:
    key = "tokenizer_dir"
    if not keep:
        return Row(model, key, old, "", "changed", "the command line says so"), {}
    if Path(text).is_absolute() and tokenizer_in(Path(text)) is not None:
        new = {} if text == own else {key: text}  # the engine's own is where it goes anyway
        if text == old:
            return Row(model, key, old, text, "carried"), new
        return Row(model, key, old, text, "changed", "it lay in the older engine's directory"), new
    return Row(model, key, old, own, "changed", "it has no tokenizer.json here; the engine's own does"), {}


def _engine_name(model: str, old: str, name: str) -> Outcome:
    key = "tensorrt_llm_model_name"
    if old == name:
        return Row(model, key, old, name, "carried"), {}
    return Row(model, key, old, name, "changed", "the name of the engine's model in this repository"), {}


def _dropped(key: str, old: str, why: str) -> Row:
    return Row("tensorrt_llm", key, old, "", "not carried", why)


def _changed(key: str, old: str, new: str, why: str) -> Row:
    return Row("tensorrt_llm", key, old, new, "changed", why)
