"""Recipes on a real model: SmolLM2-135M, as far from the unquantized one as such recipes are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plansmith.calibration.calibrate import mean_kl
from plansmith.calibration.options import QuantizeOptions, plan_quantization
from plansmith.calibration.quantize import quantize_model

DEMO = Path(__file__).parents[2] / "demo" / "smollm2"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DEMO.is_dir(), reason="the demo checkpoint is not there: make demo"),
]


@pytest.fixture(scope="module")
def unquantized() -> Callable[[np.ndarray], torch.Tensor]:
    """Return token ids -> logits of the checkpoint itself."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()

    def logits(ids: np.ndarray) -> torch.Tensor:
        with torch.no_grad():
            found: Any = model(torch.from_numpy(ids)[None]).logits[0]
        return found

    return logits


@pytest.mark.parametrize(
    ("recipe", "most"),
    [("int8_wo", 0.01), ("fp8", 0.1), ("int4_awq", 0.3), ("int8_sq", 0.2), ("nvfp4", 0.5)],
)
def test_divergence(recipe: str, most: float, unquantized: Callable[[np.ndarray], torch.Tensor]) -> None:
    options = QuantizeOptions(recipe=recipe, calib_size=8, calib_length=128)
    held_out = plan_quantization(DEMO, QuantizeOptions(calib_size=8, calib_length=128)).samples
    assert held_out is not None
    ids = held_out.held_out[0]
    simulated = quantize_model(plan_quantization(DEMO, options))
    kl = mean_kl(unquantized(ids), torch.from_numpy(simulated.logits(ids)))
    assert 1e-6 < kl < most
