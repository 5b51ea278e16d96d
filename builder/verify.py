"""The engine against its references: the same logits, on mixed steps of prefill chunks and decode tokens.

    reference     the graph in ONNX Runtime, at the same precision and, beside int8 and int4 weights, with activations
                  rounded as the cpu target rounds them: shows whether compiling and the kernels are right
    unrounded     the same without the rounding of activations: with reference, it shows what the rounding costs
    transformers  the checkpoint itself in float32: what the graph and the precision change

Every token of every sequence is compared. KL is KL(referee || engine) of the next-token distributions, in nats.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import numpy as np

from ..runtime.errors import UnsupportedError
from .batch import BatchPlanner, StepBatch
from .checkpoint import Checkpoint
from .compare import Comparison, Logits, Tally, threshold_of
from .graph import build_graph
from .limits import Limits
from .progress import Progress, no_progress
from .prompts import make_sequences
from .verify_subject import Subject

REFEREES = ("reference", "transformers")
VERIFY = "verify"  # what progress is told of, where a build names a target


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """All comparisons; notes say of each target of an engine what was checked."""

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
        """Return the report as JSON values; an absent threshold, or a difference that is not finite, is null."""
        return {"passed": self.passed, **_finite(dataclasses.asdict(self))}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Session(Protocol):
    def step(self, batch: StepBatch) -> Logits:
        """Return the logits of a step."""


def verify(
    subject: Subject,
    against: Sequence[str] = ("reference",),
    *,
    num_sequences: int = 6,
    max_length: int = 96,
    seed: int = 0,
    num_threads: int = 1,
    progress: Progress | None = None,
) -> VerifyReport:
    """Run the plan and its referees over the same steps and return how far apart they are.

    against : of REFEREES
    num_sequences, max_length : text and random tokens, half each; lengths in tokens
    progress : told what is done, on this thread
    raises UnsupportedError when onnxruntime or transformers is needed and not installed.
    """
    tell = progress or no_progress
    sequences = make_sequences(
        subject.checkpoint, num_sequences, min(max_length, subject.limits.max_seq_len), seed
    )
    original = None
    if "transformers" in against:
        tell(VERIFY, "running transformers", 0, 0)
        original = _transformers_logits(subject.checkpoint, sequences)
    planner = _planner(subject.limits, sequences, seed)
    num_blocks = _num_blocks(subject.limits, sequences)
    tallies: dict[tuple[str, str], Tally] = {}
    steps = num_done = 0
    num_tokens = sum(map(len, sequences))
    with contextlib.ExitStack() as stack:
        cpu = stack.enter_context(_cpu_session(subject.plan, num_blocks, num_threads))
        referees = {}
        if "reference" in against:
            tell(VERIFY, "preparing the references", 0, 0)
            referees["reference"] = _reference_session(subject, num_blocks, num_threads, rounded=True)
            if subject.recipe != subject.recipe.without_rounding():
                referees["unrounded"] = _reference_session(subject, num_blocks, num_threads, rounded=False)
        for steps, planned in enumerate(planner, 1):  # noqa: B007 - counted
            got = cpu.step(planned.batch)
            wanted = {name: session.step(planned.batch) for name, session in referees.items()}
            if original is not None:
                wanted["transformers"] = np.stack([original[seq][at] for seq, at in planned.rows])
            for subject_name, referee in _pairs(wanted):
                tally = tallies.setdefault((subject_name, referee), Tally())
                tally.add(wanted[referee], {"cpu": got, **wanted}[subject_name])
            num_done += len(planned.rows)
            tell(VERIFY, "comparing", num_done, num_tokens)
    noise = tallies.get(("reference", "unrounded"))
    comparisons = [
        tally.result(name, referee, threshold_of(name, referee, subject.recipe, noise))
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


def _pairs(referees: Collection[str]) -> list[tuple[str, str]]:
    """Return who is compared with whom."""
    pairs = [
        ("cpu", "reference"),
        ("reference", "unrounded"),
        ("cpu", "transformers"),
        ("unrounded", "transformers"),
    ]
    if "unrounded" not in referees:
        pairs.append(("reference", "transformers"))
    return [(one, two) for one, two in pairs if two in referees and one in ("cpu", *referees)]


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
    from .targets.cpu.session import CpuSession

    return CpuSession(plan, num_blocks, num_threads=num_threads)


def _reference_session(subject: Subject, num_blocks: int, num_threads: int, *, rounded: bool) -> _Session:
    from .targets.reference import ReferenceSession

    recipe = subject.recipe if rounded else subject.recipe.without_rounding()
    model = build_graph(subject.checkpoint.spec, subject.checkpoint.weights, recipe, subject.limits)
    return ReferenceSession(model, num_blocks, num_threads=num_threads)


def has_transformers() -> bool:
    """Return whether transformers and torch are installed."""
    import importlib.util

    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def _transformers_logits(checkpoint: Checkpoint, sequences: Sequence[Sequence[int]]) -> list[Logits]:
    """Return each sequence's logits (length, V), from the checkpoint in float32 without a KV cache."""
    if checkpoint.quantization is not None:
        raise UnsupportedError(
            f"{checkpoint.path} is quantized, transformers would not run it as the engine does; compare --against "
            "reference, and see with plansmith eval what the quantization changes"
        )
    if not has_transformers():
        raise UnsupportedError(
            "--against transformers needs torch and transformers, which are not installed; run: pip install torch "
            "transformers, or compare --against reference"
        )
    if checkpoint.describe()["kind"] == "tensorrt_llm":
        raise UnsupportedError(
            f"--against transformers cannot open {checkpoint.path}, a TensorRT-LLM checkpoint; compare --against "
            "reference"
        )
    import torch
    import transformers

    quiet: Callable[[], None] = transformers.utils.logging.disable_progress_bar
    quiet()
    path = checkpoint.path
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
    if path.is_file():
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    load: Callable[..., Any] = transformers.AutoModelForCausalLM.from_pretrained
    model = load(**where, dtype=torch.float32, local_files_only=True, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [model(torch.tensor([list(one)]), use_cache=False).logits[0].numpy() for one in sequences]
