"""The rank files of a TensorRT-LLM checkpoint as one: shares of a layer side by side, stages of layers in a row.

rank = stage * tp_size + share. A column-parallel layer (qkv, fc, gate, lm_head) is shared out by its outputs, a
row-parallel one (dense, proj) by its inputs; what is along other axes, and norms, every share has alike.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np

from ....runtime.errors import CheckpointError
from ..safetensors_file import SafetensorsFile
from ..weights import Array
from .config import TrtllmConfig

_LAYER = re.compile(r"transformer\.layers\.(\d+)\.(.+)")
_COLUMN, _ROW = ("fc", "gate", "lm_head"), ("dense", "proj")
_BY_OUTPUT = ("weight", "bias", "weights_scaling_factor", "per_channel_scale")
_TABLE, _HEAD = "transformer.vocab_embedding.weight", "lm_head.weight"
_RECIPROCAL = "kv_cache_rcp_scaling_factor"  # 1 / kv_cache_scaling_factor, which is there too


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A tensor in the files of one stage, one a share; `name` is the one they have."""

    files: tuple[SafetensorsFile, ...]
    name: str

    def shapes(self) -> list[tuple[int, ...]]:
        return [file.shape(self.name) for file in self.files]


def open_ranks(directory: Path, world_size: int) -> list[SafetensorsFile]:
    """Return the rank files; CheckpointError names one that is missing, or one too many."""
    there = sorted(directory.glob("rank*.safetensors"))
    wanted = [directory / f"rank{rank}.safetensors" for rank in range(world_size)]
    for path in wanted:
        if path not in there:
            raise CheckpointError(
                f"{path}: is missing, config.json has a mapping of {world_size} rank{'s' * (world_size > 1)}; give the "
                "complete checkpoint directory"
            )
    if len(there) > world_size:
        extra = next(path for path in there if path not in wanted)
        raise CheckpointError(
            f"{extra}: is one file more than the {world_size} of config.json's mapping; the directory mixes two "
            "checkpoints: convert the model again into an empty one"
        )
    return [SafetensorsFile(path) for path in wanted]


