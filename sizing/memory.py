"""What a model takes of a device's memory when it is served, as arithmetic over numbers of its shape.

Standard library only: the runtime asks before it opens a plan, `plansmith size` before there is one. All sizes are
bytes. What the cpu target allocates is exact and has a module of its own, cpu_memory.py; on a GPU weights and KV are
exact, the plan's scratch memory is an estimate of what its compiler will want.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from ..runtime.errors import InvalidArgumentError

VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}
"""Bytes of a value in a KV pool, by the manifest's names of types."""

LOGIT_BYTES = 4  # float32 on every target
# Of a GPU's memory that is free beside the plan, see EngineOptions.kv_cache_free_gpu_mem_fraction.
KV_FRACTION = 0.9
# A CUDA context with the libraries' modules and kernels, 400 to 600 MB, and what graphs and local memory take.
RESERVE_BYTES = 768 << 20
_WORKSPACE_BYTES = 8 << 20  # of products that are cut along their inputs
_SAMPLER_FACTOR = 2  # probabilities and their order beside the logits of each row that is drawn on the device


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A decoder in numbers.

    num_layers : L; num_heads : H; num_kv_heads : KVH; head_dim : D; hidden_size : E; intermediate_size : of the MLP
    vocab_size : V
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class Load:
    """What is to be served at a time, and the limits of the plan that serves it.

    context : tokens of each sequence, prompt and output together
    sequences : that run at a time
    max_batch_size, max_num_tokens, tokens_per_block, max_seq_len : the plan's, see builder/limits.py; a max_seq_len of
        0 is the context
    """

    context: int
    sequences: int = 1
    max_batch_size: int = 64
    max_num_tokens: int = 2048
    tokens_per_block: int = 32
    max_seq_len: int = 0

    def check(self) -> None:
        """Raise InvalidArgumentError for a number out of its range, and where they contradict."""
        for name in ("context", "sequences", "max_batch_size", "max_num_tokens", "tokens_per_block"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if 0 < self.max_seq_len < self.context:
            raise InvalidArgumentError(
                f"context is {self.context}, a plan with max_seq_len {self.max_seq_len} takes no longer "
                "sequences; give less"
            )
        if self.sequences > self.max_batch_size:
            raise InvalidArgumentError(
                f"sequences is {self.sequences}, a plan with max_batch_size {self.max_batch_size} runs no more than "
                f"that at a time; give fewer, or max_batch_size {self.sequences}"
            )
        if self.max_num_tokens < self.max_batch_size:
            raise InvalidArgumentError(
                f"max_num_tokens is {self.max_num_tokens} and max_batch_size {self.max_batch_size}, but a step must "
                f"hold one token of each sequence; raise max_num_tokens to at least {self.max_batch_size}"
            )


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """What takes how much.

    weights : the plan's; kv : pools of all sequences at full length; activations : what a step works in
    logits : rows of them, and what drawing tokens works in; reserve : the driver's own, and of libraries
    """

    weights: int
    kv: int
    activations: int
    logits: int
    reserve: int = 0

    @property
    def beside_kv(self) -> int:
        """All of it but the KV pools."""
        return self.weights + self.activations + self.logits + self.reserve

    @property
    def total(self) -> int:
        """All of it."""
        return self.beside_kv + self.kv

    def words(self, text: Callable[[int], str] | None = None) -> str:
        """Say what takes how much; text : writes a size, None = in powers of 1024."""
        text = text or size_text
        parts = (
            ("weights", self.weights),
            ("KV cache", self.kv),
            ("activations", self.activations),
            ("logits", self.logits),
            ("reserve", self.reserve),
        )
        return ", ".join(f"{name} {text(size)}" for name, size in parts if size)


def blocks_for(tokens: int, tokens_per_block: int) -> int:
    """Return the KV blocks that a sequence of so many tokens holds."""
    return -(-tokens // tokens_per_block)


def kv_block_bytes(shape: ModelShape, tokens_per_block: int, value_bytes: int) -> int:
    """Return the bytes of a KV block over all layers, K and V together."""
    return kv_values_per_token(shape) * tokens_per_block * value_bytes


def kv_values_per_token(shape: ModelShape) -> int:
    """Return the values that one position holds over all layers. A layer with a window has as many: its blocks are
    those of the sequence, and stay until it ends.
    """
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim


def kv_bytes(shape: ModelShape, load: Load, value_bytes: int) -> int:
    """Return the bytes of KV blocks for all sequences of a load at full length."""
    blocks = load.sequences * blocks_for(load.context, load.tokens_per_block)
    return blocks * kv_block_bytes(shape, load.tokens_per_block, value_bytes)


def gpu_activation_bytes(shape: ModelShape, load: Load, compute_bytes: int, *, gathers_pages: bool) -> int:
    """Return an estimate of the scratch memory of a GPU plan: its widest moment, in a prefill or a decode step.

    A token is widest in the MLP, with the residual stream, its norm, gate, up and their product, or in the attention,
    with q, k, v and the result. A plan that gathers pages (TensorRT-RTX has no paged attention) holds besides, in a
    decode step the K and V of one layer of a full batch, in a prefill a mask over the context. Of plans of TensorRT-RTX
    1.7 with few layers this is what the compiler tells within 15 %; a deep one of a small model took 80 MB more.

    compute_bytes : of an activation; gathers_pages : see above
    """
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    widest = (2 * shape.hidden_size + max(3 * shape.intermediate_size, attention)) * compute_bytes
    context = blocks_for(load.max_seq_len or load.context, load.tokens_per_block) * load.tokens_per_block
    prefill = load.max_num_tokens * widest + _WORKSPACE_BYTES
    if not gathers_pages:
        return prefill
    prefill += load.max_num_tokens * context * compute_bytes
    gathered = 2 * load.max_batch_size * context * shape.num_kv_heads * shape.head_dim * compute_bytes
    decode = load.max_batch_size * widest + max(gathered, gathered // 2 + _WORKSPACE_BYTES)
    return max(prefill, decode)


def gpu_logits_bytes(shape: ModelShape, load: Load) -> int:
    """Return the bytes of a full batch's logits on a GPU, and of what tokens are drawn in there."""
    return (1 + _SAMPLER_FACTOR) * load.max_batch_size * shape.vocab_size * LOGIT_BYTES


def gpu_use(
    shape: ModelShape,
    load: Load,
    weight_bytes: int,
    *,
    kv_value_bytes: int,
    compute_bytes: int = 2,
    gathers_pages: bool = True,
) -> MemoryUse:
    """Return what a GPU plan and its KV pools take."""
    return MemoryUse(
        weights=weight_bytes,
        kv=kv_bytes(shape, load, kv_value_bytes),
        activations=gpu_activation_bytes(shape, load, compute_bytes, gathers_pages=gathers_pages),
        logits=gpu_logits_bytes(shape, load),
        reserve=RESERVE_BYTES,
    )


def kv_room(use: MemoryUse, memory_bytes: int, fraction: float = KV_FRACTION) -> int:
    """Return the bytes that KV pools may have beside everything else; 0 where there is no room.

    fraction : of what is free, that the pools get
    """
    return max(0, int((memory_bytes - use.beside_kv) * fraction))


def sequences_that_fit(shape: ModelShape, load: Load, kv_value_bytes: int, room_bytes: int) -> int:
    """Return how many sequences of the load's context KV pools of so many bytes hold at a time.

    At most max_batch_size, for which everything else is sized.
    """
    one = kv_bytes(shape, dataclasses.replace(load, sequences=1), kv_value_bytes)
    return min(load.max_batch_size, room_bytes // one)


def device_counts(shape: ModelShape, most: int = 64) -> Iterator[int]:
    """Yield over how many devices tensor parallelism can cut the model: powers of two that divide its heads."""
    count = 1
    while count <= most and shape.num_heads % count == 0:
        yield count
        count *= 2


def split_use(shape: ModelShape, use: MemoryUse, devices: int) -> MemoryUse:
    """Return what each of several devices takes under tensor parallelism.

    Weights and logits are cut evenly, KV pools by KV heads, of which each device has at least one. Activations are
    not counted smaller: the residual stream is on every device.
    """
    if devices == 1:
        return use
    return MemoryUse(
        weights=-(-use.weights // devices),
        kv=-(-use.kv // min(devices, shape.num_kv_heads)),
        activations=use.activations,
        logits=-(-use.logits // devices),
        reserve=use.reserve,
    )


def devices_needed(shape: ModelShape, use: MemoryUse, memory_bytes: int) -> int | None:
    """Return the fewest devices of that memory that hold it, 1 where one does; None where no even cut fits."""
    for count in device_counts(shape):
        part = split_use(shape, use, count)
        if part.kv <= kv_room(part, memory_bytes):
            return count
    return None


def size_text(num_bytes: int) -> str:
    """Return bytes for people, e.g. "3.2 GiB"."""
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
