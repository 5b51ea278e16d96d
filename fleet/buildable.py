"""Where a unit can be built: on this machine, on one with its GPU, or nowhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from ..builder.precision import Precision
from ..builder.spec import DecoderSpec
from ..builder.targets.registry import Target, check_target
from ..builder.targets.rtx.targets import check_installed
from ..builder.targets.tensorrt import targets as tensorrt
from ..runtime.errors import Error, UnsupportedError
from .settle import plain

State = Literal["here", "gpu", "extra", "refused"]


@dataclasses.dataclass(frozen=True)
class Buildable:
    """Where a unit can be built.

    state : "here"; "gpu" = on a machine with the target's GPU; "extra" = once a package is installed; "refused" =
        nowhere, the model does not run there at this recipe
    needs : what is missing, in some words: "a GPU sm90, with TensorRT 11"; "" here
    why : the whole sentence, with what to do; "" here
    """

    state: State
    needs: str = ""
    why: str = ""


HERE = Buildable("here")


def lack_of(target: Target) -> Buildable | None:
    """Return what this machine lacks to compile for a target."""
    try:
        if target.compiler == "rtx":
            check_installed()
        if target.compiler == "tensorrt":
            tensorrt.check_available(tensorrt.TARGETS[target.name])
    except UnsupportedError as error:
        if target.compiler == "tensorrt":
            return Buildable("gpu", f"a GPU {target.sm[0]}, with TensorRT 11", str(error))
        return Buildable("extra", "plansmith[rtx]", str(error))
    return None


def buildable(
    target: Target, lack: Buildable | None, spec: DecoderSpec, recipes: Sequence[Precision]
) -> Buildable:
    """Return where a model can be built for a target at all of the recipes; lack : what lack_of says."""
    for recipe in recipes:
        try:
            check_target(target, spec, recipe)
        except Error as error:  # what the model itself refuses comes before what is not installed
            if lack is None or str(error) != lack.why:
                return refused(target, str(error))
    return HERE if lack is None else lack


def refused(target: Target, why: str) -> Buildable:
    """Return what says that a unit can be built nowhere; `why` may be a sentence of the builder."""
    return Buildable("refused", f"another recipe for {target.name}", plain(why))
