"""SKUs of a fleet: the name of a GPU, or of a target, becomes what is built for it."""

from __future__ import annotations

import dataclasses
import re

from ..builder.targets.registry import Target, find_targets, target_names
from ..runtime.errors import Error, InvalidArgumentError
from ..sizing.skus import SKUS, Sku, find_sku
from .schema_check import nearest

_TENSORRT = "tensorrt"


@dataclasses.dataclass(frozen=True)
class SkuTarget:
    """What is built for an SKU.

    gpu : what is known of the GPU; None for cpu, and where a target was named and no GPU
    """

    target: Target
    gpu: Sku | None


def resolve(name: str, target: str | None = None, compiler: str | None = None) -> SkuTarget:
    """Return what is built for an SKU.

    name : of a GPU that find_sku knows, or of a target, or any name where `target` is given
    target : as --target takes it, instead of the one that follows from the name
    compiler : "rtx" or "tensorrt", where both have the GPU; None = rtx where it has it
    raises InvalidArgumentError or UnsupportedError naming what is not known, or does not fit together
    """
    gpu = _gpu(name) if target is None else SKUS.get(name)  # else the name is the user's own
    if target is None and gpu is None and not _is_target(name):
        raise InvalidArgumentError(
            f"no GPU and no target is called {name!r}; {nearest(name, [*SKUS, *target_names()])}Give one of "
            f"{', '.join(SKUS)}, a target ({', '.join(target_names())}), or a target: to a name of your own"
        )
    word = target or (name if gpu is None else gpu.sm)
    found = _with_compiler(_one(word), compiler)
    if gpu is not None and gpu.sm not in found.sm:
        raise InvalidArgumentError(
            f"{name} is {gpu.sm}, and plans of {found.name} run on {' and '.join(found.sm) or 'CPUs'}; leave target "
            "out, or give one that has it"
        )
    return SkuTarget(found, gpu)


def _gpu(name: str) -> Sku | None:
    """Return the GPU of a name; None where none has it, the error where several may be meant."""
    if _is_target(name):
        return None
    try:
        return find_sku(name)
    except InvalidArgumentError as error:
        if " may be " in str(error):
            raise
        return None


def _is_target(name: str) -> bool:
    """Return whether a name is a target's, or is written like one."""
    if re.match(r"sm_?\d", name):
        return True
    try:
        find_targets([name])
    except Error:
        return False
    return True


def _one(word: str) -> Target:
    """Return the one target of a word; the registry's errors speak of --target, which there is none of here."""
    try:
        found = find_targets([word])
    except Error as error:
        text = str(error).replace("--target ", "target ")
        raise type(error)(text) from None
    if len(found) != 1:
        raise InvalidArgumentError(f"target is {word!r}, wanted one; make an SKU for each")
    return found[0]


def _with_compiler(target: Target, compiler: str | None) -> Target:
    """Return a target as that compiler builds it."""
    if compiler is None or compiler == target.compiler:
        return target
    if target.compiler == "cpu":
        raise InvalidArgumentError(f"cpu has a compiler of its own, compiler is {compiler}; leave it out")
    plain = target.name.removesuffix("-tensorrt")
    other = f"{plain}-tensorrt" if compiler == _TENSORRT else plain
    if other not in target_names() or _one(other).compiler != compiler:
        raise InvalidArgumentError(
            f"{compiler} has no {plain}, only {target.compiler} has; leave compiler out"
        )
    return _one(other)
