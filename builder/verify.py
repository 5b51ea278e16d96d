"""The engine against its references: the same logits, on mixed steps of prefill chunks and decode tokens.

    reference     the graph in ONNX Runtime, at the same precision: shows what compiling and the kernels changed
    transformers  the checkpoint itself in float32: shows what the graph and the precision changed

Every token of every sequence is compared. KL is KL(referee || engine) of the next-token distributions, in nats.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..runtime.errors import InvalidArgumentError, UnsupportedError
from ..runtime.manifest import MANIFEST_NAME, load_manifest
from .batch import BatchPlanner, StepBatch
from .build import plan_build
from .checkpoint import Checkpoint, open_checkpoint
from .graph import build_graph
from .limits import Limits, make_limits
from .precision import Precision, precision
from .prompts import make_sequences

Logits = npt.NDArray[np.float32]
REFEREES = ("reference", "transformers")


@dataclasses.dataclass(frozen=True)
class Threshold:
    """What a comparison must keep; the largest difference of a logit, KL, and the least share of equal best tokens."""

    max_diff: float = math.inf
    mean_kl: float = math.inf
    max_kl: float = math.inf
    top1: float = 0.0


# By referee and precision. Of fp32, fp16 and bf16 the graph and the cpu plan hold the same numbers and only the order
# of additions differs; int8 and int4 plans also quantize the activations, row by row.
_SAME = Threshold(max_diff=2e-3, mean_kl=1e-5)
THRESHOLDS: dict[tuple[str, str], Threshold] = {
    ("reference", "fp32"): _SAME,
    ("reference", "fp16"): _SAME,
    ("reference", "bf16"): _SAME,
    ("reference", "int8"): Threshold(mean_kl=0.02, max_kl=0.5, top1=0.9),
    ("reference", "int4"): Threshold(mean_kl=0.02, max_kl=0.5, top1=0.9),
    ("transformers", "fp32"): _SAME,
    ("transformers", "fp16"): Threshold(mean_kl=1e-4, max_kl=0.01, top1=0.97),
    ("transformers", "bf16"): Threshold(mean_kl=2e-3, max_kl=0.1, top1=0.95),
    ("transformers", "int8"): Threshold(mean_kl=0.03, max_kl=1.0, top1=0.85),
    ("transformers", "int4"): Threshold(mean_kl=0.6, max_kl=8.0, top1=0.5),
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One engine against one referee over `rows` tokens."""

    subject: str
    referee: str
    rows: int
    max_diff: float
    mean_kl: float
    max_kl: float
    top1: float
    threshold: Threshold
    passed: bool


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """All comparisons; notes say what could not be compared."""

    checkpoint: str
    precision: str
    sequences: int
    steps: int
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every comparison passed."""
        return all(one.passed for one in self.comparisons)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values; an absent threshold is null."""
        content = dataclasses.asdict(self)
        for one in content["comparisons"]:
            one["threshold"] = {k: v if math.isfinite(v) else None for k, v in one["threshold"].items()}
        return {"passed": self.passed, **content}


class _Tally:
    """Differences of two runs, gathered row by row."""

    def __init__(self) -> None:
        self.rows = self.agreeing = 0
        self.max_diff = self.sum_kl = self.max_kl = 0.0

    def add(self, referee: Logits, subject: Logits) -> None:
        """Compare (R, V) logits."""
        if not np.isfinite(subject).all():
            self.max_diff = self.sum_kl = self.max_kl = math.inf
        with np.errstate(invalid="ignore"):
            p, q = _log_softmax(referee), _log_softmax(subject)
            kl = np.maximum((np.exp(p) * (p - q)).sum(axis=1), 0.0)
            self.max_diff = max(self.max_diff, float(np.abs(referee - subject).max()))
        self.rows += len(referee)
        self.agreeing += int((referee.argmax(axis=1) == subject.argmax(axis=1)).sum())
        self.sum_kl += float(kl.sum())
        self.max_kl = max(self.max_kl, float(kl.max()))

    def result(self, subject: str, referee: str, threshold: Threshold) -> Comparison:
        mean_kl, top1 = self.sum_kl / self.rows, self.agreeing / self.rows
        passed = (
            self.max_diff <= threshold.max_diff
            and mean_kl <= threshold.mean_kl
            and self.max_kl <= threshold.max_kl
            and top1 >= threshold.top1
        )
        return Comparison(
            subject, referee, self.rows, self.max_diff, mean_kl, self.max_kl, top1, threshold, passed
        )


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


