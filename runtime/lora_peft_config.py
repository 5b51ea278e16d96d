"""adapter_config.json of PEFT: the rank and the scale of each module, and what is refused.

Fields are added with every version of PEFT, most of them switches that change what the weights mean. So a field that
is not known here is fine while it is off (null, false, empty), and an error when it is on.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .json_file import read_json_object

_MERGE = "merge it into the model with peft's merge_and_unload() and build an engine of the result"
_NUMBERS = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
_REFUSED = {
    "use_dora": "is DoRA, whose magnitudes are not applied",
    "modules_to_save": "trained whole layers besides",
    "lora_bias": "trained biases besides",
    "trainable_token_indices": "trained embeddings of tokens",
    "layer_replication": "repeats layers of its base model",
    "target_parameters": "changes parameters that are no linear layers (experts)",
    "alora_invocation_tokens": "is an activated LoRA, which begins at certain tokens",
    "use_qalora": "is QA-LoRA, which pools the inputs",
    "arrow_config": "is a router over several adapters",
}
# Of no consequence once the weights are there: where they came from, how they were trained and chosen.
_IGNORED = {
    "peft_type", "task_type", "base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version",
    "lora_dropout", "fan_in_fan_out", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "megatron_config", "megatron_core", "runtime_config", "loftq_config", "eva_config", "corda_config",
    "qalora_group_size", "init_lora_weights", "bias", "ensure_weight_tying",
}  # fmt: skip
# Ways to begin that leave the base model as it is; PiSSA, OLoRA, LoftQ, CorDA and LoRA-GA replace its weights.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclasses.dataclass(frozen=True)
class PeftConfig:
    """What the weights mean. Patterns are regular expressions for the last parts of a module's name; the first wins."""

    r: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def rank(self, module: str) -> int:
        """Return the rank of a module, named as in transformers ("model.layers.0.self_attn.q_proj")."""
        return int(self._match(self.rank_pattern, module, self.r))

    def scale(self, module: str, rank: int) -> float:
        """Return the factor on B A: alpha / rank, or alpha / sqrt(rank) of rank-stabilized LoRA."""
        alpha = self._match(self.alpha_pattern, module, self.alpha)
        return float(alpha) / (math.sqrt(rank) if self.use_rslora else rank)

    def _match(self, patterns: Mapping[str, Any], module: str, default: Any) -> Any:
        for pattern, value in patterns.items():
            if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module):
                return value
        return default


def read_config(path: Path) -> PeftConfig:
    """Return the checked content of adapter_config.json; CheckpointError says what of it is not supported."""
    fields = read_json_object(path, "give the directory that peft's save_pretrained() wrote")
    where = str(path)
    if str(fields.get("peft_type", "")).upper() != "LORA":
        raise CheckpointError(
            f"{where}: peft_type is {fields.get('peft_type')!r}, only 'LORA' is applied; {_MERGE}"
        )
    _refuse_variants(fields, where)
    rank = fields.get("r")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise CheckpointError(f"{where}: r is {rank!r}, wanted a rank of at least 1; save the adapter again")
    alpha = _number(fields.get("lora_alpha", 8), "lora_alpha", where)
    rslora = fields.get("use_rslora") or False
    if not isinstance(rslora, bool):
        raise CheckpointError(f"{where}: use_rslora is {rslora!r}, wanted true or false")
    ranks, alphas = _pattern(fields, "rank_pattern", where), _pattern(fields, "alpha_pattern", where)
    if any(value != int(value) or value < 1 for value in ranks.values()):
        raise CheckpointError(f"{where}: rank_pattern is {ranks!r}, wanted ranks of at least 1")
    return PeftConfig(rank, alpha, rslora, {k: int(v) for k, v in ranks.items()}, alphas)


def _refuse_variants(fields: Mapping[str, Any], where: str) -> None:
    for name, what in _REFUSED.items():
        if fields.get(name):
            raise CheckpointError(f"{where}: {what} ({name} is {fields[name]!r}); {_MERGE}")
    if fields.get("bias", "none") not in ("none", None):
        raise CheckpointError(f"{where}: bias is {fields['bias']!r}, only 'none' is applied; {_MERGE}")
    start = fields.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise CheckpointError(
            f"{where}: init_lora_weights is {start!r}, which replaces the base model's weights when training begins; "
            "save it with path_initial_model_for_weight_conversion, which makes a plain LoRA of it"
        )
    known = _NUMBERS | _REFUSED.keys() | _IGNORED
    for name, value in fields.items():
        if name not in known and value not in (None, False, 0, "", [], {}):
            raise CheckpointError(
                f"{where}: has {name} = {value!r}, which this plansmith does not know and which may change what the "
                f"weights mean; remove it if it does not, or {_MERGE}"
            )


def _number(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"{where}: {name} is {value!r}, wanted a number; save the adapter again")
    return float(value)


def _pattern(fields: Mapping[str, Any], name: str, where: str) -> dict[str, float]:
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: {name} is {value!r}, wanted an object of patterns and numbers")
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointError(
                f"{where}: {name} has {pattern!r}, no regular expression ({error})"
            ) from None
    return {pattern: _number(number, f"{name}[{pattern!r}]", where) for pattern, number in value.items()}
