"""From targets to plan files: the graph of each activation type, and the compiler of each target over it."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import onnx_ir as ir

from ..runtime.errors import Error, OutOfMemoryError
from .build_report import LOG_TAIL_LINES
from .checkpoint import Checkpoint
from .graph import build_graph, weight_bytes
from .limits import Limits
from .machine import PeakMemory
from .precision import Precision
from .progress import Progress, no_progress
from .side_by_side import SideBySide
from .targets.compiler_process import CompileResult, tail
from .targets.registry import CPU, Target, compiler_version, compute_dtype, recipe_for, target_names

# Room for what is no weight: tables, the graph itself, logs, the tokenizer.
_SLACK_BYTES = 8 << 20


# The folder of a target's draft; after a slash also what its report is called.
DRAFT = "draft"


def piece_name(target: str, *, is_draft: bool) -> str:
    """Return the name of a target's plan, or of its draft's: "cpu", "cpu/draft"."""
    return f"{target}/{DRAFT}" if is_draft else target


@dataclasses.dataclass(frozen=True)
class CompileRequest:
    """What the targets of a build share.

    workers : GPU compilers side by side; None = as many as cores and memory allow
    out : the destination, beside which the log of a failure is left
    is_draft : the plans draft for the targets: they lie in a folder `draft` of each
    weight_streaming : weights of GPU plans may stay in host memory; never those of drafts, which have to be fast
    side_by_side : what it shares with other builds in this process; None = there are none
    """

    checkpoint: Checkpoint
    recipe: Precision
    limits: Limits
    workers: int | None
    out: pathlib.Path
    is_draft: bool = False
    weight_streaming: bool = False
    side_by_side: SideBySide | None = None

    def streams(self, target: Target) -> bool:
        """Return whether a target's plan is built with weight streaming."""
        return self.weight_streaming and not self.is_draft and target.compiler != CPU

    def folder(self, work: pathlib.Path, target: Target) -> pathlib.Path:
        """Return where a target's files go below the directory of the build."""
        folder = work / "targets" / target.name
        return folder / DRAFT if self.is_draft else folder

    def label(self, target: Target) -> str:
        """Return the name under which progress, failures and reports speak of a target."""
        return piece_name(target.name, is_draft=self.is_draft)

    def graph(self, target: Target) -> ir.Model:
        """Return the graph as a target compiles it; its weights are read when they are written."""
        spec, recipe = self.checkpoint.spec, recipe_for(target, self.recipe)
        return build_graph(
            spec,
            self.checkpoint.weights,
            recipe,
            self.limits,
            compute=compute_dtype(target, spec, recipe),
        )

    @property
    def stop(self) -> threading.Event | None:
        """What ends the compilers once it is set."""
        return None if self.side_by_side is None else self.side_by_side.stop

    def lowered(self, graph: ir.Model, compute: str) -> pathlib.Path | None:
        """Return the file of a GPU graph that other builds share; None where there are none."""
        if self.side_by_side is None:
            return None
        from .targets.rtx.compile import save_lowered

        content = (self.checkpoint.fingerprint(), self.checkpoint.spec, self.recipe, self.limits, compute)
        name = hashlib.sha256(repr(content).encode()).hexdigest()
        return self.side_by_side.graphs.file(name, functools.partial(save_lowered, graph))


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a compiler gave: the plan's files and how it went."""

    compiler: str
    version: str
    files: tuple[pathlib.Path, ...]
    flags: tuple[str, ...]
    seconds: float
    peak_rss_bytes: int
    weight_bytes: dict[str, int]
    warnings: tuple[str, ...] = ()
    log_tail: tuple[str, ...] = ()


