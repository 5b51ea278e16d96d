"""What the processes that compile a plan share: the log, progress, the plan's file, and checks of what was parsed.

TensorRT can abort the process it runs in, so it never runs in the caller's. Everything printed, by us or by the
compiler, is the build's log (the process' stdout and stderr are the log file); what the parent reads are JSON lines
on the file descriptor FD: {"event": "step" | "done" | "error", ...}.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

# A line that matches means that the compiler builds something else than the graph says.
FATAL_WARNINGS = re.compile(
    r"unused input|ignor(?:ed|ing) (?:input|attribute)|cast(?:ing)? down|clamp|"
    r"will be cast|converted? (?:from|to) (?:float|half|bf16|int)|type (?:changed|mismatch)",
    re.IGNORECASE,
)

# By count, not by time: what is allocated for a message moves what the compiler allocates next, and with it the plan's
# bytes, see rtx/fixed_layout.py.
_STEPS_A_MESSAGE = 16
_PR_SET_PDEATHSIG = 1

EXIT_ERROR = 3


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent's thread ends; exit at once if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(EXIT_ERROR)


class CompileFailed(Exception):
    """The compiler, or a check of what it made of the graph, says no."""


Send = Callable[..., None]
"""Called with an event's name and its fields."""


class _PeakMemory:
    """The most memory that this process has held, told with the same allocations whatever it is.

    The text of /proc/self/status is longer or shorter by its numbers; read as one, it moves what is allocated next.
    """

    def __init__(self) -> None:
        self._status = bytearray(1 << 14)
        self._file: int | None = None
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                self._file = os.open("/proc/self/status", os.O_RDONLY)

    def bytes(self) -> int:
        """Return the peak; 0 where it cannot be told."""
        if self._file is None:
            return 0
        os.preadv(self._file, [self._status], 0)
        start = self._status.find(b"VmHWM:")
        return int(self._status[start + 6 : self._status.index(b"kB", start)]) << 10 if start >= 0 else 0


def sender(events: TextIO) -> Send:
    """Return what writes events for the parent, whose lines are as long whatever the memory is."""
    peak = _PeakMemory()

    def send(event: str, **fields: Any) -> None:
        rest = json.dumps({"event": event, **fields})
        events.write(f'{{"peak_rss_bytes": {peak.bytes():15}, {rest[1:]}\n')
        events.flush()

    return send


def make_logger(trt: Any) -> Any:
    """Return a logger of the compiler's that prints, and keeps the warnings in `warnings`."""

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
        """Passes the outermost phase on, and of the thousands of inner ones and their steps each 16th."""

        def __init__(self) -> None:
            super().__init__()
            self.num_calls = 0
            self.steps: dict[str, int] = {}

        def tell(self, phase: str, step: int, always: bool = False) -> None:
            self.num_calls += 1
            if always or self.num_calls % _STEPS_A_MESSAGE == 0:
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
    "FP8": "float8_e4m3fn",
}


def _check_tensors(network: Any, job: dict[str, Any]) -> None:
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


def parse(trt: Any, network: Any, logger: Any, job: dict[str, Any]) -> None:
    """Read the job's ONNX file into a network and compare its tensors with the contract.

    raises CompileFailed where the parser refuses it, changes what it says, or lacks one of its tensors
    """
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(job["onnx"]):
        errors = [str(parser.get_error(i).desc()) for i in range(parser.num_errors)]
        raise CompileFailed(
            "the compiler cannot parse the graph: " + "; ".join(errors or ["no reason given"])
        )
    _raise_on_fatal(logger)
    _check_tensors(network, job)


def set_memory_flags(trt: Any, config: Any, job: dict[str, Any]) -> None:
    """Let weights stay on the host where the job says so, else ask for a plan that allocates nothing when it runs.

    Only TensorRT-RTX has the latter, which is what lets its runs be captured; it takes no plan with both.
    """
    if job["weight_streaming"]:
        config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    elif hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)


def add_profiles(builder: Any, config: Any, job: dict[str, Any]) -> None:
    """Give a configuration the job's optimization profiles; CompileFailed where one is refused."""
    for shapes in job["profiles"]:
        profile = builder.create_optimization_profile()
        for name, (low, opt, high) in shapes.items():
            profile.set_shape(name, low, opt, high)
        if config.add_optimization_profile(profile) < 0:
            raise CompileFailed(f"the compiler refuses the optimization profile {shapes}")


def write_plan(
    trt: Any, builder: Any, network: Any, config: Any, logger: Any, job: dict[str, Any], send: Send
) -> None:
    """Build the plan into the job's file, telling the parent how far it is and that it is done.

    raises CompileFailed where the compiler fails, changes the graph, or the file cannot be written
    """
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


def serve(argv: list[str], run: Callable[[dict[str, Any], TextIO], None]) -> int:
    """Run the job file argv[1], reporting to the descriptor argv[2]; 0 = done."""
    job = json.loads(Path(argv[1]).read_text())
    die_with_parent(int(job["parent_pid"]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us
    with os.fdopen(int(argv[2]), "w") as events:
        try:
            run(job, events)
        except CompileFailed as error:
            print(f"[plansmith] {error}", flush=True)
            events.write(json.dumps({"event": "error", "message": str(error)}) + "\n")
            return EXIT_ERROR
    return 0
