"""The cpu target's compiler: a graph in, a plan file and its statistics out."""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from ...limits import Limits
from ...spec import DecoderSpec
from .lowering import lower
from .plan_writer import total_bytes, write_plan

Progress = Callable[[str, int, int], None]


def compile_plan(
    model: ir.Model,
    spec: DecoderSpec,
    limits: Limits,
    out_path: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the cpu plan of a graph and return its statistics; the same inputs give the same bytes.

    model : the graph of build_graph with compute float32; each weight is read when it is written
    progress : called as (tensor name, bytes written, bytes in all) after each tensor
    returns : plan_bytes, bytes_by_dtype, ops, ops_by_code, slots, tensors, seconds
    raises : BuildError for a node the cpu target does not take
    """
    start = time.monotonic()
    program = lower(model, header_fields(spec, limits))
    size = write_plan(out_path, program, progress)
    return {
        "plan_bytes": size,
        "bytes_by_dtype": total_bytes(program.tensors),
        "ops": len(program.ops),
        "ops_by_code": dict(collections.Counter(op.code.name.lower() for op in program.ops)),
        "slots": [[slot.rows.name.lower(), slot.width] for slot in program.slots],
        "tensors": len(program.tensors),
        "seconds": time.monotonic() - start,
    }


def header_fields(spec: DecoderSpec, limits: Limits) -> dict[str, int]:
    """Return the model and the limits as the plan's header holds them (plan_file.MODEL_FIELDS)."""
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_layers": spec.num_layers,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_batch_size": limits.max_batch_size,
        "max_num_tokens": limits.max_num_tokens,
        "max_input_len": limits.max_input_len,
        "max_seq_len": limits.max_seq_len,
        "tokens_per_block": limits.tokens_per_block,
    }
