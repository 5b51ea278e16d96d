"""GPTQ as AutoGPTQ and GPTQModel write it: 4- or 8-bit codes with a scale and a zero point for each group of inputs.

qweight int32 (K * bits / 32, N): a word holds neighbouring inputs; qzeros int32 (K / G, N * bits / 32): a word holds
neighbouring outputs, each less one in version 1; scales float (K / G, N); g_idx int32 (K,).
w = (code - zero) * scale; symmetric ones have the middle, 8 or 128, as every zero point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...scheme import ROW, KvFormat, QuantizedWeight, Scheme
from ..config import Config
from .fields import check_pack_dtype, finish, first_name, flag, quant_fields
from .int4 import check_order, row_group, spread
from .module import I32, Layer, Module
from .reader import Reader
from .unpack import words_along_columns, words_along_rows


class GptqReader:
    """Reader of GPTQ checkpoints.

    zero_offset : what is added to a stored zero point: 1 in version 1, 0 in version 2
    order : what the config says of the order of inputs, "" where they are in plain order
    """

    kv: KvFormat = "float"
    kv_names = ("", "")
    needs_kv_scales = False

    def __init__(
        self, producer: str, bits: int, group: int, symmetric: bool, zero_offset: int, order: str
    ) -> None:
        self.producer = producer
        self._bits, self._group, self._symmetric, self._offset = bits, group, symmetric, zero_offset
        self._order = order

    def layer(self, module: Module) -> Layer | None:
        """Return how a layer is stored; see Reader."""
        if module.is_float:
            return None
        n, k, bits = module.rows, module.columns, self._bits
        per_word = 32 // bits
        if n % per_word or k % per_word:
            raise module.error(
                f"has {n} outputs and {k} inputs, GPTQ packs {per_word} into a word; the configs "
                "belong to another model"
            )
        group = k if self._group == -1 else self._group
        count = module.groups(group)
        weight = module.take("qweight", I32, (k // per_word, n))
        scale = module.scales("scales", (count, n))
        zeros = self._zeros(module, count)
        check_order(module, "g_idx", group, self._order)
        module.drop_zero_bias()
        scheme = self._scheme(group, k)

        def read() -> QuantizedWeight:
            codes, scales, zero = words_along_rows(weight(), bits), np.ascontiguousarray(scale().T), zeros()
            is_row = scheme.weight_group == ROW
            scales = scales[:, 0] if is_row else spread(scales, k // scheme.weight_group)
            if self._symmetric:
                return QuantizedWeight((codes - np.uint8(1 << (bits - 1))).view(np.int8), scales)
            wide = spread(np.ascontiguousarray(zero.T).view(np.int8), k // scheme.weight_group)
            return QuantizedWeight(codes.view(np.int8), scales, wide)

        return Layer(f"int{bits}_gptq", scheme, read)

    def finish(self) -> None:
        """Nothing is named that has to be there."""

    def _scheme(self, group: int, columns: int) -> Scheme:
        if self._bits == 8:
            return Scheme("int8", ROW if self._group == -1 else group)
        held = row_group(columns) if self._group == -1 else group
        return Scheme("int4", held, zero_points=not self._symmetric)

    def _zeros(self, module: Module, count: int) -> Callable[[], np.ndarray]:
        """Return the reader of zero points (groups, N) uint8, checked."""
        packed = module.take("qzeros", I32, (count, module.rows * self._bits // 32))
        middle, last = 1 << (self._bits - 1), (1 << self._bits) - 1

        def read() -> np.ndarray:
            zeros = words_along_columns(packed(), self._bits).astype(np.int16) + self._offset
            if self._symmetric and bool((zeros != middle).any()):
                raise module.error(
                    f"has zero points other than {middle}, and the config says sym true; correct it to false, or "
                    "checkpoint_format to what it is"
                )
            if bool((zeros > last).any()):
                raise module.error(
                    f"has a zero point of {last + 1}, which {self._bits} bits do not hold; save it as "
                    "checkpoint_format gptq_v2"
                )
            return zeros.astype(np.uint8)

        return read


def read_gptq(data: Mapping[str, Any], where: str) -> Reader:
    """Return the reader for a quantization_config of quant_method "gptq"; CheckpointError for other variants."""
    config = quant_fields(data, where)
    bits = config.integer("bits", low=0)
    if bits not in (4, 8):
        raise config.error(f"bits is {bits}, GPTQ is read with 4 and 8; quantize the model to one of those")
    group = config.integer("group_size", low=-1)
    symmetric = flag(config, "sym", True)
    if bits == 8 and not symmetric:
        raise config.error(
            "sym is false with 8 bits, zero points are read with 4 bits alone; quantize it with sym"
        )
    order = "desc_act true" if flag(config, "desc_act", False) else ""
    _no_marlin(config)
    _no_overrides(config)
    version = first_name(config, ("checkpoint_format", "format"), "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise config.error(
            f"checkpoint_format is {version!r}, read are 'gptq' and 'gptq_v2'; the others are packed for one kernel, "
            "so save it in one of those"
        )
    check_pack_dtype(config)
    producer = _producer(config)
    finish(config)
    return GptqReader(producer, bits, group, symmetric, 1 if version == "gptq" else 0, order)


def _no_marlin(config: Config) -> None:
    if flag(config, "is_marlin_format", False):
        raise config.error(
            "is_marlin_format is true: its weights are shuffled for one GPU's kernels; give the GPTQ checkpoint that "
            "it was made of"
        )


def _no_overrides(config: Config) -> None:
    """Layers that `dynamic` leaves out ("-:") are plain and show it; other bits or groups a layer are not read."""
    value = config.raw("dynamic") or {}
    if not isinstance(value, dict) or any(not str(name).startswith("-:") for name in value):
        raise config.error(
            f"dynamic is {str(value)[:60]}: layers with bits or groups of their own are not read; quantize all alike"
        )


def _producer(config: Config) -> str:
    meta = config.raw("meta")
    found = meta.get("quantizer") if isinstance(meta, dict) else None
    found = found[0] if isinstance(found, list) and found else found
    return found.replace(":", " ") if isinstance(found, str) else "gptq"
