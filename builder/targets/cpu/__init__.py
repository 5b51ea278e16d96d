"""The cpu target: the graph lowered to a linear program with packed weights, and a session to run it."""

from __future__ import annotations

from .compile import compile_plan
from .lowering import Options
from .plan_file import read_plan

__all__ = ["Options", "compile_plan", "read_plan"]
