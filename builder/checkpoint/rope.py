"""Rotary embeddings: every supported scaling, applied once to the frequencies when a checkpoint is opened.

The arithmetic is float32 in the order of transformers' modeling_rope_utils, which the tests compare it with: a
frequency that differs in its last bit is a phase error of position * 2**-24.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...runtime.errors import CheckpointError
from ..spec import RopeSpec
from .config import is_number

F32 = npt.NDArray[np.float32]

_KEYS: dict[str, tuple[set[str], set[str]]] = {  # rope type -> needed keys, optional keys
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": (
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        set(),
    ),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
    "longrope": (
        {"short_factor", "long_factor", "original_max_position_embeddings"},
        {"factor", "attention_factor"},
    ),
}
_ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
SUPPORTED = tuple(_KEYS)


class RopeConfig:
    """One checked dictionary of rope parameters.

    parameters : in the transformers-5 form, `rope_type` and `rope_theta` included
    where : what to call it in an error
    head_dim : columns of a head
    max_position_embeddings : the model's own limit, scaling included
    max_seq_len : the longest sequence of the engine to be built, 0 = the model as published (longrope: short factors)
    """

    def __init__(
        self,
        parameters: Mapping[str, Any],
        *,
        where: str,
        head_dim: int,
        max_position_embeddings: int,
        max_seq_len: int = 0,
    ) -> None:
        self.where = where
        self.max_position_embeddings = max_position_embeddings
        self.max_seq_len = max_seq_len
        self._p = parameters
        self.kind = self._kind()
        self.theta = self.number("rope_theta", above=1.0)
        partial = self.number("partial_rotary_factor", 1.0)
        self.rotary_dim = int(head_dim * partial)
        if partial > 1.0 or self.rotary_dim < 2 or self.rotary_dim % 2:
            raise self.error(
                f"rotates {self.rotary_dim} of {head_dim} columns of a head, wanted an even number from 2 to "
                f"{head_dim}; check head_dim and partial_rotary_factor ({partial})"
            )

    def error(self, text: str) -> CheckpointError:
        """Return the error with the place named in front."""
        return CheckpointError(f"{self.where}: {text}")

    def _kind(self) -> str:
        kind = self._p.get("rope_type", self._p.get("type", "default"))
        if kind == "dynamic":
            raise self.error(
                "rope type 'dynamic' (NTK) recomputes its frequencies at every length, so no plan can hold them; "
                "use a checkpoint with 'yarn' or 'linear' scaling"
            )
        if not isinstance(kind, str) or kind not in _KEYS:
            raise self.error(f"rope type is {kind!r}, supported are {', '.join(SUPPORTED)}")
        needed, optional = _KEYS[kind]
        missing = sorted(key for key in needed if self._p.get(key) is None)
        if missing:
            raise self.error(f"rope type {kind!r} needs {', '.join(missing)}; the file is incomplete")
        unknown = sorted(set(self._p) - needed - optional - _ALWAYS)
        if unknown:
            raise self.error(
                f"rope type {kind!r} has keys that plansmith does not know: {', '.join(unknown)}; "
                "remove them if they have no effect"
            )
        return kind

    def number(self, key: str, default: float | None = None, above: float = 0.0) -> float:
        """Return a finite number greater than `above`; `default` stands for a missing key or null."""
        value: Any = self._p.get(key)
        value = default if value is None else value
        if not is_number(value) or float(value) <= above:
            raise self.error(f"rope parameter {key} is {value!r}, it must be a number greater than {above}")
        return float(value)

    def factors(self, key: str) -> F32:
        """Return one factor a frequency, (rotary_dim / 2,) float32."""
        value = self._p[key]
        if not isinstance(value, list) or len(value) != self.rotary_dim // 2:
            got = f"{len(value)} numbers" if isinstance(value, list) else repr(value)
            raise self.error(f"rope parameter {key} has {got}, wanted a list of {self.rotary_dim // 2}")
        if not all(is_number(f) and f > 0 for f in value):
            raise self.error(f"rope parameter {key} must hold numbers greater than 0")
        return np.array(value, np.float32)

    def flag(self, key: str, default: bool) -> bool:
        """Return a true or false key."""
        value = self._p.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"rope parameter {key} is {value!r}, it must be true or false")
        return value

    @property
    def wavelengths(self) -> F32:
        """Return theta ** (2i / rotary_dim), (rotary_dim / 2,) float32."""
        exponent = np.arange(0, self.rotary_dim, 2, dtype=np.float32) / np.float32(self.rotary_dim)
        # In float64 and rounded once: numpy's and torch's float32 powers differ in the last bit.
        waves: F32 = np.power(np.float64(self.theta), exponent.astype(np.float64)).astype(np.float32)
        return waves


def make_rope(config: RopeConfig) -> RopeSpec:
    """Return the embedding with its scaling applied; CheckpointError names the parameter that is wrong."""
    inv_freq, mscale = _FORMULAS[config.kind](config)
    return RopeSpec(
        inv_freq=tuple(float(f) for f in inv_freq),
        rotary_dim=config.rotary_dim,
        mscale=mscale,
        kind=config.kind,
    )


def _default(config: RopeConfig) -> tuple[F32, float]:
    return np.float32(1.0) / config.wavelengths, 1.0


def _linear(config: RopeConfig) -> tuple[F32, float]:
    return np.float32(1.0) / config.wavelengths / np.float32(config.number("factor")), 1.0


def _llama3(config: RopeConfig) -> tuple[F32, float]:
    """Long waves are divided by the factor, short ones kept, those between blended."""
    inv_freq = np.float32(1.0) / config.wavelengths
    factor = np.float32(config.number("factor"))
    low, high = config.number("low_freq_factor"), config.number("high_freq_factor")
    old_len = config.number("original_max_position_embeddings")
    if high <= low:
        raise config.error(f"high_freq_factor ({high}) must be greater than low_freq_factor ({low})")
    wave = np.float32(2 * math.pi) / inv_freq
    smooth = (np.float32(old_len) / wave - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = np.where(wave > old_len / low, inv_freq / factor, inv_freq)
    between = (wave >= old_len / high) & (wave <= old_len / low)
    return np.where(between, blended, scaled).astype(np.float32), 1.0


def _yarn(config: RopeConfig) -> tuple[F32, float]:
    """YaRN (arXiv 2309.00071): a ramp between extrapolated and interpolated frequencies."""
    dim, theta = config.rotary_dim, config.theta
    factor = config.number("factor")
    original = config.number("original_max_position_embeddings")

    def correction_dim(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = correction_dim(config.number("beta_fast", 32.0))
    high = correction_dim(config.number("beta_slow", 1.0))
    if config.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step, without a division by zero
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    extrapolated = np.float32(1.0) / config.wavelengths
    interpolated = np.float32(1.0) / (np.float32(factor) * config.wavelengths)
    inv_freq = interpolated * (np.float32(1) - keep) + extrapolated * keep
    return inv_freq.astype(np.float32), _yarn_mscale(config, factor)


def _yarn_mscale(config: RopeConfig, factor: float) -> float:
    def get(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if config._p.get("attention_factor") is not None:
        return config.number("attention_factor")
    if config._p.get("mscale") and config._p.get("mscale_all_dim"):
        return get(config.number("mscale")) / get(config.number("mscale_all_dim"))
    return get(1.0)


def _longrope(config: RopeConfig) -> tuple[F32, float]:
    """LongRoPE (arXiv 2402.13753): the long factors for an engine longer than the original training length.

    transformers chooses anew in every forward pass by the longest position in it; a plan cannot, and a request
    whose tokens depend on its neighbours' lengths would not be batch invariant. So the engine's max_seq_len decides.
    """
    original = config.number("original_max_position_embeddings", above=1.0)
    factor = config.number("factor", config.max_position_embeddings / original)
    mscale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    mscale = config.number("attention_factor", mscale)
    short, long = config.factors("short_factor"), config.factors("long_factor")
    ext = long if config.max_seq_len > original else short
    return np.float32(1.0) / (ext * config.wavelengths), mscale


_FORMULAS: dict[str, Callable[[RopeConfig], tuple[F32, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