class _Session(Protocol):
    def step(self, batch: StepBatch) -> Logits:
        """Return the logits of a step."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is verified: a cpu plan of a checkpoint."""

    checkpoint: Checkpoint
    recipe: Precision
    limits: Limits
    plan: pathlib.Path
    notes: tuple[str, ...] = ()


@contextlib.contextmanager
def open_subject(
    path: pathlib.Path, checkpoint: pathlib.Path | None = None, precision_name: str | None = None
) -> Iterator[Subject]:
    """Give what is to be verified: an engine directory's cpu plan, or one made of a checkpoint for the purpose.

    checkpoint : of an engine, where it is not at its recorded place any more
    precision_name : of a checkpoint ("auto" when None); an engine has its own
    raises EngineFileError, CheckpointError, or InvalidArgumentError when the two do not belong together.
    """
    if (path / MANIFEST_NAME).is_file():
        yield _engine_subject(path, checkpoint, precision_name)
        return
    if checkpoint is not None:
        raise InvalidArgumentError(
            f"--checkpoint goes with an engine directory, {path} has no {MANIFEST_NAME}; leave it out or give an engine"
        )
    plan = plan_build(path, ["cpu"], precision=precision_name or "auto")
    from .targets.cpu import compile_plan

    with tempfile.TemporaryDirectory(prefix="plansmith-verify-") as folder:
        file = pathlib.Path(folder) / "model.plan"
        spec = plan.checkpoint.spec
        model = build_graph(spec, plan.checkpoint.weights, plan.recipe, plan.limits)
        compile_plan(model, spec, plan.limits, file)
        yield Subject(plan.checkpoint, plan.recipe, plan.limits, file)


def _engine_subject(
    path: pathlib.Path, checkpoint: pathlib.Path | None, precision_name: str | None
) -> Subject:
    manifest = load_manifest(path)
    manifest.check_files(hashes=True)
    if precision_name not in (None, "auto", manifest.precision):
        raise InvalidArgumentError(
            f"--precision {precision_name} is asked for, {path} has {manifest.precision}; leave --precision out, or "
            "verify the checkpoint itself"
        )
    limits = {f.name: getattr(manifest.limits, f.name) for f in dataclasses.fields(Limits)}
    source = pathlib.Path(checkpoint or manifest.checkpoint.path)
    if not source.exists():
        raise InvalidArgumentError(
            f"the checkpoint of {path} is not at {source} any more; say where it is with --checkpoint"
        )
    opened = open_checkpoint(source, manifest.limits.max_seq_len)
    if opened.fingerprint() != manifest.checkpoint.fingerprint:
        raise InvalidArgumentError(
            f"{source} is not the checkpoint that {path} was built from (fingerprint {opened.fingerprint()[:12]}, "
            f"recorded {manifest.checkpoint.fingerprint[:12]}); give the right one with --checkpoint or build again"
        )
    notes = [
        f"target {name} runs on {' '.join(target.sm)} only; its files are whole"
        for name, target in manifest.targets.items()
        if target.sm
    ]
    return Subject(
        opened,
        precision(manifest.precision),
        make_limits(opened.spec.max_position_embeddings, **limits),
        manifest.plan_path("cpu"),
        tuple(notes),
    )


