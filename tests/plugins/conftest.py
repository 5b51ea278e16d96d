"""Kernels of the Triton language run on the CPU here: the interpreter is chosen when triton is first imported."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
