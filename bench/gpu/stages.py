"""The stages of the check: names, what each is for, seconds each may take, and the goals of speed."""

from __future__ import annotations

import dataclasses

GOALS = {"decode": 0.85, "prefill": 0.9, "sampling": 1.0, "step": 1.3}
"""decode: of the copy bandwidth at batch 64, context 4096; prefill: of torch's fastest; sampling: of torch's
operations; step: of transformers."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage: module stage_<name>.py; limits in seconds, on a GPU and in a dry run.

    processes : how many share its cases on a GPU; compiling kernels takes most of the time of `correctness`
    """

    name: str
    title: str
    limit_s: float
    dry_limit_s: float = 300.0
    processes: int = 1


STAGES = (
    Stage("environment", "the GPU, its clocks, versions, copy bandwidth", 40),
    Stage("correctness", "every kernel against float64 references", 110, processes=6),
    Stage("cubins", "kernels compiled ahead of time, through the driver", 60),
    Stage("decode", "decode attention beside the copy bandwidth", 90),
    Stage("prefill", "prefill attention beside torch's", 75),
    Stage("sampling", "sampling beside torch's operations", 45),
    Stage("step", "a decode step of Llama-3-8B's shape beside transformers", 170),
    Stage("rtx", "what TensorRT-RTX says about this GPU", 30),
    Stage("tests", "tests marked gpu, engines among them", 150),
)
NAMES = tuple(stage.name for stage in STAGES)
OPS = ("gather_last", "kv_write", "sampling", "rejection", "attention")
"""Of stage correctness: each has a module check_<name>.py."""


def choose(names: str) -> list[Stage]:
    """Return the stages named, in their own order; all where none is. KeyError says which name is none."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in NAMES:
            raise KeyError(f"no stage is called {name!r}; there are {', '.join(NAMES)}")
    return [stage for stage in STAGES if not wanted or stage.name in wanted]
