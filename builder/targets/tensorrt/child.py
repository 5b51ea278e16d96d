"""The process that compiles one plan: `python -m plansmith.builder.targets.tensorrt.child JOB.json FD`.

What it tells its parent, and the checks that it shares with the other compiler, are in ../compiler_child.py. First it
registers our plugins with TensorRT: their kernels go into the plan, which needs nothing of ours when it runs.
"""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO

from ....plugins.paged_attention.plugin import register_plugins
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


def run(job: dict[str, Any], events: TextIO) -> None:
    """Compile the job's ONNX file into its plan file; `job` is as compile.py writes it.

    raises CompileFailed with a message for people; the log has the compiler's own words.
    """
    import tensorrt as trt  # type: ignore[import-not-found, unused-ignore]
    import tensorrt.plugin as trtp  # type: ignore[import-not-found, unused-ignore]

    compile_job(trt, trtp, job, events)


def compile_job(trt: Any, trtp: Any, job: dict[str, Any], events: TextIO) -> None:
    """Do what `run` does with TensorRT's modules as arguments."""
    register_plugins(trt, trtp, sm=int(job["sm"].removeprefix("sm")))
    logger = make_logger(trt)
    builder = trt.Builder(logger)
    flags = trt.NetworkDefinitionCreationFlag
    network = builder.create_network(
        1 << int(flags.STRONGLY_TYPED) | 1 << int(flags.PREFER_AOT_PYTHON_PLUGINS)
    )
    parse(trt, network, logger, job)
    _check_plugins(trt, network, job)
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    set_memory_flags(trt, config, job)
    add_profiles(builder, config, job)
    write_plan(trt, builder, network, config, logger, job, sender(events))


def _check_plugins(trt: Any, network: Any, job: dict[str, Any]) -> None:
    """See that every plugin node of the graph became a plugin layer."""
    layers = map(network.get_layer, range(network.num_layers))
    found = sum(layer.type == trt.LayerType.PLUGIN_V3 for layer in layers)
    if found != job["plugins"]:
        raise CompileFailed(f"the parsed network has {found} plugin layers, the graph has {job['plugins']}")


if __name__ == "__main__":
    code = serve(sys.argv, run)
    sys.stdout.flush()
    os._exit(code)  # the plan is whole: what the compiler does when it is torn down is of no interest
