"""The templates in triton_repo/: which variables they have, and what they look like filled."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ... import triton_repo
from ...runtime.errors import InternalError, InvalidArgumentError

MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")
"""What each model of a repository does, which is also its name unless an older repository calls it otherwise."""

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_PARAMETER = re.compile(r'^parameters \{ key: "(\w+)" value: \{ string_value: "\$\{(\w+)\}" \} \}$', re.M)
_ESCAPES = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r", "\t": r"\t"}


def template_dir() -> Path:
    """Return the folder of the templates."""
    return Path(triton_repo.__file__).parent


def read_template(model: str) -> str:
    """Return the config.pbtxt of a model, not filled."""
    return (template_dir() / model / "config.pbtxt").read_text(encoding="utf-8")


def parameter_variables(model: str) -> dict[str, str]:
    """Return the parameters of a model's template: key -> the variable that fills it."""
    return dict(_PARAMETER.findall(read_template(model)))


def fill(model: str, variables: Mapping[str, str], extra: Mapping[str, str]) -> str:
    """Return a model's config.pbtxt.

    variables : a text for each variable; those within quotes may be any text
    extra : further parameters, written behind the template's
    raises InvalidArgumentError for a value that has a `${` itself
    """
    for name, text in (*variables.items(), *extra.items()):
        _check_text(model, name, text)
    template = read_template(model)
    missing = set(_VARIABLE.findall(template)) - variables.keys()
    if missing:
        raise InternalError(f"the template of {model} has no value for {', '.join(sorted(missing))}")
    filled = _VARIABLE.sub(lambda found: quoted(variables[found[1]]), template)
    blocks = "".join(
        f'parameters {{ key: "{quoted(key)}" value: {{ string_value: "{quoted(text)}" }} }}\n'
        for key, text in extra.items()
    )
    return filled + ("\n" + blocks if blocks else "")


def quoted(text: str) -> str:
    """Return a text as it stands between quotes in protobuf's text format."""
    return "".join(
        _ESCAPES.get(c) or (f"\\{ord(c):03o}" if ord(c) < 32 or ord(c) == 127 else c) for c in text
    )


def _check_text(model: str, name: str, text: str) -> None:
    if "${" in text:
        raise InvalidArgumentError(
            f"{name} of {model} is {text!r}, which Triton's models take for a variable that was not filled; give a "
            "value without ${"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"{name} of {model} is {text!r}, which is not UTF-8; rename it") from None
