"""What TensorRT-RTX's runtime says about this GPU: which compute capabilities it accepts, and whether a plan runs.

Its compiler names SM 75, 80, 86, 89, 120 and 121. Whether its runtime takes a portable plan on SM 90 is not documented;
here it is asked, with a plan of one product and one activation that bench/gpu/pack.sh compiles and carries.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import torch
from bench_device import Device
from finding import Findings

CARRIED = Path(os.environ.get("PLANSMITH_ROOT", ".")) / "build" / "gpu"
PLAN = "tiny.rtx.plan"
ROWS, WIDTH = 4, 64


def run(device: Device, findings: Findings) -> None:
    """Deserialize and run the carried plan, or one compiled now where none is carried."""
    try:
        trt = importlib.import_module("tensorrt_rtx")
    except ImportError as error:
        findings.skip("tensorrt_rtx", f"not importable here: {error}"[:120])
        return
    findings.note("tensorrt_rtx", trt.__version__)
    logger = make_logger(trt)
    carried = CARRIED / PLAN
    plan = carried.read_bytes() if carried.exists() else compile_plan(trt, logger)
    findings.note("plan", f"{len(plan)} bytes, {'carried' if carried.exists() else 'compiled here'}")
    if device.dry_run:
        findings.skip("SM accepted", "no GPU to ask for")
        return
    runtime = trt.Runtime(logger)
    engine = runtime.deserialize_cuda_engine(plan) if runtime is not None else None
    findings.note("runtime's words", "; ".join(logger.lines[-4:])[:600] or "none")
    if engine is None:
        findings.note("SM accepted", "no: the plan was refused")
        return
    findings.note("SM accepted", "yes")
    with findings.guarded("tiny plan's result"):
        got, want = execute(engine)
        # A float16 sum of WIDTH products at worst, each rounded; the sum's size is about 1.
        findings.close("tiny plan's result", got, want, WIDTH * 2.0**-11)


def make_logger(trt: Any) -> Any:
    """Return a logger that keeps the lines of warnings and errors."""

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.WARNING:
                self.lines.append(message.strip())

    return Logger()


def compile_plan(trt: Any, logger: Any) -> bytes:
    """Return a portable plan of relu(x @ w), x [ROWS, WIDTH] float16, w a constant that `weights` gives."""
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    x = network.add_input("x", trt.float16, (ROWS, WIDTH))
    constant = network.add_constant((WIDTH, WIDTH), trt.Weights(weights().numpy()))
    product = network.add_matrix_multiply(
        x, trt.MatrixOperation.NONE, constant.get_output(0), trt.MatrixOperation.NONE
    )
    out = network.add_activation(product.get_output(0), trt.ActivationType.RELU).get_output(0)
    out.name = "out"
    network.mark_output(out)
    config = builder.create_builder_config()
    capabilities = (trt.ComputeCapability.SM80, trt.ComputeCapability.SM89, trt.ComputeCapability.SM120)
    config.num_compute_capabilities = len(capabilities)
    for i, capability in enumerate(capabilities):
        config.set_compute_capability(capability, i)
    return bytes(builder.build_serialized_network(network, config))


def weights() -> torch.Tensor:
    """Return the product's constant, the same wherever it is made."""
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5).half()


def execute(engine: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the plan's result, the same in float64)."""
    x = torch.randn(ROWS, WIDTH, device="cuda").half()
    out = torch.full((ROWS, WIDTH), float("nan"), device="cuda").half()
    context = engine.create_execution_context()
    context.set_tensor_address("x", x.data_ptr())
    context.set_tensor_address("out", out.data_ptr())
    if not context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
        raise RuntimeError("the runtime could not run the plan")
    torch.cuda.synchronize()
    return out, (x.double().cpu() @ weights().double()).relu()
