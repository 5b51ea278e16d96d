"""Scales whose products leave float32, although each of them is a number: what they mean is infinite or nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...scheme import FP4_MAX, FP8_MAX, QuantizedInput, QuantizedWeight, Scheme

_LIMITS = np.finfo(np.float32)
_LARGEST, _SMALLEST = float(_LIMITS.max), float(_LIMITS.tiny)  # below tiny, bits are lost and 1 / x overflows

_WEIGHT_CODES: Mapping[str, float] = {"int8": 128.0, "int4": 15.0, "fp8": FP8_MAX, "fp4": FP4_MAX}
_INPUT_CODES: Mapping[str, float] = {"int8": 128.0, "fp8": FP8_MAX, "fp4": FP4_MAX * FP8_MAX, "float": 1.0}


def weight_fault(weight: QuantizedWeight, scheme: Scheme, pre_scale: float = 1.0) -> str | None:
    """Return what is wrong with a weight's scales, None for nothing; they are finite and not negative already.

    pre_scale : the largest of the factors that the dequantized weight is multiplied by
    """
    top = float(weight.scale.astype(np.float32).max()) if weight.scale.size else 0.0
    if scheme.fp8_grid and (fault := number_fault(weight.scale_2, FP8_MAX)):
        return f"the scale of its FP8 grid {fault}"
    if scheme.weight == "fp4":
        if fault := number_fault(weight.scale_2):
            return f"the factor on its scales {fault}"
        top *= weight.scale_2
    if 0.0 < top < _SMALLEST:
        return f"its largest scale is {top:.3g}, below {_SMALLEST:.3g} all of it vanishes"
    largest = top * _WEIGHT_CODES[scheme.weight] * max(pre_scale, 1.0)
    return None if largest <= _LARGEST else f"its scales reach {top:.3g}, its weights {largest:.3g}"


def input_fault(held: QuantizedInput, scheme: Scheme) -> str | None:
    """Return what is wrong with what was calibrated for an input, None for nothing."""
    if scheme.is_static and (fault := number_fault(held.scale, _INPUT_CODES[scheme.input])):
        return f"the scale of its input {fault}"
    factors = held.pre_scale
    if factors is None or not factors.size:
        return None
    for factor in (float(factors.min()), float(factors.max())):
        if fault := number_fault(factor):
            return f"a factor on its input {fault}"
    return None


def number_fault(value: float, largest_code: float = 1.0) -> str | None:
    """Return what is wrong with a scale that is multiplied with codes up to `largest_code`, None for nothing."""
    if not value >= _SMALLEST:
        return (
            f"is {value:.3g}, which is {'no positive number' if not value > 0 else 'too small for float32'}"
        )
    if not value * largest_code <= _LARGEST:
        return f"is {value:.3g}, which is too large for float32"
    return None