class RankStore:
    """The tensors of all ranks under their own names, layers counted through all stages.

    config : how the model is shared out; its hf has the numbers of heads
    raises : CheckpointError for ranks that do not fit together
    """

    def __init__(self, directory: Path, config: TrtllmConfig, files: list[SafetensorsFile]) -> None:
        self.where = str(directory)
        self.files = [directory / f"rank{rank}.safetensors" for rank in range(len(files))]
        self._config, self._ranks = config, files
        self._pieces: dict[str, _Piece] = {}
        self._types: dict[str, str] = {}
        self._vocab = self._stored_vocab = int(config.hf["vocab_size"])
        tp, first_layer = config.tp_size, 0
        for stage in range(config.pp_size):
            shares = tuple(files[stage * tp : (stage + 1) * tp])
            first_layer += self._add_stage(shares, first_layer)
        self._hide_derived()

    def _add_stage(self, shares: tuple[SafetensorsFile, ...], first_layer: int) -> int:
        """Add one stage's tensors, whose layers count from 0, and return how many layers it has."""
        names = set(shares[0].names())
        for share in shares[1:]:
            if set(share.names()) != names:
                odd = sorted(set(share.names()) ^ names)[0]
                raise CheckpointError(
                    f"{share.where}: tensor {odd!r} is in one of the ranks of a layer and not in another; the files "
                    "are of two checkpoints"
                )
            for name in names:
                first = shares[0].shape(name), shares[0].dtype(name)
                if (share.shape(name), share.dtype(name)) != first:
                    raise CheckpointError(
                        f"{share.where}: tensor {name!r} is {share.dtype(name)} {list(share.shape(name))}, the first "
                        f"rank of the layer has {first[1]} {list(first[0])}; the files are of two checkpoints"
                    )
        layers = 0
        for name in sorted(names):
            match = _LAYER.fullmatch(name)
            renamed = name
            if match:
                layers = max(layers, int(match[1]) + 1)
                renamed = f"transformer.layers.{int(match[1]) + first_layer}.{match[2]}"
            if renamed in self._pieces:
                raise CheckpointError(
                    f"{shares[0].where}: tensor {name!r} is in an earlier stage's ranks too"
                )
            self._pieces[renamed] = _Piece(shares, name)
        return layers

    def _hide_derived(self) -> None:
        """Leave out scales of the KV cache that only repeat others."""
        for name in list(self._pieces):
            before = name.removesuffix(_RECIPROCAL)
            if name != before and f"{before}kv_cache_scaling_factor" in self._pieces:
                del self._pieces[name]
        for name in list(self._pieces):
            before = name.removesuffix("kv_cache_scaling_factor")
            pair = (f"{before}k_cache_scaling_factor", f"{before}v_cache_scaling_factor")
            if name != before and all(one in self._pieces for one in pair):
                del self._pieces[name]

    def read_as_fp8(self, name: str) -> None:
        """Take a tensor of bytes for E4M3 numbers."""
        self._types[name] = "F8_E4M3"

    def trim_vocabulary(self, padding: int) -> int:
        """Leave out the rows of zeros that pad the vocabulary to a multiple of `padding`; return what is left.

        A token of that padding would have a logit of 0, which may be the largest there is.
        """
        if padding == 1:
            return self._vocab
        tables = [self.raw(name) for name in (_TABLE, _HEAD) if self.has(name)]
        if self._vocab % padding or any(
            table.ndim != 2 or len(table) != self._vocab or table.dtype.itemsize < 2 for table in tables
        ):
            return self._vocab
        last = self._vocab
        while last > max(1, self._vocab - padding + 1) and not any(table[last - 1].any() for table in tables):
            last -= 1
        self._vocab = last
        return last

    def leave_out(self, name: str) -> None:
        """Forget a tensor that says nothing new."""
        del self._pieces[name]

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        return self._pieces

    def has(self, name: str) -> bool:
        """Return whether there is such a tensor."""
        return name in self._pieces

    def dtype(self, name: str) -> str:
        """Return how a tensor is stored."""
        piece = self._pieces[name]
        return self._types.get(name) or piece.files[0].dtype(piece.name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, all shares together and the vocabulary's padding left out."""
        piece = self._pieces[name]
        shapes = piece.shapes()
        axis = self._axis(name, len(shapes[0]))
        whole = list(shapes[0])
        if axis is not None:
            whole[axis] = sum(one[axis] for one in shapes)
            if _is_qkv(name):
                whole[axis] = self._qkv_rows(whole[axis])
        if whole:
            whole[0] = self._vocab_rows(name, whole[0])
        return tuple(whole)

    def raw(self, name: str) -> Array:
        """Return a tensor as it is stored; a view of the file where there is one rank."""
        whole = self._joined(name)
        return whole.view(ml_dtypes.float8_e4m3fn) if name in self._types else whole

    def _joined(self, name: str) -> Array:
        piece = self._pieces[name]
        parts = [file.raw(piece.name) for file in piece.files]
        axis = self._axis(name, parts[0].ndim)
        if axis is None:
            self._check_alike(name, parts)
            whole = parts[0]
        else:
            whole = self._join_qkv(parts) if _is_qkv(name) else np.concatenate(parts, axis=axis)
        return whole[: self._vocab_rows(name, len(whole))] if whole.ndim else whole

    def get(self, name: str) -> Array:
        """Return a tensor of floats."""
        return self.raw(name)

    def stored(self) -> dict[str, int]:
        """Return the bytes of each type of tensor in the files, the most first."""
        sizes: Counter[str] = Counter()
        for file in self._ranks:
            for name in file.names():
                sizes[file.dtype(name)] += file.num_bytes(name)
        return dict(sizes.most_common())

    def _axis(self, name: str, ndim: int) -> int | None:
        """Return the axis along which the shares of a tensor lie; None where they are alike."""
        module, leaf = name.split(".")[-2:]
        if self._config.tp_size == 1 or ndim == 0:
            return None
        if module == "vocab_embedding":
            return self._config.embedding_axis
        if module in _COLUMN or module == "qkv":
            shared = leaf in _BY_OUTPUT and not (ndim == 1 and self._pieces[name].shapes()[0] == (1,))
            return 0 if shared else None
        if module in _ROW:
            if leaf in ("weight", "weights_scaling_factor") and ndim == 2:
                return 1
            return 0 if leaf == "prequant_scaling_factor" else None
        return None

    def _vocab_rows(self, name: str, rows: int) -> int:
        """Return the rows of a vocabulary that was padded to a multiple of tp_size, without the padding."""
        tp = self._config.tp_size
        is_vocab = name.split(".")[-2] in ("vocab_embedding", "lm_head")
        padded = (self._stored_vocab, -(-self._stored_vocab // tp) * tp)
        return self._vocab if is_vocab and rows in padded else rows

    def _heads(self) -> tuple[int, int]:
        return self._config.hf["num_attention_heads"], self._config.hf["num_key_value_heads"]

    def _qkv_rows(self, rows: int) -> int:
        """Return the rows of q, k and v once each, of `rows` in which small numbers of KV heads are repeated."""
        heads, kv_heads = self._heads()
        there = heads + 2 * max(kv_heads, self._config.tp_size)
        return rows // there * (heads + 2 * kv_heads) if rows % there == 0 else rows

    def _join_qkv(self, parts: list[Array]) -> Array:
        """Return [q; k; v] of shares [q_i; k_i; v_i]; where there are fewer KV heads than shares, several have one."""
        heads, kv_heads = self._heads()
        tp = self._config.tp_size
        share_heads, share_kv = heads // tp, max(1, kv_heads // tp)
        head = len(parts[0]) // (share_heads + 2 * share_kv)
        q, kv = share_heads * head, share_kv * head
        once = parts[:: max(1, tp // kv_heads)]
        return np.concatenate(
            [part[:q] for part in parts]
            + [part[q : q + kv] for part in once]
            + [part[q + kv :] for part in once]
        )

    def _check_alike(self, name: str, parts: list[Array]) -> None:
        first = np.ascontiguousarray(parts[0]).view(np.uint8)
        for rank, part in enumerate(parts[1:], 1):
            if part.shape != parts[0].shape or not np.array_equal(
                first, np.ascontiguousarray(part).view(np.uint8)
            ):
                raise CheckpointError(
                    f"{self.where}: tensor {name!r} differs between rank 0 and rank {rank} of a layer, and one number "
                    "for both would change the weights; convert the model again with tp_size 1"
                )


def check_shares(config: TrtllmConfig, where: str, fused_mlp: bool) -> None:
    """Raise CheckpointError for a model that cannot have been shared out like that."""
    tp = config.tp_size
    heads, kv_heads = config.hf["num_attention_heads"], config.hf["num_key_value_heads"]
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        raise CheckpointError(
            f"{where}: tp_size is {tp}, which does not go with {heads} heads and {kv_heads} KV heads; convert the "
            "model again with tp_size 1"
        )
    if tp > 1 and fused_mlp:
        raise CheckpointError(
            f"{where}: tp_size is {tp} and gate_proj and up_proj are one tensor, whose order in the ranks is not "
            "recorded; convert the model again with tp_size 1"
        )


def _is_qkv(name: str) -> bool:
    return name.split(".")[-2] == "qkv"
