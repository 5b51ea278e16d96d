"""Which linear layers a checkpoint has, under the checkpoint's own names, and which of them are quantized."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence

from ..builder.checkpoint.families import FAMILIES
from ..builder.spec import DecoderSpec, weight_shapes
from ..runtime.errors import InvalidArgumentError

LM_HEAD = "lm_head"

# Canonical last names of layers that read one input.
_SHARED_INPUT = (("q", "k", "v"), ("gate", "up"))


@dataclasses.dataclass(frozen=True)
class Layer:
    """A linear layer.

    name : of the module, in the checkpoint and in transformers, e.g. "model.layers.0.self_attn.q_proj"
    group : which layers read the same input as this one, e.g. "layers.0.q"
    """

    name: str
    out_features: int
    in_features: int
    group: str


def linear_layers(spec: DecoderSpec) -> list[Layer]:
    """Return all linear layers in the order of the model, lm_head last, also where it shares the embedding's table."""
    found: dict[str, Layer] = {}
    parts = FAMILIES[spec.family].parts(spec)
    for name, shape in weight_shapes(spec).items():
        if len(shape) != 2 or name in ("embed.weight", "lm_head.weight"):
            continue
        part = parts[name]
        rows = part.total_rows if part.rows is not None else shape[0]
        module = part.name.removesuffix(".weight")
        found.setdefault(module, Layer(module, rows, shape[1], _group(name)))
    found[LM_HEAD] = Layer(LM_HEAD, spec.vocab_size, spec.hidden_size, LM_HEAD)
    return list(found.values())


def _group(name: str) -> str:
    *prefix, module, _ = name.split(".")
    first = next((names[0] for names in _SHARED_INPUT if module in names), module)
    return ".".join([*prefix, first])


def choose_layers(layers: Sequence[Layer], exclude: Sequence[str], quantize_lm_head: bool) -> list[Layer]:
    """Return the layers to quantize.

    exclude : patterns as of file names, matched with the whole name or any run of its parts: "lm_head", "*down_proj",
        "model.layers.0.*", "layers.0"
    raises InvalidArgumentError for a pattern that matches nothing, and when nothing is left
    """
    excluded: set[str] = set() if quantize_lm_head else {LM_HEAD}
    for pattern in exclude:
        matched = {one.name for one in layers if _matches(one.name, pattern)}
        if not matched:
            names = f"{layers[0].name}, ..., {layers[-1].name}"
            raise InvalidArgumentError(
                f"--exclude {pattern!r} matches no layer; the layers are {names}, patterns are as of file names, "
                "e.g. '*down_proj' or 'model.layers.0.*'"
            )
        if quantize_lm_head and LM_HEAD in matched:
            raise InvalidArgumentError(
                f"--exclude {pattern!r} leaves out lm_head and --quantize-lm-head takes it in; give one of them"
            )
        excluded |= matched
    chosen = [one for one in layers if one.name not in excluded]
    if not chosen:
        raise InvalidArgumentError("--exclude leaves no layer to quantize; exclude fewer")
    return chosen


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(f".{name}.", f"*.{pattern}.*")


def check_groups(layers: Sequence[Layer], chosen: Sequence[Layer], recipe: str) -> None:
    """Check that layers with one input are all quantized or none.

    AWQ puts its factors into the norm before them, where the others would see them too.
    raises InvalidArgumentError naming the layers
    """
    names = {one.name for one in chosen}
    groups = {one.group for one in chosen}
    left = [one.name for one in layers if one.group in groups and one.name not in names]
    if left:
        shown = ", ".join(left[:3]) + (" and more" if len(left) > 3 else "")
        raise InvalidArgumentError(
            f"--exclude leaves out {shown}, but not the layers that read the same input, which --recipe {recipe} "
            "scales; exclude all of them (q, k and v; gate and up)"
        )