def compile_targets(
    request: CompileRequest,
    targets: Sequence[Target],
    work: pathlib.Path,
    progress: Progress = no_progress,
    keep_going: bool = False,
) -> Iterator[tuple[Target, Compiled | Error]]:
    """Compile each target into work/targets/<name>; yield what came of it.

    keep_going : yield the error of a target that fails and go on; without it the first error is raised

    The cpu target comes first: it takes seconds, and what is wrong with a checkpoint shows there.
    """
    for target in targets:
        request.folder(work, target).mkdir(parents=True, exist_ok=True)
    for target in targets:
        if target.compiler == "cpu":
            yield (
                target,
                _attempt(functools.partial(_compile_cpu, request, target, work, progress), keep_going),
            )
    gpus = [target for target in targets if target.compiler == "rtx"]
    if gpus:
        yield from _compile_rtx(request, gpus, work, progress, keep_going)
    for target in targets:
        if target.compiler == "tensorrt":  # one by one: each has the GPU for itself
            compile_one = functools.partial(_compile_tensorrt, request, target, work, progress)
            yield target, _attempt(compile_one, keep_going)


def _attempt(body: Callable[[], Compiled], keep_going: bool) -> Compiled | Error:
    try:
        return body()
    except Error as error:
        if not keep_going or isinstance(error, OutOfMemoryError):
            raise
        return error


def _compile_cpu(request: CompileRequest, target: Target, work: pathlib.Path, progress: Progress) -> Compiled:
    from .targets.cpu import compile_plan

    plan = request.folder(work, target) / "model.plan"
    spec = request.checkpoint.spec
    model = request.graph(target)

    def step(tensor: str, done: int, total: int) -> None:
        progress(request.label(target), f"packing {tensor}", done, total)

    with PeakMemory() as peak:
        statistics = compile_plan(model, spec, request.limits, plan, progress=step)
    lines = (
        f"{statistics['ops']} ops, {statistics['tensors']} tensors, {statistics['plan_bytes']} bytes",
        *(f"op {name}: {count}" for name, count in sorted(statistics["ops_by_code"].items())),
        *(f"weights {name}: {size} bytes" for name, size in sorted(statistics["bytes_by_dtype"].items())),
    )
    plan.with_name("build.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Compiled(
        compiler="plansmith-cpu",
        version=compiler_version(target),
        files=(plan,),
        flags=(),
        seconds=statistics["seconds"],
        peak_rss_bytes=peak.bytes,
        weight_bytes=_plain_names(statistics["bytes_by_dtype"]),
        log_tail=lines[:LOG_TAIL_LINES],
    )


def _compile_rtx(
    request: CompileRequest,
    targets: Sequence[Target],
    work: pathlib.Path,
    progress: Progress,
    keep_going: bool,
) -> Iterator[tuple[Target, Compiled | Error]]:
    """Compile the GPU targets side by side; with keep_going, one by one after a failure."""
    from .targets.rtx.compile import COMPILER
    from .targets.rtx.schedule import CompileJob, compile_many

    spec = request.checkpoint.spec
    models = {t.name: compute_dtype(t, spec, request.recipe) for t in targets}
    graphs = {compute: request.graph(target) for target in targets for compute in [models[target.name]]}

    def job(target: Target) -> CompileJob:
        def step(phase: str, done: int, total: int) -> None:
            progress(request.label(target), phase, done, total)

        plan = request.folder(work, target) / "model.plan"
        # Beside the destination, so that the log of a failure outlives the work directory.
        log = failure_log(request.out, request.label(target))
        graph, streams = graphs[models[target.name]], request.streams(target)
        lowered = request.lowered(graph, models[target.name])
        return CompileJob(graph, request.limits, spec, target.name, plan, log, step, streams, lowered)

    def compiled(target: Target, result: CompileResult) -> Compiled:
        return _compiled(request, target, work, COMPILER, result, graphs[models[target.name]])

    stop = request.stop
    try:
        results = compile_many([job(t) for t in targets], request.workers, stop)
    except Error:
        if not keep_going:
            raise
        for target in targets:
            yield target, _attempt(lambda t=target: compiled(t, compile_many([job(t)], stop=stop)[0]), True)  # type: ignore[misc]
    except BaseException:  # interrupted: there is no failure to look into
        clear_failure_logs(request.out)
        raise
    else:
        for target, result in zip(targets, results, strict=True):
            yield target, compiled(target, result)


