"""From a build to its manifest."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .. import __version__
from ..runtime.manifest import SCHEMA_VERSION, Manifest
from ..runtime.manifest_entries import (
    GROUP_SIZE,
    CheckpointEntry,
    DraftEntry,
    GraphContractEntry,
    LimitsEntry,
    ModelEntry,
    TargetEntry,
    TensorEntry,
    TokenizerEntry,
)
from .engine_dir import Describe, describe_file
from .graph import contract
from .limits import Limits
from .machine import host
from .provenance import now_text, provenance
from .spec import DecoderSpec, weight_shapes
from .targets.registry import Target, activation_quantization, compute_dtype, kv_dtype
from .targets.rtx import contract as rtx_contract
from .targets.tensorrt import contract as tensorrt_contract

if TYPE_CHECKING:
    from .build import BuildPlan
    from .compile import Compiled, CompileRequest


def make_manifest(
    plan: BuildPlan,
    fingerprint: str,
    tokenizer: TokenizerEntry,
    targets: dict[str, TargetEntry],
    draft: DraftEntry | None = None,
) -> Manifest:
    """Return the manifest of an engine."""
    return Manifest(
        schema_version=SCHEMA_VERSION,
        plansmith_version=__version__,
        created=now_text(),
        host=host(),
        model=model_entry(plan.checkpoint.spec),
        precision=plan.recipe.name,
        limits=limits_entry(plan.limits),
        tokenizer=tokenizer,
        graph_contract=_contract_entry(),
        checkpoint=CheckpointEntry(path=_printable(plan.checkpoint.path), fingerprint=fingerprint),
        targets=targets,
        draft=draft,
    )


def _printable(path: pathlib.Path) -> str:
    text = str(path.absolute())
    return text if text.isprintable() else text.encode("ascii", "backslashreplace").decode()


def model_entry(spec: DecoderSpec) -> ModelEntry:
    """Return what the manifest says of a model."""
    return ModelEntry(
        family=spec.family,
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position_embeddings,
        windows=tuple(layer.window for layer in spec.layers),
        num_parameters=sum(math.prod(shape) for shape in weight_shapes(spec).values()),
        dtype=spec.dtype,
        bos_token_id=spec.bos_token_id,
        eos_token_ids=tuple(spec.eos_token_ids),
        pad_token_id=spec.pad_token_id,
    )


def limits_entry(limits: Limits) -> LimitsEntry:
    """Return what the manifest says of the limits."""
    return LimitsEntry(**dataclasses.asdict(limits))


def _contract_entry() -> GraphContractEntry:
    return GraphContractEntry(
        version=contract.VERSION,
        inputs=tuple(contract.PACKED_INPUTS),
        outputs=(contract.LOGITS,),
        pool_inputs=_patterns(contract.k_pool(0), contract.v_pool(0)),
        pool_outputs=_patterns(contract.k_pool_out(0), contract.v_pool_out(0)),
    )


def _patterns(*names: str) -> tuple[str, ...]:
    return tuple(name.replace(".0", ".{layer}") for name in names)


def target_entry(
    target: Target,
    request: CompileRequest,
    result: Compiled,
    key: str,
    work: pathlib.Path,
    inputs: Mapping[str, str] | None = None,
    describe: Describe = describe_file,
) -> TargetEntry:
    """Return what the manifest says of a target whose files lie below `work`, compiled a moment ago on this machine.

    inputs : what `key` was made of, by name, for its provenance; None = not kept
    describe : gives the entry of each of its files
    """
    spec, recipe = request.checkpoint.spec, request.recipe
    compute = compute_dtype(target, spec, recipe)
    rectangular = target.compiler == "rtx"
    groups = () if recipe.group_size is None else (f"{GROUP_SIZE}={recipe.group_size}",)
    return TargetEntry(
        compiler=result.compiler,
        compiler_version=result.version,
        sm=target.sm,
        token_layout=rtx_contract.TOKEN_LAYOUT if rectangular else "packed",
        row_alignment=rtx_contract.ROW_ALIGNMENT if rectangular else "none",
        compute_dtype=compute,
        kv_dtype=kv_dtype(target, spec, recipe),
        activation_quantization=activation_quantization(target, recipe),
        inputs=_inputs(target, spec, request.limits, compute),
        profiles=_profiles(result.flags),
        files=tuple(describe(work, path) for path in result.files),
        flags=(*result.flags, *groups),
        key=key,
        seconds=round(result.seconds, 3),
        provenance=provenance(target, inputs),
    )


def _profiles(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that a compiler's flag profiles=A+B lists."""
    return tuple(name for flag in flags if flag.startswith("profiles=") for name in flag[9:].split("+"))


def _inputs(target: Target, spec: DecoderSpec, limits: Limits, compute: str) -> tuple[TensorEntry, ...]:
    """Return what a plan takes besides the pools."""
    if target.compiler != "rtx":
        packed = tensorrt_contract.STEP_INPUTS if target.compiler == "tensorrt" else contract.PACKED_INPUTS
        return tuple(TensorEntry(name=name, dtype="int32", dims=dims) for name, dims in packed.items())
    inputs = rtx_contract.plan_inputs(spec, limits, compute)
    return tuple(
        TensorEntry(name=one.name, dtype=one.dtype, dims=tuple(map(str, one.dims)))
        for one in inputs
        if not contract.is_pool(one.name)
    )
