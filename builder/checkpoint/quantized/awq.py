"""AWQ as AutoAWQ writes it ("gemm"): 4-bit codes 0..15 with a scale and a zero point for each group of inputs.

qweight int32 (K, N / 8) and qzeros int32 (K / G, N / 8): a word holds 8 neighbouring outputs in the order
0 2 4 6 1 3 5 7; scales float (K / G, N). w = (code - zero) * scale. AWQ's factors are in the layers before already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...scheme import KvFormat, QuantizedWeight, Scheme
from .fields import check_pack_dtype, finish, first_name, flag, is_listed, names, quant_fields
from .int4 import row_group, spread
from .module import I32, Layer, Module
from .reader import Reader
from .unpack import awq_words


class AwqReader:
    """Reader of AWQ checkpoints."""

    kv: KvFormat = "float"
    kv_names = ("", "")
    needs_kv_scales = False

    def __init__(self, where: str, group: int, has_zeros: bool, skipped: tuple[str, ...]) -> None:
        self.producer = "awq"
        self._where, self._group, self._has_zeros, self._skipped = where, group, has_zeros, skipped

    def layer(self, module: Module) -> Layer | None:
        """Return how a layer is stored; see Reader."""
        if module.is_float:
            return None
        if is_listed(module.name, self._skipped):
            raise module.error(f"is quantized, and {self._where} lists it in modules_to_not_convert")
        n, k = module.rows, module.columns
        group = k if self._group == -1 else self._group
        count = module.groups(group)
        if n % 8:
            raise module.error(
                f"has {n} outputs, AWQ packs 8 into a word; the configs belong to another model"
            )
        weight = module.take("qweight", I32, (k, n // 8))
        scale = module.scales("scales", (count, n))
        module.drop_zero_bias()
        held = group if self._group != -1 else row_group(k)
        zeros = self._zeros(module, count)

        def read() -> QuantizedWeight:
            codes = awq_words(weight()).view(np.int8)
            scales = spread(np.ascontiguousarray(scale().T), k // held)
            if not self._has_zeros:
                zeros()
                codes -= np.int8(8)
                return QuantizedWeight(codes, scales)
            return QuantizedWeight(codes, scales, spread(zeros().view(np.int8), k // held))

        return Layer("int4_awq", Scheme("int4", held, zero_points=self._has_zeros), read)

    def finish(self) -> None:
        """Nothing is named that has to be there."""

    def _zeros(self, module: Module, count: int) -> Callable[[], np.ndarray]:
        """Return the reader of zero points (N, groups); without them all must be 8, the middle."""
        if not self._has_zeros and not module.has("qzeros"):
            return lambda: np.zeros((0, 0), np.uint8)
        packed = module.take("qzeros", I32, (count, module.rows // 8))

        def read() -> np.ndarray:
            zeros = awq_words(packed())
            if not self._has_zeros and bool((zeros != 8).any()):
                raise module.error(
                    f"has zero points other than 8, and {self._where} says zero_point false; correct it to true"
                )
            return zeros

        return read


def read_awq(data: Mapping[str, Any], where: str) -> Reader:
    """Return the reader for a quantization_config of quant_method "awq"; CheckpointError for other variants."""
    config = quant_fields(data, where)
    bits = config.integer("bits" if config.has("bits") else "w_bit", low=0)
    if bits != 4:
        raise config.error(f"bits is {bits}, AWQ is read with 4; quantize the model to 4 bits")
    version = first_name(config, ("version", "format", "checkpoint_format"), "gemm")
    check_pack_dtype(config)
    if version != "gemm":
        raise config.error(
            f"version is {version!r}: its words are packed for other kernels, only 'gemm' is read; convert it or take "
            "the gemm checkpoint of the same model"
        )
    if str(config.raw("backend")).lower() == "llm-awq":
        raise config.error("backend is 'llm-awq', which packs in another order; take a checkpoint of AutoAWQ")
    group = config.integer("group_size" if config.has("group_size") else "q_group_size", low=-1)
    zeros, skipped = flag(config, "zero_point", True), names(config, "modules_to_not_convert")
    config.use(
        "desc_act", "sym"
    )  # zero_point says what sym would; transformers writes sym true beside either
    if data.get("desc_act"):
        raise config.error("desc_act is true, AWQ has no such order; the file is of another format")
    finish(config)
    return AwqReader(where, group, zeros, skipped)
