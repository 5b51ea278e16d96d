"""Writes the tables of docs/migration.md that the code knows better: flags, parameters, tensors.

python tools/migration_tables.py [--check] docs/migration.md

A table stands between `<!-- table NAME -->` and `<!-- end -->`. With --check nothing is written, and a table that is
not what the code says is an error.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from plansmith.cli.legacy import FLAGS, RENAMED, Legacy
from plansmith.cli.quantize_legacy import FLAGS as QUANTIZE_FLAGS
from plansmith.serving.repository.template import MODELS, read_template
from plansmith.serving.triton.input_specs import INPUTS
from plansmith.serving.triton.parameters import PARAMETERS, Parameter
from plansmith.serving.triton.unsupported import _REFUSED, _REFUSED_IF_SET

_OLD_TENSORS = Path(__file__).parents[1] / "tests" / "serving" / "repository" / "tensors.txt"
_MARK = re.compile(r"(<!-- table (\w+) -->\n)(.*?)(<!-- end -->)", re.S)


def fill(text: str) -> str:
    """Return a page with its tables as the code has them."""
    return _MARK.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[4]}", text)


def _table(head: str, rows: Iterable[Iterable[str]]) -> str:
    columns = head.split(" | ")
    lines = [f"| {head} |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _flags(flags: Mapping[str, Legacy], renamed: Mapping[str, str]) -> str:
    """Return a table of flags, those of one fate in one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for old, new in renamed.items():
        rows.setdefault(("is taken", f"the same as `{new}`"), []).append(old)
    for name, flag in flags.items():
        rows.setdefault((_fate(flag), flag.note), []).append(name)
    return _table(
        "flag | what happens | why, or what to use instead",
        ((", ".join(f"`{_old(one)}`" for one in names), *fate) for fate, names in rows.items()),
    )


def _old(flag: str) -> str:
    return "--" + flag.removeprefix("--").replace("-", "_")


def _fate(flag: Legacy) -> str:
    if flag.harmless is None:
        return "dropped with a note"
    if not flag.harmless:
        return "refused"
    return "dropped with " + ", ".join(f"`{one}`" for one in flag.harmless) + "; else refused"


def _parameters() -> str:
    old = PARAMETERS[: _own_from()]
    return _table(
        "key | default | here", ((f"`{one.key}`", _code(one.default), _becomes(one)) for one in old)
    )


def _new_parameters() -> str:
    own = PARAMETERS[_own_from() :]
    return _table(
        "key | default | meaning", ((f"`{one.key}`", _code(one.default), one.meaning) for one in own)
    )


def _own_from() -> int:
    return [one.key for one in PARAMETERS].index("target")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _becomes(one: Parameter) -> str:
    if one.becomes == "ignored":
        return f"no effect: {one.meaning}"
    if one.becomes == "refused":
        return f"refused: {one.meaning}"
    return one.meaning


def _tensors() -> str:
    """Return what each model has beyond the older one's."""
    old = _old_tensors()
    rows = []
    for model in MODELS:
        for kind, names in template_tensors(model).items():
            known = old.get((model, kind), ())
            missing = [one for one in known if one not in names]
            assert not missing, f"{model} lacks {missing}"
            new = [one for one in names if one not in known]
            shared = len(names) - len(new)
            rows.append((f"`{model}`", f"{kind}s", str(shared), ", ".join(f"`{one}`" for one in new)))
    return _table("model | tensors | carried | further ones", rows)


def template_tensors(model: str) -> dict[str, list[str]]:
    """Return the names of a template's tensors: "input" and "output" -> names."""
    text = read_template(model)
    found = {}
    for kind in ("input", "output"):
        block = re.search(rf"^{kind} \[(.*?)^\]", text, re.M | re.S)
        assert block is not None
        found[kind] = re.findall(r'^  \{ name: "(\w+)"', block[1], re.M)
    return found


def _old_tensors() -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    model = ""
    for line in _OLD_TENSORS.read_text().splitlines():
        if line.startswith("["):
            model = line.strip("[]")
        elif line and not line.startswith("#"):
            kind, name = line.split()[:2]
            found.setdefault((model, kind), []).append(name)
    return found


def _refused() -> str:
    reasons = {**_REFUSED, **_REFUSED_IF_SET}
    assert reasons.keys() <= INPUTS.keys()
    rows: dict[str, list[str]] = {}
    for name, why in reasons.items():
        rows.setdefault(why, []).append(name)
    return _table(
        "input of tensorrt_llm | it is",
        ((", ".join(f"`{one}`" for one in names), why) for why, names in rows.items()),
    )


TABLES: Mapping[str, Callable[[], str]] = {
    "build_flags": lambda: _flags(FLAGS, RENAMED),
    "quantize_flags": lambda: _flags(QUANTIZE_FLAGS, {}),
    "parameters": _parameters,
    "new_parameters": _new_parameters,
    "tensors": _tensors,
    "refused": _refused,
}


def main(words: list[str]) -> int:
    """Write or check the pages, and return the exit status."""
    pages = [Path(one) for one in words if one != "--check"]
    status = 0
    for page in pages:
        before = page.read_text(encoding="utf-8")
        after = fill(before)
        if "--check" not in words:
            page.write_text(after, encoding="utf-8")
        elif after != before:
            changes = difflib.unified_diff(
                before.splitlines(), after.splitlines(), str(page), "the code", lineterm=""
            )
            print("\n".join(changes))
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
