"""The plans of `plansmith size`: what a checkpoint can be built into or an engine holds, a device and a recipe each."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from ..builder.limits import Limits
from ..builder.precision import PRECISIONS, Precision, of_checkpoint
from ..builder.scheme import KvFormat
from ..builder.targets.registry import CPU, Target
from ..builder.targets.support import check_support
from ..builder.weight_sizes import (
    PlanSizes,
    assumed_recipe,
    pages_are_gathered,
    plan_sizes,
    plan_work,
    shape_of,
    sku_target,
)
from ..runtime.errors import InvalidArgumentError, UnsupportedError
from ..runtime.manifest import Manifest
from ..sizing.cpu_plan import CpuPlan, read_cpu_plan
from ..sizing.memory import VALUE_BYTES, ModelShape
from ..sizing.roofline import Work
from ..sizing.skus import SKUS, Sku
from ._engine_memory import engine_shape, target_weight_bytes
from ._size_model import Checkpoint

DEFAULT_RECIPES = ("fp16", "int8", "fp8", "int4", "nvfp4")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan as far as sizes go, built or not, for a GPU or the cpu target.

    sku : None = cpu, on this machine
    weight_bytes : that the device holds; of cpu the plan file
    file_bytes : of the plan file; None where it is not built and not known
    gathers_pages : see sizing.memory.gpu_activation_bytes
    """

    shape: ModelShape
    sku: Sku | None
    target: str
    precision: str
    weight_bytes: int
    kv_value_bytes: int
    compute_bytes: int
    gathers_pages: bool
    work: Work | None
    file_bytes: int | None
    cpu_plan: CpuPlan | None = None

    @property
    def device(self) -> str:
        """Its device's short name."""
        return CPU if self.sku is None else self.sku.name


@dataclasses.dataclass(frozen=True)
class Refused:
    """A recipe that was named and that a device does not take, and why."""

    device: str
    target: str
    precision: str
    reason: str


def checkpoint_plans(
    model: Checkpoint,
    skus: Sequence[Sku | None],
    names: Sequence[str] | None,
    kv: KvFormat | None,
    limits: Limits,
) -> Iterator[Plan | Refused]:
    """Yield the plans that a checkpoint can be built into, a device and a recipe each.

    names : of recipes; None = those of DEFAULT_RECIPES that a device takes, or the checkpoint's own
    yields : Refused for a recipe that was named and that a device does not take
    raises InvalidArgumentError for a name that is not known
    """
    recipes = _recipes(model, names, kv)
    made: dict[tuple[str, str], PlanSizes] = {}  # the graphs of a compiler's GPUs are one
    for sku in skus:
        target = Target(CPU, CPU, ()) if sku is None else sku_target(sku)
        for recipe in recipes:
            try:
                check_support(target, recipe, model.spec)
                key = (recipe.name, target.compiler)
                if key not in made:
                    made[key] = plan_sizes(model.spec, recipe, limits, target, model.weights)
            except (UnsupportedError, InvalidArgumentError) as error:
                if names is not None:
                    device = CPU if sku is None else sku.name
                    yield Refused(device, target.name, recipe.name, str(error))
                continue
            yield _plan(model, sku, target, recipe, made[key])


def engine_plans(manifest: Manifest, skus: Sequence[Sku | None] | None) -> Iterator[Plan | Refused]:
    """Yield an engine's plans on the devices that run them.

    skus : None = all that run one, cpu too
    yields : Refused for a device that was named and that runs none
    """
    for sku in [*SKUS.values(), None] if skus is None else skus:
        able = [
            name
            for name, entry in manifest.targets.items()
            if ((sku is None) if name == CPU else (sku is not None and sku.sm in entry.sm))
        ]
        for name in able:
            yield _engine_plan(manifest, name, sku)
        if not able and skus is not None:
            device, sm = (CPU, CPU) if sku is None else (sku.name, sku.sm)
            reason = f"the engine has plans for {', '.join(manifest.targets)}, none of them runs on {sm}"
            yield Refused(device, "", manifest.precision, reason)


