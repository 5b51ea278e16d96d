"""Says whether this Python can run the check: exit status 0 and what it has, or 3 and what it lacks, in one line.

torch_here.py             torch with CUDA, a device, and triton
torch_here.py --dry-run   torch and triton alone
"""

from __future__ import annotations

import importlib
import re
import sys

LEAST_TRITON = (3, 6)


def lack(dry_run: bool) -> str | None:
    """Return what is missing, None where the check can run."""
    for name in ("numpy", "torch", "triton"):
        try:
            importlib.import_module(name)
        except Exception as error:  # a library that is there and broken raises anything
            missing = isinstance(error, ModuleNotFoundError) and error.name == name
            last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            return f"this Python has no {name}" if missing else f"{name} cannot be loaded ({last})"
    import torch
    import triton

    if tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) < LEAST_TRITON:
        return f"its triton is {triton.__version__}, 3.6 or later is needed"
    if dry_run:
        return None
    if torch.version.cuda is None:
        return f"this Python's torch ({torch.__version__}) has no CUDA"
    return None if torch.cuda.is_available() else "torch sees no CUDA device here"


def _has(dry_run: bool) -> str:
    import torch
    import triton

    name = "" if dry_run else f", {torch.cuda.get_device_name()}"
    return f"torch {torch.__version__}, triton {triton.__version__}{name}"


if __name__ == "__main__":
    is_dry = "--dry-run" in sys.argv[1:]
    lacking = lack(is_dry)
    print(lacking or _has(is_dry))
    sys.exit(3 if lacking else 0)
