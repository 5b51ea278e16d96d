"""How a GPU target is opened."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ..checks import check_float, check_int
from ..errors import InvalidArgumentError

CPU = "cpu"
AUTO = "auto"
CUDA_GRAPHS = ("auto", "off", "own")


@dataclasses.dataclass(frozen=True)
class GpuOptions:
    """Options of a GPU target; none of them changes what is computed.

    device : index among the GPUs that CUDA_VISIBLE_DEVICES leaves, or a UUID as nvidia-smi -L prints it (its beginning
        is enough); None = the first that runs the plan
    cuda_graphs : who captures decode steps. "auto": TensorRT-RTX itself, which knows when its kernels for a shape are
        compiled, and with TensorRT this executor; "own": this executor with both; "off": nobody
    cuda_graph_cache_size : graphs that this executor keeps at a time, those it captured; 0 = 64
    gpu_weights_percent : share of the weights that stay on the device, 0 to 1, of a plan that was built with weight
        streaming; None = as many as fit
    cache_dir : where TensorRT-RTX's compiled kernels are kept; None = beside the plan, or where that cannot be written
        in the user's cache directory
    device_sampling : draw tokens on the device where the engine has the kernels for it
    """

    device: int | str | None = None
    cuda_graphs: str = "auto"
    cuda_graph_cache_size: int = 0
    gpu_weights_percent: float | None = None
    cache_dir: Path | None = None
    device_sampling: bool = True

    def check(self) -> None:
        """Raise InvalidArgumentError for a word that is none or a number out of its range."""
        if self.cuda_graphs not in CUDA_GRAPHS:
            raise InvalidArgumentError(
                f"cuda_graphs is {self.cuda_graphs!r}, it must be one of {', '.join(CUDA_GRAPHS)}"
            )
        if isinstance(self.device, int):
            check_int("device", self.device, 0, 2**31 - 1)
        check_int("cuda_graph_cache_size", self.cuda_graph_cache_size, 0, 2**31 - 1)
        if self.gpu_weights_percent is not None:
            check_float("gpu_weights_percent", self.gpu_weights_percent, 0.0, 1.0)
