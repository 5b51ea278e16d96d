"""Content keys of targets: equal keys mean that compiling again would give the same plan."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from .limits import Limits
from .precision import Precision
from .spec import DecoderSpec
from .targets.registry import Target, compiler_version, compute_dtype, recipe_for

_HERE = pathlib.Path(__file__).parent
# Sources that every target's plan depends on; a compiler's own folders come on top.
_COMMON = ("compile.py", "spec.py", "scheme.py", "limits.py", "precision.py", "checkpoint", "graph")

_CHILD = "targets/compiler_child.py"
# The compilers' process; the graph's lowering that both TensorRTs share, and the kernels that are in a plan.
_SHARED = {"rtx": (_CHILD,), "tensorrt": (_CHILD, "targets/rtx", "../plugins")}


@functools.cache
def sources_digest(compiler: str) -> str:
    """Return a hash over the builder's sources that a plan of this compiler depends on."""
    digest = hashlib.sha256()
    for name in (*_COMMON, f"targets/{compiler}", *_SHARED.get(compiler, ())):
        root = _HERE / name
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            digest.update(f"{name}/{path.relative_to(root).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def kernel_compiler_version(target: Target) -> str:
    """Return the version of what compiles the kernels that are in a plan; "" where none are, or it is missing."""
    if target.compiler != "tensorrt":
        return ""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


def plan_limits(limits: Limits) -> dict[str, Any]:
    """Return the limits that a plan depends on, by name."""
    return {name: value for name, value in dataclasses.asdict(limits).items() if name != "max_beam_width"}


def target_inputs(
    target: Target,
    fingerprint: str,
    spec: DecoderSpec,
    recipe: Precision,
    limits: Limits,
    weight_streaming: bool = False,
    version: str | None = None,
) -> dict[str, str]:
    """Return everything that goes into a target's plan, flat: a name with dots -> its value as text.

    fingerprint : of the checkpoint, over its config and weights. The tokenizer is no part of a plan.
    version : of the compiler; None = of the one that is installed, which raises UnsupportedError where none is
    """
    # No versions of numpy, onnx-ir and ml_dtypes: they compute what the sources say, and the provenance names them.
    content = {
        "checkpoint": fingerprint,
        "spec": _digest(dataclasses.asdict(spec)),  # follows from the checkpoint and max_seq_len
        "precision": dataclasses.asdict(recipe_for(target, recipe)),
        "limits": plan_limits(limits),
        "target": dataclasses.asdict(target),
        "compiler_version": compiler_version(target) if version is None else version,
        "kernel_compiler": kernel_compiler_version(target),
        "compute": compute_dtype(target, spec, recipe),
        "sources": sources_digest(target.compiler),
        "weight_streaming": weight_streaming,
    }
    return dict(_flat("", content))


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the leaves of a JSON value; quantizations, which are long, by their hash."""
    if isinstance(value, dict) and not name.endswith(".quantization"):
        for key, one in sorted(value.items()):
            yield from _flat(f"{name}.{key}" if name else key, one)
    elif isinstance(value, dict):
        yield name, _digest(value)
    else:
        yield name, value if isinstance(value, str) else json.dumps(value)


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def inputs_key(inputs: Mapping[str, str]) -> str:
    """Return the sha256 over inputs: equal ones mean that doing the work again would give the same."""
    return _digest(dict(inputs))
