"""Executors that take the time a GPU would take, and no GPU: models and GPUs as numbers.

The tokens are hashes of each sequence's history, read back through its KV blocks; the time is that of a step's bytes or
of its arithmetic, whichever is longer (runtime/src/simulated). What comes out is how scheduling behaves at a size that
no machine here could run, not how fast a GPU is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

from .batch import ModelInfo
from .errors import InvalidArgumentError, OutOfMemoryError
from .executor import Executor, simulated_executor

_Named = TypeVar("_Named")


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What a data sheet prints of one GPU.

    memory_bytes_per_s, flops_per_s : of device memory, and dense BF16 (T4: FP16), without sparsity
    memory_bytes : of device memory
    link_bytes_per_s : to the host, one direction
    """

    name: str
    memory_bytes_per_s: float
    flops_per_s: float
    memory_bytes: float
    link_bytes_per_s: float


# From NVIDIA's data sheets: "T4 Tensor Core GPU" (2019), "A10", "A100 80GB" (SXM), "L4", "L40S", "H100" (SXM5), "H200"
# (SXM), "HGX B200" (a GPU's share of eight). They print PCIe as the sum of both directions; here is one.
GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("T4", 0.32e12, 65e12, 16e9, 16e9),
        Gpu("A10", 0.6e12, 125e12, 24e9, 32e9),
        Gpu("A100-80GB", 2.039e12, 312e12, 80e9, 32e9),
        Gpu("L4", 0.3e12, 121e12, 24e9, 32e9),
        Gpu("L40S", 0.864e12, 362e12, 48e9, 32e9),
        Gpu("H100-SXM", 3.35e12, 989e12, 80e9, 64e9),
        Gpu("H200", 4.8e12, 989e12, 141e9, 64e9),
        Gpu("B200", 7.7e12, 2250e12, 180e9, 64e9),
    )
}


