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
    What stays float is rounded to the type it is stored in.
    """
    from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers

    with torch.no_grad():
        requantize_resmooth_fused_llm_layers(model)
        round_floats(model, quantized_names(model), dtype)
    return SimulatedModel(model, plan, dtype, facts)


def quantized_names(model: Any) -> set[str]:
    """Return the names of modules whose weight is quantized."""
    return {
        name
        for name, module in model.named_modules()
        if getattr(getattr(module, "weight_quantizer", None), "is_enabled", False)
    }
