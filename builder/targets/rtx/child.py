"""The process that compiles one plan: `python -m plansmith.builder.targets.rtx.child JOB.json FD`.

What it tells its parent, and the checks that it shares with the other compiler, are in ../compiler_child.py.
"""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO

from ..compiler_child import (
    CompileFailed,
    add_profiles,
    make_logger,
    parse,
    sender,
    serve,
    set_memory_flags,
    write_plan,
)
from . import fixed_layout


def run(job: dict[str, Any], events: TextIO) -> None:
    """Compile the job's ONNX file into its plan file; `job` is as compile.py writes it.

    raises CompileFailed with a message for people; the log has the compiler's own words.
    """
    import tensorrt_rtx as trt  # type: ignore[import-untyped, unused-ignore]

    _check_turns()
    logger = make_logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parse(trt, network, logger, job)
    _check_layers(trt, network, job)
    config = builder.create_builder_config()
    config.num_compute_capabilities = len(job["capabilities"])
    for i, capability in enumerate(job["capabilities"]):
        config.set_compute_capability(getattr(trt.ComputeCapability, capability), i)
    set_memory_flags(trt, config, job)
    add_profiles(builder, config, job)
    write_plan(trt, builder, network, config, logger, job, sender(events))
    _check_turns()


def _check_turns() -> None:
    """See that threads took turns where plans are to be the same in every build."""
    if fixed_layout.is_reproducible() and not fixed_layout.threads_take_turns():
        raise CompileFailed(
            f"{fixed_layout.VARIABLE} is 1, and the compiler's threads did not keep their order, so that the plan may "
            "differ from another build's; build again when this machine has less to do, or without it"
        )


def _check_layers(trt: Any, network: Any, job: dict[str, Any]) -> None:
    """See that the parser kept every edge of the graph and every pool update.

    It can drop an input of a node without a word (the standard Attention's nonpad_kv_seqlen, in 1.7); what computed
    that input is then read by nobody.
    """
    made = {network.get_input(i).name for i in range(network.num_inputs)}
    read = {network.get_output(i).name for i in range(network.num_outputs)}
    updates = 0
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        updates += layer.type == trt.LayerType.KV_CACHE_UPDATE
        read.update(t.name for t in map(layer.get_input, range(layer.num_inputs)) if t is not None)
        made.update(t.name for t in map(layer.get_output, range(layer.num_outputs)) if t is not None)
    dropped = sorted(made - read)
    if dropped:
        raise CompileFailed(f"the parser dropped what reads {', '.join(dropped[:5])}")
    if updates != job["kv_updates"]:
        raise CompileFailed(
            f"the parsed network updates {updates} pools, the graph updates {job['kv_updates']}"
        )


if __name__ == "__main__":
    fixed_layout.exec_with_fixed_layout()
    code = serve(sys.argv, run)
    sys.stdout.flush()
    os._exit(code)  # the plan is whole: what the compiler does when it is torn down is of no interest
