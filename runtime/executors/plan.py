"""An opened plan: what it takes and gives, compared with the manifest before anything runs, and its profiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..errors import EngineFileError, ShapeError
from ..manifest import Manifest
from . import runs
from .trt import Shape, Tensor, TrtPlan

# Dimensions that follow from the pools: blocks, and one more.
_POOL_DIMS = ("NB", "NB1")


@dataclasses.dataclass(frozen=True)
class PoolTensor:
    """A layer's K or V pool: the plan's input and the output that is the same memory."""

    layer: int
    is_v: bool
    input: str
    output: str


class Plan:
    """A target's plan, opened and checked.

    raises EngineFileError where its inputs or outputs are not the manifest's
    """

    def __init__(self, trt: TrtPlan, manifest: Manifest, target_name: str) -> None:
        self.trt = trt
        self.target = manifest.target(target_name)
        self.pools = _pool_tensors(manifest)
        self.inputs = tuple(one.name for one in self.target.inputs)
        self._dims = {one.name: one.dims for one in self.target.inputs}
        check_tensors({one.name: one for one in trt.tensors()}, expected(manifest, target_name), manifest)
        if trt.num_profiles != max(1, len(self.target.profiles)):
            raise EngineFileError(
                f"the plan of {target_name} in {manifest.root} has {trt.num_profiles} optimization profiles, "
                f"manifest.json names {len(self.target.profiles)}; build the engine again"
            )
        pool = self.pools[0].input
        self._ranges = [
            {name: trt.input_range(name, i) for name in (*self.inputs, pool)} for i in range(trt.num_profiles)
        ]

    @property
    def is_packed(self) -> bool:
        """Whether a step is one packed run."""
        return self.target.token_layout == "packed"

    @property
    def num_profiles(self) -> int:
        """How many profiles, each with a context of its own."""
        return len(self._ranges)

    def is_decode(self, profile: int) -> bool:
        """Whether a profile is for steps that only decode, whose shapes come again; the first, where it has no name."""
        names = self.target.profiles
        return profile == (names.index("decode") if "decode" in names else 0)

    @property
    def max_pool_blocks(self) -> int:
        """The largest pool that every profile takes, in blocks, those for padding included."""
        pool = self.pools[0].input
        return min(ranges[pool][1][0] for ranges in self._ranges)

    @property
    def max_logits_rows(self) -> int:
        """The most rows of logits in a run of any profile."""
        return min(ranges[runs.LOGITS_ROWS][1][0] for ranges in self._ranges)

    def profile_of(self, shapes: Mapping[str, Shape]) -> int:
        """Return the first profile that takes inputs of these shapes; ShapeError when none does."""
        for i, ranges in enumerate(self._ranges):
            if all(_is_within(shape, *ranges[name]) for name, shape in shapes.items()):
                return i
        own = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ShapeError(
            f"no optimization profile of the plan takes a run of {own}; lower max_batch_size or max_num_tokens"
        )

    def staging_bytes(self, num_blocks: int) -> list[int]:
        """Return the largest size of each input in bytes, over all profiles, with pools of num_blocks."""
        sizes = []
        for name in self.inputs:
            most = 0
            for ranges in self._ranges:
                count = 1
                for dim, high in zip(self._dims[name], ranges[name][1], strict=True):
                    count *= min(high, num_blocks + 1) if dim in _POOL_DIMS else high
                most = max(most, 4 * count)
            sizes.append(most)
        return sizes

    def scratch_bytes(self) -> int:
        """Return the memory that the contexts share: their runs come one after another."""
        return max(self.trt.scratch_bytes(i) for i in range(self.num_profiles))


def expected(manifest: Manifest, target_name: str) -> dict[str, Tensor]:
    """Return the tensors that a target's plan must have, by name; -1 where a dimension is free."""
    target, model, limits = manifest.target(target_name), manifest.model, manifest.limits
    tensors = [
        Tensor(one.name, True, one.dtype, tuple(_size(dim) for dim in one.dims), False, None)
        for one in target.inputs
    ]
    tensors.append(Tensor(runs.LOGITS, False, "float32", (-1, model.vocab_size), False, None))
    pool = (-1, model.num_kv_heads, limits.tokens_per_block, model.head_dim)
    for one in _pool_tensors(manifest):
        tensors.append(Tensor(one.input, True, target.kv_dtype, pool, False, None))
        tensors.append(Tensor(one.output, False, target.kv_dtype, pool, False, one.input))
    return {one.name: one for one in tensors}


def check_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], manifest: Manifest) -> None:
    """Compare a plan's tensors with those its manifest describes; EngineFileError says what is wrong with which.

    A pool's output that the library does not know as an alias is one all the same: it is bound to its input's memory.
    """
    problems = [f"{name} is missing" for name in wanted.keys() - found.keys()]
    problems += [f"{name} is not in the manifest" for name in found.keys() - wanted.keys()]
    for name in wanted.keys() & found.keys():
        problems += _differences(found[name], wanted[name])
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise EngineFileError(
            f"the plan in {manifest.root} is not the one that manifest.json describes: "
            f"{'; '.join(sorted(problems)[:5])}{more}; build the engine again"
        )


def _differences(found: Tensor, wanted: Tensor) -> list[str]:
    name = found.name
    problems = []
    if found.is_input != wanted.is_input:
        problems.append(f"{name} is an {'input' if found.is_input else 'output'}")
    if found.dtype != wanted.dtype:
        problems.append(f"{name} is {found.dtype} instead of {wanted.dtype}")
    # A dimension that the manifest leaves free may be fixed where only one size is possible (S = 1, B = 1).
    is_same = len(found.shape) == len(wanted.shape) and all(
        have == want or want == -1 for have, want in zip(found.shape, wanted.shape, strict=True)
    )
    if not is_same:
        problems.append(f"{name} has shape {list(found.shape)} instead of {list(wanted.shape)}")
    if found.on_host:
        problems.append(f"{name} is read on the host")
    if found.aliases not in (None, wanted.aliases):
        problems.append(f"{name} shares the memory of {found.aliases} instead of {wanted.aliases}")
    return problems


def _pool_tensors(manifest: Manifest) -> tuple[PoolTensor, ...]:
    contract = manifest.graph_contract
    pairs = list(zip(contract.pool_inputs, contract.pool_outputs, strict=True))
    if len(pairs) != 2:
        raise EngineFileError(
            f"manifest.json of {manifest.root} names {len(pairs)} pools a layer instead of K and V; build the engine "
            "again"
        )
    return tuple(
        PoolTensor(layer, is_v, taken.replace("{layer}", str(layer)), given.replace("{layer}", str(layer)))
        for layer in range(manifest.model.num_layers)
        for is_v, (taken, given) in zip((False, True), pairs, strict=True)
    )


def _size(dim: str) -> int:
    return int(dim) if dim.isdigit() else -1


def _is_within(shape: Shape, low: Shape, high: Shape) -> bool:
    return all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))
