"""The quantized model as it is going to be stored, run by ModelOpt's own simulation of its rounding."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .calibrate import logits
from .model import round_floats
from .options import QuantizePlan


class SimulatedModel:
    """A calibrated model that rounds weights, inputs and KV as its checkpoint says, in floating point.

    model : the transformers model with ModelOpt's quantizers; its forward is the simulation
    dtype : what its unquantized weights are stored as
    facts : what calibration found: alphas, recipes of layers, losses
    Not for several threads. After save() it is spent: the weights are packed in place.
    """

    def __init__(self, model: Any, plan: QuantizePlan, dtype: torch.dtype, facts: dict[str, Any]) -> None:
        self.model = model
        self.plan = plan
        self.dtype = dtype
        self.facts = facts

    def logits(self, token_ids: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Return the logits (T, V) of one sequence of T token ids."""
        device = next(self.model.parameters()).device
        ids = torch.from_numpy(np.asarray(token_ids, np.int64).reshape(1, -1)).to(device)
        result: npt.NDArray[np.float32] = logits(self.model, ids)[0].cpu().numpy()
        return result

    @contextlib.contextmanager
    def capture_inputs(self, layers: list[str]) -> Any:
        """Give a dictionary that fills with the last input (B, L, K) of each of these layers, before any rounding."""
        seen: dict[str, npt.NDArray[np.float32]] = {}

        def keep(name: str) -> Any:
            return lambda module, arguments: seen.update({name: arguments[0].detach().float().cpu().numpy()})

        handles = [self.model.get_submodule(one).register_forward_pre_hook(keep(one)) for one in layers]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    def save(self, directory: Path) -> dict[str, Any]:
        """Write the checkpoint into an existing directory and return the layers as they were written; once."""
        from .export import write_checkpoint

        return write_checkpoint(self, directory)


def simulate(model: Any, plan: QuantizePlan, dtype: torch.dtype, facts: dict[str, Any]) -> SimulatedModel:
    """Return a calibrated model as what its export is going to hold.

    ModelOpt's export gives the layers that read one input the same factors and outer scales, and folds AWQ's factors
    into the norm before them; this is done here, so that the simulation has it too (the export finds nothing left).
    What stays float is rounded to the type it is stored in. The export divides a weight by its scale where the
    simulation multiplies by the inverse, so ties fall differently (0.07 % of SmolLM2's FP8 weights, whose values are
    few): weights are put on the export's grid here, where the simulation leaves them.
    """
    from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers

    with torch.no_grad():
        requantize_resmooth_fused_llm_layers(model)
        names = quantized_names(model)
        for name in sorted(names):
            _round_as_exported(model.get_submodule(name))
        round_floats(model, names, dtype)
    return SimulatedModel(model, plan, dtype, facts)


def _round_as_exported(module: Any) -> None:
    """Put an INT8, FP8 or INT4 weight on the grid of codes that ModelOpt's export writes, in place."""
    quantizer = module.weight_quantizer
    first = quantizer[0] if isinstance(quantizer, torch.nn.Sequential) else quantizer
    if first.num_bits not in (8, 4, (4, 3)):
        return  # FP4 is rounded the same way in both
    weight = module.weight
    blocks = (
        weight.float().unflatten(-1, (-1, first.block_sizes[-1])) if first.num_bits == 4 else weight.float()
    )
    scale = (first.amax.float() / first.maxbound).reshape(-1)
    if scale.numel() > 1:
        scale = scale.reshape(*blocks.shape[:-1], 1)
    codes = blocks / scale
    if first.num_bits == (4, 3):
        codes = codes.to(torch.float8_e4m3fn).float()
    else:
        low, high = (-8, 7) if first.num_bits == 4 else (-128, 127)
        codes = codes.round().clamp(low, high)
    weight.copy_((codes * scale).reshape(weight.shape))


def quantized_names(model: Any) -> set[str]:
    """Return the names of modules whose weight is quantized."""
    return {
        name
        for name, module in model.named_modules()
        if getattr(getattr(module, "weight_quantizer", None), "is_enabled", False)
    }
