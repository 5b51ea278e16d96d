"""The process that compiles one plan: `python -m plansmith.builder.targets.rtx.child JOB.json FD`.

TensorRT can abort the process it runs in, so it never runs in the caller's. Everything printed, by us or by the
compiler, is the build's log (this process' stdout and stderr are the log file); what the parent reads are JSON lines
on the file descriptor FD: {"event": "step" | "done" | "error", ...}.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from ...machine import peak_rss_bytes

# A line that matches means that the compiler builds something else than the graph says.
FATAL_WARNINGS = re.compile(
    r"unused input|ignor(?:ed|ing) (?:input|attribute)|cast(?:ing)? down|clamp|"
    r"will be cast|converted? (?:from|to) (?:float|half|bf16|int)|type (?:changed|mismatch)",
    re.IGNORECASE,
)

_STEP_INTERVAL_S = 0.2
_PR_SET_PDEATHSIG = 1

EXIT_ERROR = 3


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent's thread ends; exit at once if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(EXIT_ERROR)


class CompileFailed(Exception):
    """The compiler, or a check of what it made of the graph, says no."""


def run(job: dict[str, Any], events: TextIO) -> None:
    """Compile the job's ONNX file into its plan file; `job` is as compile.py writes it.

    raises CompileFailed with a message for people; the log has the compiler's own words.
    """
    import tensorrt_rtx as trt  # type: ignore[import-untyped, unused-ignore]

    def send(event: str, **fields: Any) -> None:
        events.write(json.dumps({"event": event, "peak_rss_bytes": peak_rss_bytes(), **fields}) + "\n")
        events.flush()

    logger = _make_logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(job["onnx"]):
        errors = [str(parser.get_error(i).desc()) for i in range(parser.num_errors)]
        raise CompileFailed(
            "the compiler cannot parse the graph: " + "; ".join(errors or ["no reason given"])
        )
    _raise_on_fatal(logger)
    _check_tensors(trt, network, job)
    _check_layers(trt, network, job)
    config = builder.create_builder_config()
    config.num_compute_capabilities = len(job["capabilities"])
    for i, capability in enumerate(job["capabilities"]):
        config.set_compute_capability(getattr(trt.ComputeCapability, capability), i)
    for shapes in job["profiles"]:
        profile = builder.create_optimization_profile()
        for name, (low, opt, high) in shapes.items():
            profile.set_shape(name, low, opt, high)
        if config.add_optimization_profile(profile) < 0:
            raise CompileFailed(f"the compiler refuses the optimization profile {shapes}")
    monitor = _make_monitor(trt, send)
    config.progress_monitor = monitor
    start = time.monotonic()
    writer = _make_writer(trt, job["plan"])
    with writer.file:
        built = builder.build_serialized_network_to_stream(network, config, writer)
    if writer.failure is not None:
        raise CompileFailed(
            f"the plan cannot be written: {writer.failure}; free space or give another directory"
        )
    if not built or Path(job["plan"]).stat().st_size == 0:
        raise CompileFailed("the compiler failed")
    _raise_on_fatal(logger)
    send("done", version=trt.__version__, seconds=time.monotonic() - start, warnings=logger.warnings)


def _make_logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        """Prints every line and keeps the warnings."""

        def __init__(self) -> None:
            super().__init__()
            self.warnings: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity == trt.ILogger.VERBOSE:
                return  # one line a tactic: 100 MB for a real model
            name = str(severity).rsplit(".", 1)[-1].lower()
            print(f"[{name}] {message}", flush=True)
            if severity == trt.ILogger.WARNING:
                self.warnings.append(message)

    return Logger()


def _raise_on_fatal(logger: Any) -> None:
    bad = [line for line in logger.warnings if FATAL_WARNINGS.search(line)]
    if bad:
        raise CompileFailed("the compiler changed the graph: " + "; ".join(bad[:5]))


def _make_monitor(trt: Any, send: Any) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Passes the outermost phase on, and of the thousands of inner ones and their steps five a second."""

        def __init__(self) -> None:
            super().__init__()
            self.sent_at = 0.0
            self.steps: dict[str, int] = {}

        def tell(self, phase: str, step: int, always: bool = False) -> None:
            now = time.monotonic()
            if always or now - self.sent_at >= _STEP_INTERVAL_S:
                self.sent_at = now
                send("step", phase=phase, step=step, steps=self.steps.get(phase, 0))

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.steps[phase_name] = num_steps
            self.tell(phase_name, 0, always=parent_phase is None)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self.tell(phase_name, step + 1)
            return True

        def phase_finish(self, phase_name: str) -> None:
            self.tell(phase_name, self.steps.get(phase_name, 0))

    return Monitor()


def _make_writer(trt: Any, path: str) -> Any:
    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        """Writes the plan to its file as it is serialized. The compiler takes an exception here for success."""

        def __init__(self) -> None:
            super().__init__()
            self.file = Path(path).open("wb")  # noqa: SIM115  # run() closes it
            self.failure: Exception | None = None

        def write(self, data: bytes) -> int:
            try:
                return self.file.write(data)
            except Exception as error:
                self.failure = error
                return 0

    return Writer()


_TYPE_NAMES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
    "INT8": "int8",
}


def _check_tensors(trt: Any, network: Any, job: dict[str, Any]) -> None:
    """Compare the parsed network's inputs and outputs with the contract."""
    found_in = [network.get_input(i) for i in range(network.num_inputs)]
    found_out = [network.get_output(i) for i in range(network.num_outputs)]
    for kind, found, wanted in (("input", found_in, job["inputs"]), ("output", found_out, job["outputs"])):
        have = {t.name: (_TYPE_NAMES.get(t.dtype.name, t.dtype.name), list(t.shape)) for t in found}
        want = {t["name"]: (t["dtype"], t["shape"]) for t in wanted}
        for name in have.keys() | want.keys():
            if have.get(name) != want.get(name):
                raise CompileFailed(
                    f"{kind} {name} of the parsed network is {have.get(name, 'missing')}, "
                    f"the contract has {want.get(name, 'no such tensor')}"
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


def main(argv: list[str]) -> int:
    """Run the job file argv[1], reporting to the descriptor argv[2]; 0 = done."""
    job = json.loads(Path(argv[1]).read_text())
    die_with_parent(job["parent_pid"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us
    with os.fdopen(int(argv[2]), "w") as events:
        try:
            run(job, events)
        except CompileFailed as error:
            print(f"[plansmith] {error}", flush=True)
            events.write(json.dumps({"event": "error", "message": str(error)}) + "\n")
            return EXIT_ERROR
    return 0


if __name__ == "__main__":
    code = main(sys.argv)
    sys.stdout.flush()
    os._exit(code)  # the plan is whole: what the compiler does when it is torn down is of no interest
