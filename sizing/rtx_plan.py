"""What a plan file of TensorRT-RTX holds beside its weights. Standard library only.

TensorRT-RTX 1.7 keeps a plan's kernels as CUDA source, a text of about 90 kB for each, every layer its own and every
profile again; the GPU that first runs the plan compiles them. So they are in the file and not among the weights that
the device holds. How many there are follows from the layers, not from their width, the vocabulary, the limits or the
GPU. The numbers are of bench/plan_size.py; docs/sizing.md says how far off they are.
"""

from __future__ import annotations

_PLAN_BYTES = 3.0e6  # what belongs to no layer, the lists of tensors included
_LAYER_BYTES = 0.81e6
_QUANTIZED_BYTES = 0.61e6  # a layer's, for decoding codes
_NORM_BYTES = 0.155e6  # a norm's, beyond the two that every layer has

# By family: norms of q and k are two, norms behind attention and MLP two, and a soft cap of scores counts as one.
_EXTRA_NORMS = {"qwen3": 2, "gemma2": 3, "gemma3_text": 4}


def kernel_source_bytes(family: str, num_layers: int, *, is_quantized: bool) -> int:
    """Return how much of a plan file is the source of kernels.

    family : as manifests name it, e.g. "qwen3"
    is_quantized : whether the products' weights are codes of fewer bits than the activations
    """
    layer = _LAYER_BYTES + is_quantized * _QUANTIZED_BYTES + _EXTRA_NORMS.get(family, 0) * _NORM_BYTES
    return int(_PLAN_BYTES + num_layers * layer)