def verify(
    subject: Subject,
    against: Sequence[str] = ("reference",),
    *,
    num_sequences: int = 6,
    max_length: int = 96,
    seed: int = 0,
    num_threads: int = 1,
) -> VerifyReport:
    """Run the plan and its referees over the same steps and return how far apart they are.

    against : of REFEREES
    num_sequences, max_length : text and random tokens, half each; lengths in tokens
    raises UnsupportedError when onnxruntime or transformers is needed and not installed.
    """
    sequences = make_sequences(
        subject.checkpoint, num_sequences, min(max_length, subject.limits.max_seq_len), seed
    )
    original = _transformers_logits(subject.checkpoint, sequences) if "transformers" in against else None
    planner = _planner(subject.limits, sequences, seed)
    num_blocks = _num_blocks(subject.limits, sequences)
    tallies: dict[tuple[str, str], _Tally] = {}
    steps = 0
    with contextlib.ExitStack() as stack:
        cpu = stack.enter_context(_cpu_session(subject.plan, num_blocks, num_threads))
        reference = _reference_session(subject, num_blocks, num_threads) if "reference" in against else None
        for steps, planned in enumerate(planner, 1):  # noqa: B007 - counted
            rows = {"cpu": cpu.step(planned.batch)}
            if reference is not None:
                rows["reference"] = reference.step(planned.batch)
                tallies.setdefault(("cpu", "reference"), _Tally()).add(rows["reference"], rows["cpu"])
            if original is not None:
                wanted = np.stack([original[seq][position] for seq, position in planned.rows])
                for name, got in rows.items():
                    tallies.setdefault((name, "transformers"), _Tally()).add(wanted, got)
    comparisons = [
        tally.result(name, referee, THRESHOLDS[referee, subject.recipe.name])
        for (name, referee), tally in tallies.items()
    ]
    return VerifyReport(
        checkpoint=str(subject.checkpoint.path),
        precision=subject.recipe.name,
        sequences=len(sequences),
        steps=steps,
        comparisons=tuple(comparisons),
        notes=subject.notes,
    )


def _planner(limits: Limits, sequences: Sequence[Sequence[int]], seed: int) -> BatchPlanner:
    batch = min(limits.max_batch_size, 8)
    return BatchPlanner(
        sequences,
        num_blocks=_num_blocks(limits, sequences),
        tokens_per_block=limits.tokens_per_block,
        max_blocks_per_seq=limits.max_blocks_per_seq,
        max_num_tokens=min(limits.max_num_tokens, max(32, batch)),
        max_batch_size=batch,
        seed=seed,
    )


def _num_blocks(limits: Limits, sequences: Sequence[Sequence[int]]) -> int:
    """Return a pool that holds about half of the sequences at once, so that blocks are used again."""
    each = max(-(-len(one) // limits.tokens_per_block) for one in sequences)
    return each * max(2, len(sequences) // 2)


def _cpu_session(
    plan: pathlib.Path, num_blocks: int, num_threads: int
) -> contextlib.AbstractContextManager[_Session]:
    from .targets.cpu.executor import CpuSession

    return CpuSession(plan, num_blocks, num_threads=num_threads)


def _reference_session(subject: Subject, num_blocks: int, num_threads: int) -> _Session:
    from .targets.reference import ReferenceSession

    model = build_graph(subject.checkpoint.spec, subject.checkpoint.weights, subject.recipe, subject.limits)
    return ReferenceSession(model, num_blocks, num_threads=num_threads)


def has_transformers() -> bool:
    """Return whether transformers and torch are installed."""
    import importlib.util

    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def _transformers_logits(checkpoint: Checkpoint, sequences: Sequence[Sequence[int]]) -> list[Logits]:
    """Return each sequence's logits (length, V), from the checkpoint in float32 without a KV cache."""
    if not has_transformers():
        raise UnsupportedError(
            "--against transformers needs torch and transformers, which are not installed; run: pip install torch "
            "transformers, or compare --against reference"
        )
    import torch
    import transformers

    path = checkpoint.path
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
    if path.is_file():
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    load: Callable[..., Any] = transformers.AutoModelForCausalLM.from_pretrained
    model = load(**where, dtype=torch.float32, local_files_only=True, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [model(torch.tensor([list(one)]), use_cache=False).logits[0].numpy() for one in sequences]
