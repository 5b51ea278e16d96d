"""What `plansmith quantize` can be asked for, and every check of it that needs no work."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

from ..builder.checkpoint import Checkpoint, open_checkpoint
from ..builder.checkpoint.tokenizer_check import check_tokenizer_opens
from ..builder.checkpoint.trtllm.kinds import is_trtllm_checkpoint
from ..runtime.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from ..runtime.tokenizer import Tokenizer
from .dataset import SHIPPED, Samples, load_documents, make_samples, resolve_source
from .layers import Layer, check_groups, choose_layers, linear_layers
from .recipes import KV_CACHES, Recipe, check_layers, find_recipe

REPORT_NAME = "plansmith_quantize.json"
HELD_OUT = 4  # windows that SmoothQuant's search is judged by
DTYPES = ("auto", "float32", "float16", "bfloat16")
PACKAGES = ("torch", "transformers", "modelopt", "accelerate")


@dataclasses.dataclass(frozen=True)
class QuantizeOptions:
    """What to do; see `plansmith quantize --help`.

    smoothquant : int8_sq's alpha, 0..1; None = searched
    group_size : of int4 weights; None = the largest of 128, 64 and 32 that divides
    calib_data : None or "shipped" = the shipped set, else a file
    dtype : of what is not quantized; "auto" = the checkpoint's own
    auto_bits : mean bits of the weights of quantized layers; None = one recipe for all
    auto_recipes : what to choose from then
    """

    recipe: str = "fp8"
    kv_cache: str = "none"
    exclude: tuple[str, ...] = ()
    quantize_lm_head: bool = False
    group_size: int | None = None
    smoothquant: float | None = None
    calib_data: str | None = None
    calib_size: int = 64
    calib_length: int = 256
    batch_size: int = 8
    seed: int = 1234
    dtype: str = "auto"
    device: str = "cpu"
    auto_bits: float | None = None
    auto_recipes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class QuantizePlan:
    """A quantization with everything checked that needs no work.

    recipes : one, or those to choose from
    layers : what is quantized; left_out : the other linear layers
    samples : None where nothing is calibrated
    """

    path: Path
    checkpoint: Checkpoint
    options: QuantizeOptions
    recipes: tuple[Recipe, ...]
    layers: tuple[Layer, ...]
    left_out: tuple[Layer, ...]
    tokenizer: Tokenizer
    samples: Samples | None

    @property
    def is_auto(self) -> bool:
        """Whether each layer's recipe is searched."""
        return self.options.auto_bits is not None

    @property
    def name(self) -> str:
        """Return the name for people: the recipe's, or "auto"."""
        return "auto" if self.is_auto else self.recipes[0].name


def plan_quantization(path: str | Path, options: QuantizeOptions) -> QuantizePlan:
    """Return what is going to be done; nothing is written and no torch is imported.

    raises CheckpointError for an input that cannot be quantized, InvalidArgumentError for options that do not fit it,
        UnsupportedError when a package is missing
    """
    path = Path(path)
    recipes = _recipes(options)
    _check_numbers(options)
    source = resolve_source(options.calib_data)
    require_packages()
    refuse_quantized(path)
    checkpoint = open_checkpoint(path)
    everything = linear_layers(checkpoint.spec)
    layers = choose_layers(everything, options.exclude, options.quantize_lm_head)
    for recipe in recipes:
        check_layers(recipe, layers, options.group_size if recipe.is_int4 or not options.auto_bits else None)
        if recipe.shares_scales or options.auto_bits is not None:
            check_groups(everything, layers, recipe.name)
    names = {one.name for one in layers}
    tokenizer = open_tokenizer(checkpoint)
    needs_data = (
        any(one.needs_data for one in recipes) or options.kv_cache != "none" or options.auto_bits is not None
    )
    return QuantizePlan(
        path,
        checkpoint,
        options,
        recipes,
        tuple(layers),
        tuple(one for one in everything if one.name not in names),
        tokenizer,
        _samples(options, source, checkpoint, tokenizer) if needs_data else None,
    )


