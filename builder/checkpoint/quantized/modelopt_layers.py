"""ModelOpt's algorithms: the tensors that each stores for a layer, and the scheme they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ...scheme import FP4_GROUP, ROW, WHOLE, InputFormat, QuantizedInput, QuantizedWeight, Scheme
from .module import I8, U8, Layer, Module, Read
from .unpack import fp4, nibbles_along_columns, nibbles_along_rows


def _fp8(m: Module, group: int | None) -> Layer:
    weight, scale = m.fp8("weight", (m.rows, m.columns)), m.scales("weight_scale", (), (1,))
    return Layer(
        "fp8",
        Scheme("fp8", WHOLE, input="fp8", input_group=WHOLE),
        lambda: QuantizedWeight(weight(), scale().reshape(())),
        _static_input(m),
    )


def _fp8_per_channel(m: Module, group: int | None) -> Layer:
    weight, scale = m.fp8("weight", (m.rows, m.columns)), m.scales("weight_scale", (m.rows,), (m.rows, 1))
    return Layer(
        "fp8_per_channel",
        Scheme("fp8", ROW, input="fp8", input_group=ROW),
        lambda: QuantizedWeight(weight(), scale().reshape(-1)),
    )


def _int8_sq(m: Module, group: int | None) -> Layer:
    pre_scale = _pre_scale(m)
    scheme = Scheme("int8", ROW, input="int8", input_group=WHOLE, pre_scale=pre_scale is not None)
    return Layer("int8_sq", scheme, _int8(m), _static_input(m, pre_scale))


def _int8_wo(m: Module, group: int | None) -> Layer:
    return Layer("int8_wo", Scheme("int8", ROW), _int8(m))


def _int4(m: Module, group: int | None) -> Layer:
    pre_scale = _pre_scale(m)
    scheme = Scheme("int4", _int4_group(m, group), pre_scale=pre_scale is not None)
    return Layer("int4_awq" if pre_scale else "int4_wo", scheme, _int4_blocks(m, scheme), _input(pre_scale))


def _w4a8(m: Module, group: int | None) -> Layer:
    pre_scale = _pre_scale(m)
    scheme = Scheme(
        "int4",
        _int4_group(m, group),
        input="fp8",
        input_group=WHOLE,
        pre_scale=pre_scale is not None,
        fp8_grid=True,
    )
    return Layer("w4a8_awq", scheme, _int4_blocks(m, scheme), _static_input(m, pre_scale))


def _nvfp4(name: str, input_format: InputFormat) -> Callable[[Module, int | None], Layer]:
    def read(m: Module, group: int | None) -> Layer:
        if group not in (None, FP4_GROUP):
            raise m.error(
                f"has groups of {group}, NVFP4 has groups of {FP4_GROUP} and no other; quantize it again with those"
            )
        groups = m.groups(FP4_GROUP)
        weight = m.take("weight", U8, (m.rows, m.columns // 2))
        scale, scale_2 = m.fp8_scales("weight_scale", (m.rows, groups)), m.number("weight_scale_2")
        pre_scale = _pre_scale(m)
        return Layer(
            name,
            Scheme("fp4", FP4_GROUP, input=input_format, pre_scale=pre_scale is not None),
            lambda: QuantizedWeight(fp4(nibbles_along_columns(weight())), scale(), scale_2=scale_2()),
            _static_input(m, pre_scale) if input_format == "fp4" else _input(pre_scale),
        )

    return read


LAYERS: Mapping[str, Callable[[Module, int | None], Layer]] = {
    "FP8": _fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": _fp8_per_channel,
    "W8A8_SQ_PER_CHANNEL": _int8_sq,
    "W8A16": _int8_wo,
    "W4A16_AWQ": _int4,
    "W4A8_AWQ": _w4a8,
    "NVFP4": _nvfp4("nvfp4", "fp4"),
    "NVFP4_AWQ": _nvfp4("nvfp4_awq", "fp4"),
    "W4A16_NVFP4": _nvfp4("nvfp4_wo", "float"),
}


def _int8(m: Module) -> Callable[[], QuantizedWeight]:
    weight, scale = (
        m.take("weight", I8, (m.rows, m.columns)),
        m.scales("weight_scale", (m.rows,), (m.rows, 1)),
    )
    return lambda: QuantizedWeight(weight(), scale().reshape(-1))


def _int4_group(m: Module, group: int | None) -> int:
    """Return the group size; config.json alone does not say it, and then the scales' shape does."""
    if group is None and m.has("weight_scale") and len(m.shape("weight_scale")) == 2:
        group = m.columns // max(1, m.shape("weight_scale")[1])
    return group or 128


def _int4_blocks(m: Module, scheme: Scheme) -> Callable[[], QuantizedWeight]:
    """Return the reader of bytes (N / 2, K), each two neighbouring outputs, with scales (N, K / group)."""
    groups = m.groups(scheme.weight_group)
    if m.rows % 2:
        raise m.error(
            f"has {m.rows} outputs, ModelOpt packs two into a byte; the configs belong to another model"
        )
    weight = m.take("weight", U8, (m.rows // 2, m.columns))
    scale = m.scales("weight_scale", (m.rows, groups))
    if not scheme.fp8_grid:
        return lambda: QuantizedWeight(nibbles_along_rows(weight()), scale())
    scale_2 = m.number("weight_scale_2")
    return lambda: QuantizedWeight(nibbles_along_rows(weight()), scale(), scale_2=scale_2())


def _pre_scale(m: Module) -> Read | None:
    if not m.has("pre_quant_scale"):
        return None
    read = m.scales("pre_quant_scale", (m.columns,))

    def positive() -> np.ndarray:
        factors = read()
        if bool((factors == 0).any()):
            name = m.stored_name("pre_quant_scale")
            raise m.error(f"has zeros in {name!r}; the checkpoint is damaged: get it again")
        return factors

    return positive


def _input(pre_scale: Read | None) -> Callable[[], QuantizedInput]:
    return lambda: QuantizedInput(pre_scale=None if pre_scale is None else pre_scale())


def _static_input(m: Module, pre_scale: Read | None = None) -> Callable[[], QuantizedInput]:
    scale = m.number("input_scale")
    return lambda: QuantizedInput(scale(), None if pre_scale is None else pre_scale())