def _engine_plan(manifest: Manifest, name: str, sku: Sku | None) -> Plan:
    entry, shape = manifest.target(name), engine_shape(manifest)
    return Plan(
        shape,
        sku,
        name,
        manifest.precision,
        target_weight_bytes(manifest, entry),
        VALUE_BYTES[entry.kv_dtype],
        VALUE_BYTES[entry.compute_dtype],
        entry.token_layout == "rectangular" and sku is not None,
        None if sku is None else _engine_work(manifest, name, shape),
        sum(file.size for file in entry.plan_files()),
        read_cpu_plan(manifest.plan_path(name)) if sku is None else None,
    )


def _engine_work(manifest: Manifest, name: str, shape: ModelShape) -> Work:
    """Return what an engine's plan reads and multiplies, by the manifest's numbers."""
    entry, model = manifest.target(name), manifest.model
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim * shape.hidden_size
    layers = shape.num_layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)
    table = shape.vocab_size * shape.hidden_size
    has_own_head = model.num_parameters >= layers + 2 * table
    table_is_codes = (
        PRECISIONS[manifest.precision].head_bits < 16 if manifest.precision in PRECISIONS else False
    )
    value_bytes = 1 if table_is_codes else VALUE_BYTES[entry.compute_dtype]
    # A tied table of codes is there twice, see weight_sizes.py; one of floats is read whole for the logits.
    gathered = table * value_bytes if has_own_head or table_is_codes else 0
    kind = (
        entry.activation_quantization
        if entry.activation_quantization in ("int8", "fp8", "fp4")
        else "float16"
    )
    return Work(
        weight_bytes=max(0, target_weight_bytes(manifest, entry) - gathered),
        products={kind: layers},
        head={"float16": table},
        kv_value_bytes=VALUE_BYTES[entry.kv_dtype],
        windows=model.windows if any(model.windows) else (),
    )


def _recipes(model: Checkpoint, names: Sequence[str] | None, kv: KvFormat | None) -> list[Precision]:
    own = model.quantization
    if own is None and names is None:
        return list(_default_recipes(model, kv))
    if own is None:
        return [assumed_recipe(name, model.spec, kv) for name in names or ()]
    float_type: Any = model.spec.dtype if model.spec.dtype in ("float32", "float16") else "bfloat16"
    as_it_is = of_checkpoint(own, float_type)
    if names is None:
        return [as_it_is]
    wrong = [name for name in names if name not in (own.name, "auto", "fp16", "bf16", "fp32")]
    if wrong:
        raise InvalidArgumentError(
            f"--precision {wrong[0]}: {model.path} is quantized already ({own.name}); leave it out, or give fp16 or "
            "bf16 for what it takes in floats"
        )
    return [
        as_it_is if name in (own.name, "auto") else assumed_recipe(name, model.spec, kv) for name in names
    ]


def _default_recipes(model: Checkpoint, kv: KvFormat | None) -> Iterator[Precision]:
    """Yield those of DEFAULT_RECIPES whose groups divide the model's layers."""
    for name in DEFAULT_RECIPES:
        with contextlib.suppress(InvalidArgumentError):
            yield assumed_recipe(name, model.spec, kv)


def _plan(model: Checkpoint, sku: Sku | None, target: Target, recipe: Precision, sizes: PlanSizes) -> Plan:
    return Plan(
        shape_of(model.spec),
        sku,
        target.name,
        recipe.name,
        sizes.weight_bytes,
        sizes.kv_value_bytes,
        VALUE_BYTES[sizes.compute_dtype],
        pages_are_gathered(target),
        None if sku is None else plan_work(model.spec, recipe, target, sizes),
        sizes.file_bytes,
        sizes.cpu_plan,
    )
