"""config.json as checked fields: each is read once with its type, and none may be left over.

A field that is silently ignored is a model that silently computes something else, so `finish` refuses what no
family asked for and no list below calls harmless.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...runtime.errors import CheckpointError

# Fields that do not change what a decoder computes, by reason.
_HARMLESS_GROUPS: dict[str, str] = {
    "bookkeeping": """architectures model_type torch_dtype dtype transformers_version _name_or_path name_or_path
        _commit_hash tokenizer_class task_specific_params finetuning_task language license unsloth_version
        unsloth_fixed unsloth_tokenizer_class transformers.js_config is_llama_config""",
    "training only": """initializer_range attention_dropout hidden_dropout dropout resid_pdrop embd_pdrop
        classifier_dropout attention_probs_dropout_prob hidden_dropout_prob gradient_checkpointing""",
    "how another runtime runs it": """use_cache attn_implementation _attn_implementation
        _attn_implementation_autoset _attn_implementation_internal _experts_implementation_internal
        _flash_attn_2_enabled output_attentions output_hidden_states return_dict return_dict_in_generate
        output_scores torchscript use_bfloat16 tf_legacy_loss cache_implementation tie_last_hidden_states""",
    "generation defaults, which transformers too takes from generation_config.json only": """max_length
        max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature
        top_k top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size bad_words_ids
        encoder_no_repeat_ngram_size num_return_sequences forced_bos_token_id forced_eos_token_id
        remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
        epsilon_cutoff eta_cutoff encoder_repetition_penalty num_assistant_tokens
        num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind target_lookbehind""",
    "of heads and tokens a causal decoder does not have": """id2label label2id num_labels problem_type
        sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id prefix is_decoder
        sep_token cls_token mask_token unk_token bos_token eos_token pad_token""",
}
HARMLESS: frozenset[str] = frozenset(name for group in _HARMLESS_GROUPS.values() for name in group.split())

# Fields that are harmless at these values and at no other.
_HARMLESS_AT: dict[str, tuple[object, ...]] = {
    "pretraining_tp": (1, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False, None),
    "chunk_size_feed_forward": (0, None),
    "pruned_heads": ({}, None),
    "per_layer_config": ({}, None),
    "use_mrope": (False, None),
    "rope_interleaved": (False, None),
    "use_bidirectional_attention": (False, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "lm_head_bias": (False, None),
    "interpolate_factor": (1, None),
    "full_attn_mod": (1, None),
    "quantization_config": (None,),
    "auto_map": ({}, None),
}


# The deepest models that are published have 126 layers; a graph's size and the time to make it grow with them.
MAX_LAYERS = 1000

_FLOAT32_MAX = (2 - 2**-23) * 2**127


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether a JSON value is a finite number in float32, in which plans hold it."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 1 << 63
    return isinstance(value, float) and abs(value) <= _FLOAT32_MAX


class Config:
    """The fields of one config.json, with the family's defaults for those that are missing.

    data : the parsed JSON object
    where : what to call it in an error, e.g. the file's path
    defaults : what transformers' config class takes for a field that is absent
    """

    def __init__(self, data: Mapping[str, Any], where: str, defaults: Mapping[str, Any]) -> None:
        self.where = where
        self._data = data
        self._defaults = defaults
        self._used: set[str] = set()

    def error(self, text: str) -> CheckpointError:
        """Return the error with the file named in front."""
        return CheckpointError(f"{self.where}: {text}")

    def has(self, name: str) -> bool:
        """Return whether the file itself sets the field (a null counts)."""
        return name in self._data

    def raw(self, name: str) -> Any:
        """Return the field unchecked, or the family's default, or None."""
        self._used.add(name)
        return self._data[name] if name in self._data else self._defaults.get(name)

    def replaced(self, name: str, value: object) -> Config:
        """Return the same fields with one of them changed; what the copy reads counts as read here."""
        copy = Config({**self._data, name: value}, self.where, self._defaults)
        copy._used = self._used
        return copy

    def _wanted(self, name: str, value: object, wanted: str) -> CheckpointError:
        got = "is missing" if value is None and name not in self._data else f"is {_short(value)}"
        return self.error(
            f"{name!r} {got}, it must be {wanted}; the file is damaged or of another kind of model"
        )

    def integer(self, name: str, low: int = 1, high: int = 1 << 31) -> int:
        """Return an integer field between low and high."""
        value = self.raw(name)
        if not _is_int(value) or not low <= value < high:
            raise self._wanted(name, value, f"an integer from {low} to {high - 1}")
        return int(value)

    def num_layers(self) -> int:
        """Return num_hidden_layers."""
        return self.integer("num_hidden_layers", high=MAX_LAYERS + 1)

    def optional_integer(self, name: str, low: int = 1, high: int = 1 << 31) -> int | None:
        """Return an integer field, or None where it is null or absent without a default."""
        return None if self.raw(name) is None else self.integer(name, low, high)

    def number(self, name: str, low: float = 0.0) -> float:
        """Return a finite number greater than low."""
        value = self.raw(name)
        if not is_number(value) or not value > low:
            raise self._wanted(name, value, f"a number greater than {low}")
        return float(value)

    def optional_number(self, name: str, low: float = 0.0) -> float | None:
        """Return a finite number greater than low, or None where it is null or absent without a default."""
        return None if self.raw(name) is None else self.number(name, low)

    def boolean(self, name: str) -> bool:
        """Return a true or false field."""
        value = self.raw(name)
        if not isinstance(value, bool):
            raise self._wanted(name, value, "true or false")
        return value

    def choice(self, name: str, choices: Mapping[str, str]) -> str:
        """Return choices[value of the field]; the error lists what is supported."""
        value = self.raw(name)
        if not isinstance(value, str) or value not in choices:
            raise self.error(
                f"{name!r} is {_short(value)}, which is not supported here; supported: {', '.join(choices)}; "
                "this checkpoint cannot be compiled"
            )
        return choices[value]

    def ids(self, name: str) -> tuple[int, ...]:
        """Return token ids from an integer, a list of integers or null."""
        value = self.raw(name)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(_is_int(item) and item >= 0 for item in values):
            raise self._wanted(name, value, "a token id, a list of them, or null")
        return tuple(values)

    def use(self, *names: str) -> None:
        """Mark fields as dealt with elsewhere."""
        self._used.update(names)

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Refuse every field that nobody read and no list calls harmless."""
        harmless = HARMLESS | set(harmless)
        unknown = []
        for name in sorted(set(self._data) - self._used - harmless):
            value = self._data[name]
            if name not in _HARMLESS_AT:
                unknown.append(f"{name!r} = {_short(value)}")
            elif not any(value == fine and type(value) is type(fine) for fine in _HARMLESS_AT[name]):
                fine = " or ".join(repr(item) for item in _HARMLESS_AT[name])
                raise self.error(
                    f"{name!r} is {_short(value)}, only {fine} is supported; this checkpoint cannot be compiled"
                )
        if unknown:
            raise self.error(
                f"has fields that plansmith does not know for this model: {', '.join(unknown)}; a field that "
                "changes the model must not be ignored, so remove it if it has no effect, or report the model"
            )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
