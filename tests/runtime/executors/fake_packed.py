"""A packed TensorRT plan for the double: the graph of build_graph with our operator in float64, and its manifest entry.

TensorRT itself is not to be had here, so the plan file is a stand-in; names, shapes, profile and manifest are what
builder/targets/tensorrt makes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from fake_engines import TARGET, RtxEngine
from fake_plans import Plan, PlanTensor, Shape
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.graph import build_graph
from plansmith.builder.graph import contract as graph_contract
from plansmith.builder.precision import precision
from plansmith.builder.targets.tensorrt import contract, profiles
from plansmith.plugins.paged_attention.reference import paged_attention
from plansmith.runtime.manifest import checksum

VERSION = "11.4.0"


class PagedAttention(OpRun):  # the class name is the op's
    """The operator in float64, its pools changed in place; sequences without positions are padding."""

    op_domain = graph_contract.OP_DOMAIN

    def _run(
        self,
        q: Any,
        k: Any,
        v: Any,
        k_pool: Any,
        v_pool: Any,
        starts: Any,
        kv_lens: Any,
        table: Any,
        num_heads: Any = None,
        kv_num_heads: Any = None,
        head_dim: Any = None,
        scale: Any = None,
        softcap: Any = None,
        window: Any = None,
    ) -> tuple[Any, Any, Any]:
        real = int((kv_lens > 0).sum())
        assert (kv_lens[:real] > 0).all(), "padding comes last"
        rows = int(starts[real])
        out = np.full(q.shape, np.nan, q.dtype)
        done, k_new, v_new = paged_attention(
            q[:rows],
            k[:rows],
            v[:rows],
            k_pool,
            v_pool,
            starts[: real + 1],
            kv_lens[:real],
            table[:real],
            num_heads=num_heads,
            kv_num_heads=kv_num_heads,
            head_dim=head_dim,
            scale=scale,
            softcap=softcap or 0.0,
            window=window or 0,
        )
        out[:rows] = done.astype(q.dtype)
        np.copyto(k_pool, k_new)
        np.copyto(v_pool, v_new)
        return out, k_pool, v_pool


def packed_plan(checkpoint: Path, engine: RtxEngine) -> Plan:
    """Return the float16 plan of a checkpoint as a packed engine has it."""
    spec, limits = engine.spec, engine.limits
    graph = build_graph(
        spec, open_checkpoint(checkpoint).weights, precision("fp16"), limits, compute="float16"
    )
    session = ReferenceEvaluator(ir.to_proto(graph), new_ops=[PagedAttention])
    inputs = contract.plan_inputs(spec, limits, "float16")
    outputs = contract.plan_outputs(spec, limits, "float16")
    profile = profiles.make_profile(spec, limits)

    def run(arrays: Mapping[str, Any]) -> dict[str, Any]:
        feeds = {**arrays, graph_contract.QUERY_LENS: np.diff(arrays[graph_contract.CU_QUERY_LENS])}
        wanted = {name: feeds[name] for name in session.input_names}
        return {graph_contract.LOGITS: session.run([graph_contract.LOGITS], wanted)[0]}

    def shapes(given: Mapping[str, Shape]) -> dict[str, Shape]:
        return {graph_contract.LOGITS: (given[graph_contract.LOGITS_ROWS][0], spec.vocab_size)}

    tensors = [PlanTensor(one.name, True, np.dtype(one.dtype), one.shape) for one in inputs]
    for one in outputs:
        alias = one.name.replace("_pool_out.", "_pool.") if "pool" in one.name else None
        tensors.append(PlanTensor(one.name, False, np.dtype(one.dtype), one.shape, alias))
    return Plan(
        tensors=tuple(tensors),
        profiles=({one.name: profile.shapes(one) for one in inputs},),
        weights_bytes=1 << 18,
        scratch_bytes=(1 << 16,),
        outputs=shapes,
        run=run,
        sms=(TARGET,),
    )


def packed_engine(engine: RtxEngine, out: Path) -> tuple[Path, bytes]:
    """Return a copy of an engine whose GPU target is a packed TensorRT plan, and that plan's bytes."""
    path = Path(shutil.copytree(engine.path, out, ignore=shutil.ignore_patterns("runtime_cache*", "kernels")))
    data = b"a packed TensorRT plan"
    plan = path / "targets" / TARGET / "model.plan"
    plan.write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    listed = {
        "path": f"targets/{TARGET}/model.plan",
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    inputs = [
        {"name": name, "dtype": "int32", "dims": list(dims)} for name, dims in contract.STEP_INPUTS.items()
    ]
    manifest["targets"][TARGET] |= {
        "compiler": "tensorrt",
        "compiler_version": VERSION,
        "token_layout": contract.TOKEN_LAYOUT,
        "row_alignment": contract.ROW_ALIGNMENT,
        "inputs": inputs,
        "profiles": [profiles.NAME],
        "files": [listed],
        "flags": [],
    }
    manifest["checksum"] = checksum(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path, data