def _compile_tensorrt(
    request: CompileRequest, target: Target, work: pathlib.Path, progress: Progress
) -> Compiled:
    from .targets.tensorrt.compile import COMPILER, compile_plan
    from .targets.tensorrt.targets import TARGETS

    def step(phase: str, done: int, total: int) -> None:
        progress(request.label(target), phase, done, total)

    plan = request.folder(work, target) / "model.plan"
    graph = request.graph(target)
    log = failure_log(request.out, request.label(target))
    try:
        result = compile_plan(
            graph,
            request.limits,
            request.checkpoint.spec,
            TARGETS[target.name],
            plan,
            log,
            step,
            weight_streaming=request.streams(target),
            stop=request.stop,
        )
    except Error:
        raise
    except BaseException:  # interrupted: there is no failure to look into
        clear_failure_logs(request.out)
        raise
    return _compiled(request, target, work, COMPILER, result, graph)


def _compiled(
    request: CompileRequest,
    target: Target,
    work: pathlib.Path,
    compiler: str,
    result: CompileResult,
    graph: ir.Model,
) -> Compiled:
    """Return what a GPU compiler gave, its log moved beside the plan."""
    folder = request.folder(work, target)
    log = failure_log(request.out, request.label(target))
    lines = tuple(tail(log, LOG_TAIL_LINES))
    (folder / "build.log").write_bytes(log.read_bytes())
    log.unlink()
    return Compiled(
        compiler=compiler,
        version=result.version,
        files=(folder / "model.plan",),
        flags=result.flags,
        seconds=result.seconds,
        peak_rss_bytes=result.peak_rss_bytes,
        weight_bytes=_plain_names(weight_bytes(graph)),
        warnings=result.warnings,
        log_tail=lines,
    )


def failure_log(out: pathlib.Path, label: str) -> pathlib.Path:
    """Return where a GPU compiler's log goes; it stays there when the compile fails."""
    return out.with_name(f"{out.name}.{label.replace('/', '.')}.log")


def clear_failure_logs(out: pathlib.Path) -> None:
    """Remove the logs that earlier builds of this directory left."""
    for name in target_names():
        for is_draft in (False, True):
            failure_log(out, piece_name(name, is_draft=is_draft)).unlink(missing_ok=True)


def _plain_names(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return sizes under numpy's names of types: ONNX and the cpu plan have their own."""
    names = {
        "float": "float32",
        "f32": "float32",
        "f16": "float16",
        "bf16": "bfloat16",
        "i8": "int8",
        "i4": "int4",
        "uint4": "int4",
        "f8": "float8_e4m3fn",
        "float8e4m3fn": "float8_e4m3fn",
        "f4": "float4_e2m1",
        "float4e2m1": "float4_e2m1",
    }
    plain: collections.Counter[str] = collections.Counter()
    for name, size in sizes.items():  # signed and unsigned int4 are one type here
        plain[names.get(name, name)] += size
    return dict(sorted(plain.items()))


def needed_bytes(request: CompileRequest, targets: Sequence[Target]) -> int:
    """Return about how much disk the targets take while they are built: plans, and GPU graphs with their weights."""
    spec = request.checkpoint.spec
    total = _SLACK_BYTES
    exported = set()
    for target in targets:
        compute = compute_dtype(target, spec, request.recipe)
        sizes = _plain_names(weight_bytes(request.graph(target)))
        if target.compiler == "cpu":
            held = request.recipe.quantization
            if held is not None and any(scheme.fp8_grid for _, scheme in held.schemes):
                sizes["int4"] = 2 * sizes.get("int4", 0)  # held as the FP8 codes they are rounded to
        elif compute not in exported:
            exported.add(compute)
            total += sum(sizes.values())
        total += sum(sizes.values())
    return total
