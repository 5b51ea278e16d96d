"""NVFP4 in plain torch against ModelOpt's stored form and the E2M1 numbers of ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from plansmith.calibration.fp4 import round_input, round_weight, to_e2m1


def test_every_number_and_every_tie_rounds_as_ml_dtypes_has_it() -> None:
    x = np.concatenate([np.arange(-6, 6.001, 0.125), np.random.default_rng(0).normal(0, 2.5, 4096)])
    x = np.clip(x, -6, 6).astype(np.float32)
    expected = x.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(to_e2m1(torch.from_numpy(x)).numpy(), expected)


def test_a_weight_is_what_modelopt_stores() -> None:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(48, 64, generator=generator) * torch.logspace(-6, 2, 48)[:, None]
    amax = weight.abs().max()
    stored, scale, outer = NVFP4QTensor.quantize(weight.clone(), 16, None, amax / (6 * 448))
    expected = stored.dequantize(torch.float32, scale=scale, double_scale=outer, block_sizes={-1: 16})
    torch.testing.assert_close(round_weight(weight, amax), expected, rtol=1e-6, atol=0)


def test_blocks_of_an_input_whose_scale_is_too_small_become_zero() -> None:
    x = torch.full((1, 48), 1e-7)
    x[0, :16], x[0, 16:32] = 3.0, 0.0
    rounded = round_input(x, torch.tensor(3.0))
    assert torch.equal(rounded, torch.where(x == 3.0, x, 0.0))


def test_inputs_beyond_what_was_calibrated_are_cut_off() -> None:
    rounded = round_input(torch.full((1, 16), 10.0), torch.tensor(4.0))
    assert torch.equal(rounded, torch.full((1, 16), 4.0))
