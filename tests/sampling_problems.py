"""Rows to draw from, of every kind of logits and parameters, and the kernels' answer to them."""

from __future__ import annotations

from typing import Any

import fast_interpreter  # noqa: F401
import numpy as np
import torch
from plansmith.plugins.sampling import reference, run, spec
from plansmith.runtime.batch import LOGIT_EDIT, ROW_SAMPLE, SAMPLING_ROW

LOGITS = ("normal", "few values", "all equal", "one candidate", "steep", "nearly equal", "half forbidden")
TEMPERATURES = (1e-30, 0.01, 0.7, 1.0, 1.0, 3.0, 1e30)
TOP_PS = (1.0, 1.0, 0.999999, 0.9, 0.5, 1e-6)
MIN_PS = (0.0, 0.0, 0.05, 1.0)
NO_EDITS = np.zeros(0, LOGIT_EDIT)


def make_logits(random: np.random.Generator, kind: str, vocab_size: int) -> Any:
    """Return (V,) float32."""
    x = random.standard_normal(vocab_size) * 3
    if kind == "few values":
        x = np.round(x)
    elif kind == "all equal":
        x = np.full(vocab_size, x[0])
    elif kind == "one candidate":
        x[np.arange(vocab_size) != random.integers(vocab_size)] = -np.inf
    elif kind == "steep":  # to weights that are no normal numbers any more, and to 0
        x = -random.permutation(np.linspace(0, 100, vocab_size))
    elif kind == "nearly equal":
        x = 5 + random.integers(0, 4, vocab_size) * 2.0**-21
    elif kind == "half forbidden":
        x[random.random(vocab_size) < 0.5] = -np.inf
        x[random.integers(vocab_size)] = 0.0
    return x.astype(np.float32)


def make_parameters(random: np.random.Generator, vocab_size: int) -> dict[str, Any]:
    """Return temperature, top_k, top_p, min_p and seed of one row."""
    return {
        "temperature": float(random.choice(TEMPERATURES)) if random.random() > 0.1 else 0.0,
        "top_k": int(random.choice((0, 0, 0, 1, 2, 5, 40, max(1, vocab_size - 1), vocab_size + 5))),
        "top_p": float(random.choice(TOP_PS)),
        "min_p": float(random.choice(MIN_PS)),
        "seed": int(random.integers(0, 2**64, dtype=np.uint64)),
    }


def make_rows(parameters: list[dict[str, Any]]) -> Any:
    """Return (R,) SAMPLING_ROW without edits and masks."""
    rows = np.zeros(len(parameters), SAMPLING_ROW)
    rows["top_p"], rows["mask_idx"] = 1.0, -1
    for row, given in zip(rows, parameters, strict=True):
        for name, value in given.items():
            row[name] = value
    return rows


def kernels_draw(
    logits: Any,
    rows: Any,
    edits: Any = NO_EDITS,
    masks: Any = None,
    fill: int = 0x7F,
    workspace: torch.Tensor | None = None,
    **needs: bool,
) -> Any:
    """Return (R,) ROW_SAMPLE as the kernels draw them.

    logits : (R, V); masks : (M, words) uint32 or None
    fill : what every byte of the workspace is at first; workspace : one to look at afterwards
    """
    num_rows, vocab_size = logits.shape
    samples = np.full(num_rows, -7, np.int32).repeat(spec.SAMPLE_WORDS).view(ROW_SAMPLE)
    if masks is None:
        masks = np.zeros((1, -(-vocab_size // 32)), np.uint32)
    edits = np.concatenate([edits, np.zeros(1, LOGIT_EDIT)])
    if workspace is None:
        workspace = run.make_workspace(num_rows, vocab_size, "cpu").fill_(fill)
    with np.errstate(all="ignore"):
        run.sample(
            torch.from_numpy(np.ascontiguousarray(logits)),
            torch.from_numpy(rows.view(np.int32).reshape(num_rows, spec.ROW_WORDS).copy()),
            torch.from_numpy(edits.view(np.int32).reshape(-1, spec.EDIT_WORDS)),
            torch.from_numpy(masks.view(np.int32)),
            torch.from_numpy(samples.view(np.int32).reshape(num_rows, spec.SAMPLE_WORDS)),
            workspace,
            **needs,
        )
    return samples


def rule_draws(logits: Any, rows: Any, edits: Any = NO_EDITS, masks: Any = None) -> list[int]:
    """Return the tokens of the rule in numpy."""
    found = []
    for x, row in zip(logits, rows, strict=True):
        mask = None if row["mask_idx"] < 0 else masks[row["mask_idx"]]
        given = {name: row[name].item() for name in SAMPLING_ROW.names}
        found.append(reference.draw(x, given, edits[row["edit_begin"] : row["edit_end"]], mask))
    return found
