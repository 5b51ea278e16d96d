"""What is evaluated and against what: an engine or a checkpoint, and the unquantized checkpoint behind it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator

from ..builder.checkpoint import Checkpoint, open_checkpoint
from ..builder.precision import Precision
from ..builder.verify_subject import Subject, open_recorded, open_subject, recorded_limits, tokenizer_for
from ..runtime.errors import InvalidArgumentError
from ..runtime.file_kind import MISSING, no_file
from ..runtime.manifest import MANIFEST_NAME, load_manifest

QUANTIZE_RECORD = "plansmith_quantize.json"
"""Beside a checkpoint that plansmith quantized; its "source" has the path and fingerprint of what it was made from."""


@contextlib.contextmanager
def open_eval_subject(
    path: pathlib.Path, checkpoint: pathlib.Path | None = None, precision_name: str | None = None
) -> Iterator[Subject]:
    """Give the cpu plan that is evaluated: an engine's own, or one made for the time being.

    An engine that has GPU targets only is evaluated through a cpu plan of the same recipe; the subject's notes say so.
    checkpoint : of an engine, where it is not at its recorded place any more
    precision_name : of a checkpoint; None = auto
    raises as verify_subject.open_subject
    """
    is_engine = no_file(path / MANIFEST_NAME) != MISSING  # what is there and no file, is told
    manifest = load_manifest(path) if is_engine else None
    if manifest is None or "cpu" in manifest.targets:
        with open_subject(path, checkpoint, precision_name) as subject:
            yield dataclasses.replace(subject, notes=())
        return
    source = open_recorded(path, manifest, checkpoint).path
    tokenizer, limits = tokenizer_for(source, path), recorded_limits(manifest)
    with open_subject(source, None, manifest.precision, tokenizer, limits) as subject:
        names = ", ".join(manifest.targets)
        note = (
            f"{path} has no cpu target ({names}): what is evaluated is a cpu plan of the same recipe, compiled for the "
            "time being; the GPU's own rounding is not in it"
        )
        yield dataclasses.replace(subject, notes=(note,))


def original_of(checkpoint: Checkpoint, recipe: Precision, max_seq_len: int) -> Checkpoint:
    """Return the unquantized checkpoint behind one: itself, or what plansmith_quantize.json names as its source.

    raises InvalidArgumentError when it is quantized and does not say of what, or the source is gone
    """
    if checkpoint.quantization is None:
        return checkpoint
    where, fingerprint = _recorded_source(checkpoint, recipe)
    if not where.exists():
        raise InvalidArgumentError(
            f"{checkpoint.path} was made from {where}, which is not there any more; give the unquantized checkpoint as "
            "--against"
        )
    original = open_checkpoint(where, max_seq_len)
    if fingerprint is not None and original.fingerprint() != fingerprint:
        found = original.fingerprint()
        raise InvalidArgumentError(
            f"{checkpoint.path} was made from what lay at {where} (fingerprint {fingerprint[:12]}), where there is "
            f"another checkpoint now ({found[:12]}); give the unquantized checkpoint as --against"
        )
    return original


def _recorded_source(checkpoint: Checkpoint, recipe: Precision) -> tuple[pathlib.Path, str | None]:
    """Return the path, and the fingerprint if there is one, of what a quantized checkpoint was made from."""
    try:
        record = json.loads((checkpoint.path / QUANTIZE_RECORD).read_text(encoding="utf-8"))
        source = record["source"]
        fingerprint = source.get("fingerprint")
        if fingerprint is not None and not isinstance(fingerprint, str):
            raise TypeError(fingerprint)
        return pathlib.Path(source["path"]), fingerprint
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidArgumentError(
            f"{checkpoint.path} is quantized ({recipe.name}) and has no {QUANTIZE_RECORD} that names what it was made "
            "from; give the unquantized checkpoint as --against"
        ) from None
