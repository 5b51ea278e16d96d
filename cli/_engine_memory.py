"""Whether an engine's plan fits a GPU's memory, for `plansmith inspect --runs-on`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..sizing.memory import (
    VALUE_BYTES,
    Load,
    MemoryUse,
    ModelShape,
    gpu_use,
    kv_room,
    sequences_that_fit,
)
from ..sizing.rtx_plan import kernel_source_bytes
from ._output import size_text

if TYPE_CHECKING:
    from ..runtime.manifest import Manifest
    from ..runtime.manifest_entries import TargetEntry
    from ..sizing.skus import Sku


@dataclasses.dataclass(frozen=True)
class Fit:
    """What a plan takes of a GPU, bytes, and how many sequences at max_seq_len its pools then hold at a time.

    use : with KV of one sequence at full length; weights that may stay in host memory are not counted
    least : what weights and one KV block take, which is exact within a few MB where the rest is estimated
    sequences : at most max_batch_size
    """

    use: MemoryUse
    least: int
    memory_bytes: int
    max_seq_len: int
    sequences: int

    @property
    def is_impossible(self) -> bool:
        """Whether weights and the smallest pools are more than the GPU has."""
        return self.least > self.memory_bytes

    def words(self) -> str:
        """Say it."""
        held = f"{self.use.words(size_text)}, of {size_text(self.memory_bytes)}"
        if self.sequences:
            count = f"{self.sequences} sequence{'s' * (self.sequences > 1)}"
            return f"{count} of {self.max_seq_len} tokens at a time (one takes: {held})"
        return f"not one sequence of {self.max_seq_len} tokens fits ({held})"


def engine_shape(manifest: Manifest) -> ModelShape:
    """Return an engine's model in the numbers that sizing works with."""
    model = manifest.model
    return ModelShape(
        model.num_layers,
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        model.hidden_size,
        model.intermediate_size,
        model.vocab_size,
    )


def target_weight_bytes(manifest: Manifest, entry: TargetEntry, precision: str = "") -> int:
    """Return what a plan's weights take of a device: its files, without TensorRT-RTX's source of kernels.

    precision : of the plan, where it is not the engine's
    """
    size = sum(file.size for file in entry.plan_files())
    if entry.compiler != "tensorrt_rtx":
        return size
    is_quantized = (precision or manifest.precision) not in ("fp32", "fp16", "bf16")
    model = manifest.model
    source = kernel_source_bytes(model.family, model.num_layers, is_quantized=is_quantized)
    return size - source if size > source else size  # of fewer bytes than that nothing is known


def fit(manifest: Manifest, name: str, sku: Sku) -> Fit:
    """Return how a GPU target, and its draft where there is one, fit a GPU."""
    model, limits, shape = manifest.model, manifest.limits, engine_shape(manifest)
    load = Load(limits.max_seq_len, 1, limits.max_batch_size, limits.max_num_tokens, limits.tokens_per_block)
    entry = manifest.targets[name]
    draft = None if manifest.draft is None else manifest.draft.targets.get(name)
    plans = [(manifest.precision, entry)]
    if draft is not None and manifest.draft is not None:
        plans.append((manifest.draft.precision, draft))
    weights = sum(
        target_weight_bytes(manifest, one, precision) for precision, one in plans if not one.streams_weights
    )
    value_bytes = sum(VALUE_BYTES[one.kv_dtype] for _, one in plans)  # both have pools of the same blocks
    use = gpu_use(
        shape,
        load,
        weights,
        kv_value_bytes=value_bytes,
        compute_bytes=VALUE_BYTES[entry.compute_dtype],
        gathers_pages=entry.token_layout == "rectangular",
    )
    block = model.kv_bytes_per_token(entry.kv_dtype) * limits.tokens_per_block
    room = kv_room(use, sku.memory_bytes)
    return Fit(
        use=use,
        least=weights + block,
        memory_bytes=sku.memory_bytes,
        max_seq_len=limits.max_seq_len,
        sequences=sequences_that_fit(shape, load, kv_value_bytes=value_bytes, room_bytes=room),
    )
