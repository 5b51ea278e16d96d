"""The cpu target: the graph lowered to a linear program with packed weights, and a session to run it."""

from __future__ import annotations

from .compile import compile_plan
from .plan_reader import read_plan

__all__ = ["compile_plan", "read_plan"]