def _recipes(options: QuantizeOptions) -> tuple[Recipe, ...]:
    if options.auto_bits is None:
        if options.auto_recipes:
            raise InvalidArgumentError(
                "--auto-recipes goes with --auto-bits; give the mean bits of a weight, e.g. 5.0"
            )
        return (find_recipe(options.recipe),)
    if options.recipe != QuantizeOptions.recipe:
        raise InvalidArgumentError(
            f"--recipe {options.recipe} is one recipe for all layers, --auto-bits chooses for each; give what it may "
            "choose from as --auto-recipes"
        )
    found = tuple(find_recipe(name) for name in options.auto_recipes or ("int4_awq", "fp8"))
    if options.group_size is not None and not any(one.is_int4 for one in found):
        raise InvalidArgumentError(
            f"--group-size {options.group_size} is for int4 weights, --auto-recipes has none; leave it out"
        )
    least = min(one.bits for one in found)
    if not least <= options.auto_bits <= 16:
        raise InvalidArgumentError(
            f"--auto-bits is {options.auto_bits:g}, with {', '.join(one.name for one in found)} it must be "
            f"{least:g} to 16"
        )
    return found


def _check_numbers(options: QuantizeOptions) -> None:
    for name, value in (("size", options.calib_size), ("length", options.calib_length)):
        if value < 1:
            raise InvalidArgumentError(f"--calib-{name} is {value}, it must be 1 or more")
    if options.batch_size < 1:
        raise InvalidArgumentError(f"--batch-size is {options.batch_size}, it must be 1 or more")
    if not -(2**63) <= options.seed < 2**64:
        raise InvalidArgumentError(f"--seed is {options.seed}, it must fit in 64 bits")
    if options.calib_length < 2 and options.auto_bits is not None:
        raise InvalidArgumentError(
            "--calib-length is 1, --auto-bits is judged by the tokens that follow others; give 2 or more"
        )
    if options.smoothquant is not None and not 0.0 <= options.smoothquant <= 1.0:
        raise InvalidArgumentError(f"--smoothquant is {options.smoothquant:g}, it must be 0 to 1, or auto")
    if options.smoothquant is not None and all(one.algorithm != "smoothquant" for one in _recipes(options)):
        raise InvalidArgumentError("--smoothquant is for --recipe int8_sq; leave it out")
    if options.dtype not in DTYPES:
        raise InvalidArgumentError(f"--dtype is {options.dtype!r}, it must be one of {', '.join(DTYPES)}")
    if options.kv_cache not in KV_CACHES:
        raise InvalidArgumentError(f"--kv-cache is {options.kv_cache!r}, it must be none, fp8 or int8")
    if options.device.partition(":")[0] not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"--device is {options.device!r}, it must be cpu or cuda")


def require_packages() -> None:
    """Raise UnsupportedError when a package that calibration needs is not installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"quantizing needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; "
            "run: pip install 'plansmith[quantize]'"
        )


def refuse_quantized(path: Path) -> None:
    """Raise CheckpointError when a checkpoint is quantized already, or one that transformers cannot open."""
    if is_trtllm_checkpoint(path):
        raise CheckpointError(
            f"{path}: is a TensorRT-LLM checkpoint, which transformers cannot calibrate; quantize the Hugging Face "
            "checkpoint it was converted from, or build this one as it is"
        )
    found = next((name for name in ("hf_quant_config.json", REPORT_NAME) if (path / name).is_file()), None)
    try:
        config: Any = json.loads((path / "config.json").read_bytes())
        method = config.get("quantization_config") if isinstance(config, dict) else None
    except (OSError, ValueError, RecursionError):
        method = None  # open_checkpoint says what is wrong with it
    if isinstance(method, dict):
        found = (
            f"quantization_config of {method.get('quant_method') or method.get('quant_algo') or 'some kind'}"
        )
    if found is not None:
        raise CheckpointError(
            f"{path}: is quantized already (it has {found}); quantize the checkpoint it was made from, or build this "
            "one as it is"
        )


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Return a checkpoint's tokenizer; CheckpointError when it cannot be opened."""
    files = checkpoint.tokenizer_files()
    check_tokenizer_opens(files, str(checkpoint.path))
    contents = {name: one if isinstance(one, bytes) else one.read_bytes() for name, one in files.items()}
    return Tokenizer.from_files(contents, str(checkpoint.path))


def _samples(
    options: QuantizeOptions, source: Path | None, checkpoint: Checkpoint, tokenizer: Tokenizer
) -> Samples:
    longest = checkpoint.spec.max_position_embeddings
    if options.calib_length > longest:
        raise InvalidArgumentError(
            f"--calib-length is {options.calib_length}, the model takes {longest} tokens; give {longest} or less"
        )
    return make_samples(
        load_documents(source),
        tokenizer,
        size=options.calib_size,
        length=options.calib_length,
        seed=options.seed,
        source=SHIPPED if source is None else str(source),
        vocab_size=checkpoint.spec.vocab_size,
        held_out=HELD_OUT,
    )
