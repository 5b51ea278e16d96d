"""Sampling problems: random logits, rows of every kind, edits and masks, and the tokens that the rule draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from bench_device import Device
from plansmith.plugins.sampling import reference, run, spec

# The words of psm_sampling_row and psm_logit_edit (plansmith.h); runtime/batch.py has them too, but needs the core.
ROW = np.dtype(
    [("seed", np.uint64), ("output_idx", np.int32)]
    + [(name, np.float32) for name in ("temperature", "top_p", "min_p")]
    + [
        (name, np.int32)
        for name in ("top_k", "num_logprobs", "edit_begin", "edit_end", "mask_idx", "reserved")
    ]
)
EDIT = np.dtype([("id", np.int32), ("factor", np.float32), ("minus", np.float32), ("plus", np.float32)])
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "wide top-p": {"temperature": 1.5, "top_p": 0.95},  # tens of thousands of tokens are in the nucleus
    "top-k": {"temperature": 0.7, "top_k": 50},
    "min-p": {"temperature": 1.2, "min_p": 0.05},
    "top-k, top-p": {"temperature": 0.9, "top_k": 40, "top_p": 0.95},
    "penalties": {"temperature": 0.8, "top_p": 0.9, "edits": 400},
    "mask": {"temperature": 1.0, "mask": True},
    "log-probabilities": {"temperature": 1.0, "num_logprobs": 5},
}


class SamplingProblem:
    """Rows of some kinds over random logits on a device."""

    def __init__(self, device: Device, kinds: list[str], vocab_size: int, seed: int) -> None:
        """Make logits as a model's are: normal, with some that stand out."""
        chance = np.random.default_rng(seed)
        num_rows = len(kinds)
        self.kinds, self.vocab_size = kinds, vocab_size
        self.logits = device.normal(num_rows, vocab_size, scale=2.0)
        best = device.integers(0, vocab_size, num_rows, 8).long()
        self.logits.scatter_add_(1, best, device.normal(num_rows, 8, scale=4.0).abs_() + 3.0)
        self.rows = np.zeros(num_rows, ROW)
        self.rows["top_p"], self.rows["mask_idx"] = 1.0, -1
        self.rows["seed"] = chance.integers(0, 2**63, num_rows)
        self.rows["output_idx"] = chance.integers(0, 5000, num_rows)
        edits: list[np.ndarray[Any, Any]] = []
        masks: list[np.ndarray[Any, Any]] = []
        for row, kind in zip(self.rows, kinds, strict=True):
            for name, value in KINDS[kind].items():
                if name == "edits":
                    made = random_edits(chance, min(value, vocab_size // 2), vocab_size)
                    row["edit_begin"] = sum(len(one) for one in edits)
                    row["edit_end"] = row["edit_begin"] + len(made)
                    edits.append(made)
                elif name == "mask":
                    row["mask_idx"] = len(masks)
                    masks.append(chance.integers(0, 2**32, -(-vocab_size // 32), dtype=np.uint32))
                else:
                    row[name] = value
        self.edits = np.concatenate([*edits, np.zeros(1, EDIT)])
        self.masks = np.stack([*masks, np.zeros(-(-vocab_size // 32), np.uint32)])

        def on_device(array: np.ndarray[Any, Any], width: int) -> torch.Tensor:
            return torch.from_numpy(array.view(np.int32).reshape(-1, width).copy()).to(device.name)

        self._arguments = (
            on_device(self.rows, 12),
            on_device(self.edits, 4),
            on_device(self.masks, self.masks.shape[1]),
        )
        self.samples = torch.full((num_rows, spec.SAMPLE_WORDS), -7, dtype=torch.int32, device=device.name)
        self.workspace = run.make_workspace(num_rows, vocab_size, device.name)
        self.needs = {
            "sampled": bool((self.rows["temperature"] > 0).any()),
            "filtered": bool(((self.rows["top_k"] > 0) | (self.rows["top_p"] < 1)).any()),
            "logprobs": bool((self.rows["num_logprobs"] > 0).any()),
        }

    def sample(self) -> torch.Tensor:
        """Launch the kernels; return the samples' words (R, 44) int32."""
        run.sample(self.logits, *self._arguments, self.samples, self.workspace, **self.needs)
        return self.samples

    def tokens(self) -> torch.Tensor:
        """Return the tokens (R,) that the rule draws, on the host."""
        logits = self.logits.cpu().numpy()
        found = []
        for row, held in zip(self.rows, logits, strict=True):
            mask = self.masks[row["mask_idx"]] if row["mask_idx"] >= 0 else None
            edits = self.edits[row["edit_begin"] : row["edit_end"]]
            parameters = {
                name: row[name].item()
                for name in ("seed", "output_idx", "temperature", "top_p", "min_p", "top_k")
            }
            found.append(reference.draw(held, parameters, edits, mask))
        return torch.tensor(found, dtype=torch.int32)

    def log_probability(self, row: int, token: int) -> float:
        """Return the log of the model's own probability of a token."""
        return float(reference.log_probabilities(self.logits[row].cpu().numpy())[token])


def random_edits(chance: np.random.Generator, number: int, vocab_size: int) -> np.ndarray[Any, Any]:
    """Return edits of different ids in order: repetition, presence and bias, one in 50 forbidden."""
    made = np.zeros(number, EDIT)
    made["id"] = np.sort(chance.permutation(vocab_size)[:number])
    made["factor"] = chance.choice([1.0, 1.1, 1.3], number)
    made["minus"] = chance.choice([0.0, 0.5, 1.5], number)
    made["plus"] = np.where(chance.random(number) < 0.02, -np.inf, chance.normal(size=number))
    return made
