"""quant_method "fp8": E4M3 weights with a scale for each block of 128 x 128 (DeepSeek's form), or one for the tensor.

weight_scale_inv, in spite of its name, is what a code is multiplied by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...scheme import ROW, WHOLE, KvFormat, QuantizedInput, QuantizedWeight, Scheme
from .blocks import block_grid, by_output, is_block
from .fields import finish, is_listed, names, quant_fields
from .module import Layer, Module
from .reader import Reader


class Fp8Reader:
    """Reader of fine-grained and per-tensor FP8 checkpoints.

    block : rows and columns that share a scale, None = the whole tensor
    """

    kv: KvFormat = "float"
    kv_names = ("", "")
    needs_kv_scales = False

    def __init__(
        self, where: str, block: tuple[int, int] | None, is_static: bool, skipped: tuple[str, ...]
    ) -> None:
        self.producer = "fp8"
        self._where, self._block, self._is_static, self._skipped = where, block, is_static, skipped

    def layer(self, module: Module) -> Layer | None:
        """Return how a layer is stored; see Reader."""
        if module.is_float:
            return None
        if is_listed(module.name, self._skipped):
            raise module.error(f"is quantized, and {self._where} lists it among those that are not")
        return self._whole(module) if self._block is None else self._blocks(module, *self._block)

    def finish(self) -> None:
        """Nothing is named that has to be there."""

    def _blocks(self, m: Module, rows: int, columns: int) -> Layer:
        weight = m.fp8("weight", (m.rows, m.columns))
        scale = m.scales("weight_scale_inv", block_grid(m, rows, columns))
        return Layer(
            "fp8_blocks",
            Scheme("fp8", columns, input="fp8", input_group=columns),
            lambda: QuantizedWeight(weight(), by_output(scale(), rows, m.rows)),
        )

    def _whole(self, m: Module) -> Layer:
        weight = m.fp8("weight", (m.rows, m.columns))
        scale = m.scales("weight_scale_inv" if m.has("weight_scale_inv") else "weight_scale", (), (1,))
        scheme = Scheme("fp8", WHOLE, input="fp8", input_group=WHOLE if self._is_static else ROW)
        recipe = "fp8" if self._is_static else "fp8_dynamic"
        if not self._is_static:
            return Layer(recipe, scheme, lambda: QuantizedWeight(weight(), scale().reshape(())))
        calibrated = m.number("activation_scale" if m.has("activation_scale") else "input_scale")
        return Layer(
            recipe,
            scheme,
            lambda: QuantizedWeight(weight(), scale().reshape(())),
            lambda: QuantizedInput(calibrated()),
        )


def read_fp8(data: Mapping[str, Any], where: str) -> Reader:
    """Return the reader for a quantization_config of quant_method "fp8"; CheckpointError for other variants."""
    config = quant_fields(data, where)
    scheme = config.choice("activation_scheme", {"dynamic": "dynamic", "static": "static"})
    if config.has("fmt"):
        config.choice("fmt", {"e4m3": "e4m3", "float8_e4m3fn": "e4m3"})
    if str(config.raw("scale_fmt") or "float").lower() != "float":
        raise config.error(
            f"scale_fmt is {config.raw('scale_fmt')!r}: inputs with scales that are powers of two are not supported; "
            "give a checkpoint with float scales"
        )
    block = config.raw("weight_block_size")
    if block is not None and not is_block(block):
        raise config.error(f"weight_block_size is {block!r}, it must be [rows, columns]; the file is damaged")
    if block is not None and scheme == "static":
        raise config.error("activation_scheme is 'static' with blocks of weights, whose inputs are dynamic")
    if config.raw("kv_cache_scheme") is not None:
        raise config.error(
            f"kv_cache_scheme is {config.raw('kv_cache_scheme')!r}, which is read of compressed-tensors and ModelOpt "
            "alone; convert the checkpoint to one of those"
        )
    if names(config, "modules_to_convert"):
        raise config.error(
            "modules_to_convert is set, only linear layers are read quantized; save it without"
        )
    config.use("expert_dtype")  # of mixtures of experts, which are refused as such
    skipped = names(config, "modules_to_not_convert", "ignored_layers")
    finish(config)
    return Fp8Reader(where, None if block is None else (block[0], block[1]), scheme == "static", skipped)