@dataclasses.dataclass(frozen=True)
class SimulatedModel:
    """A decoder's sizes, as its config.json has them.

    weight_bytes_each, kv_bytes_each : of a weight and of a K or V value; 2 = BF16, 1 = INT8, 0.5 = INT4
    """

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    tied_embedding: bool = False
    weight_bytes_each: float = 2.0
    kv_bytes_each: float = 2.0

    @property
    def num_layer_weights(self) -> int:
        """Weights of all layers' matrices: q, k, v, o, gate, up and down."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_weights(self) -> int:
        """All weights, embeddings included (norms and biases are left out)."""
        tables = 1 if self.tied_embedding else 2
        return self.num_layer_weights + tables * self.vocab_size * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes read in a step: all layers and the output head, but of the input embedding only some rows."""
        read = self.num_layer_weights + self.vocab_size * self.hidden_size
        return int(read * self.weight_bytes_each)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one position, all layers."""
        return int(2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_bytes_each)


MODELS: Mapping[str, SimulatedModel] = {
    model.name: model
    for model in (
        SimulatedModel("SmolLM2-135M", 30, 9, 3, 64, 576, 1536, 49152, True),
        SimulatedModel("SmolLM2-1.7B", 24, 32, 32, 64, 2048, 8192, 49152, True),
        SimulatedModel("Qwen2.5-0.5B", 24, 14, 2, 64, 896, 4864, 151936, True),
        SimulatedModel("Qwen2.5-7B", 28, 28, 4, 128, 3584, 18944, 152064),
        SimulatedModel("Llama-3.2-1B", 16, 32, 8, 64, 2048, 8192, 128256, True),
        SimulatedModel("Llama-3.1-8B", 32, 32, 8, 128, 4096, 14336, 128256),
        SimulatedModel("Llama-3.1-70B", 80, 64, 8, 128, 8192, 28672, 128256),
    )
}


@dataclasses.dataclass(frozen=True)
class SimulatedLimits:
    """What the simulated engine is built for; all inclusive.

    max_logits_rows : most rows of logits in a step; 0 = max_batch_size
    vocab_size : token ids of the simulation. Small: the host would spend most of its time on the logits of a real one
    """

    max_batch_size: int = 256
    max_num_tokens: int = 8192
    max_input_len: int = 32768
    max_seq_len: int = 40960
    tokens_per_block: int = 64
    max_logits_rows: int = 0
    vocab_size: int = 64


@dataclasses.dataclass(frozen=True)
class Reached:
    """The shares of the printed numbers that kernels reach, and a step's fixed cost.

    memory_share, flops_share, link_share : 0..1
    overhead_us : of a step, launches and synchronization, microseconds
    """

    memory_share: float = 0.8
    flops_share: float = 0.6
    link_share: float = 0.8
    overhead_us: float = 200.0

    def __post_init__(self) -> None:
        """Refuse shares outside 0..1."""
        for name in ("memory_share", "flops_share", "link_share"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise InvalidArgumentError(f"{name} is {value}, wanted more than 0 and at most 1")


def simulate(
    model: SimulatedModel | str,
    gpu: Gpu | str,
    limits: SimulatedLimits | None = None,
    *,
    num_gpus: int = 1,
    reached: Reached | None = None,
    seed: int = 1,
    draft_of_seed: int = 0,
    draft_agreement: float = 0.0,
) -> Executor:
    """Return an executor whose steps take as long as `model` on `gpu` should.

    model, gpu : one of MODELS and GPUS by name, or any other
    num_gpus : that share the weights and the KV evenly; what they say to each other costs nothing here
    seed : of the tokens; two executors with the same are the same model
    draft_of_seed, draft_agreement : a draft that agrees with the model of that seed at this share of positions, 0..1;
        it shares the clock of the newest such executor of the process, so make the target first
    raises InvalidArgumentError for an unknown name or a number out of range, OutOfMemoryError when the weights do not
        fit
    """
    model = _named(model, MODELS, "model")
    gpu = _named(gpu, GPUS, "GPU")
    limits = limits or SimulatedLimits()
    reached = reached or Reached()
    kv_room(model, gpu, num_gpus=num_gpus)  # the weights must fit
    info = ModelInfo(
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        kv_bytes_per_block=model.kv_bytes_per_token * limits.tokens_per_block,
        **dataclasses.asdict(limits),
    )
    return simulated_executor(
        info,
        weight_bytes=model.weight_bytes,
        flops_per_token=2.0 * model.num_layer_weights,
        memory_bytes_per_s=gpu.memory_bytes_per_s * reached.memory_share * num_gpus,
        flops_per_s=gpu.flops_per_s * reached.flops_share * num_gpus,
        host_copy_bytes_per_s=gpu.link_bytes_per_s * reached.link_share * num_gpus,
        overhead_us=reached.overhead_us,
        seed=seed,
        draft_of_seed=draft_of_seed,
        draft_agreement=draft_agreement,
    )


def kv_room(model: SimulatedModel | str, gpu: Gpu | str, *, num_gpus: int = 1, share: float = 0.9) -> int:
    """Return the bytes that are left for the KV cache when the weights are loaded and `share` of the memory is used.

    raises OutOfMemoryError when that is none
    """
    model = _named(model, MODELS, "model")
    gpu = _named(gpu, GPUS, "GPU")
    if num_gpus < 1:
        raise InvalidArgumentError(f"num_gpus is {num_gpus}, wanted at least 1")
    weights = model.num_weights * model.weight_bytes_each
    room = gpu.memory_bytes * num_gpus * share - weights
    if room <= 0:
        raise OutOfMemoryError(
            f"the weights of {model.name} take {weights / 1e9:.1f} GB, {num_gpus} x {gpu.name} has "
            f"{gpu.memory_bytes * num_gpus * share / 1e9:.1f} GB for them; take more or larger GPUs, or fewer bytes a "
            "weight (weight_bytes_each)"
        )
    return int(room)


def _named(value: _Named | str, table: Mapping[str, _Named], what: str) -> _Named:
    if not isinstance(value, str):
        return value
    if value not in table:
        raise InvalidArgumentError(f"no {what} is called {value!r}; there are {', '.join(table)}")
    return table[value]
