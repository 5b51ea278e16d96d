"""Writing a repository so that it is there whole or not at all, over nothing that is not ours."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from ...builder.engine_dir import replacing
from ...runtime.errors import InvalidArgumentError
from .plan import RepositoryPlan
from .template import MODELS, fill, template_dir

MARKER = "plansmith.json"
"""What tells a directory that was made here: which engine it is for, and what its files were."""


def write_repository(plan: RepositoryPlan, out_dir: Path, *, force: bool = False) -> list[str]:
    """Write the repository and return its files, relative to out_dir.

    force : also replace a repository that was not made here, or was changed since. Other directories never are.
    raises InvalidArgumentError for a destination that is not to be replaced, BuildError while another process writes
        it, OutOfMemoryError for a full disk. After an error or a kill, out_dir is as it was
    """
    marker = check_destination(out_dir, plan.engine_dir, force=force)
    texts = {model: fill(model, plan.variables[model], plan.extra[model]) for model in MODELS}
    with replacing(out_dir, marker) as work:
        for model, text in texts.items():
            folder = work.path / plan.names[model]
            (folder / "1").mkdir(parents=True)
            (folder / "config.pbtxt").write_text(text, encoding="utf-8")
            source = template_dir() / model / "1" / "model.py"
            if source.is_file():
                shutil.copyfile(source, folder / "1" / "model.py")
            else:  # an empty directory would get lost in version control, and Triton wants one
                (folder / "1" / ".keep").touch()
        files = _files(work.path)
        (work.path / MARKER).write_text(_marker_text(plan, work.path, files), encoding="utf-8")
    return files


def check_destination(out_dir: Path, engine_dir: Path, *, force: bool) -> str:
    """Return the file by which out_dir is known as a repository; InvalidArgumentError when it is not to be replaced."""
    if engine_dir.resolve().is_relative_to(out_dir.resolve()):
        raise InvalidArgumentError(
            f"{out_dir} is replaced as a whole, and the engine {engine_dir} lies in it; give another -o"
        )
    if out_dir.exists() and not out_dir.is_dir():
        raise InvalidArgumentError(f"{out_dir} is a file, a model repository is a directory; give another -o")
    if not out_dir.is_dir() or not any(out_dir.iterdir()):
        return MARKER
    if not (out_dir / MARKER).is_file():
        return _check_foreign(out_dir, force)
    changed = _changed(out_dir)
    if changed and not force:
        raise InvalidArgumentError(
            f"{out_dir} was changed since it was written ({', '.join(changed[:4])}{' ...' if changed[4:] else ''}); "
            f"keep the changes with --from {out_dir}, or replace it with --force"
        )
    return MARKER


def _check_foreign(out_dir: Path, force: bool) -> str:
    """Return a file of a repository that was made elsewhere, when it may be replaced."""
    configs = sorted(out_dir.glob("*/config.pbtxt"))
    others = [one.name for one in out_dir.iterdir() if one.is_dir() and not (one / "config.pbtxt").is_file()]
    if configs and not others and force:
        return str(configs[0].relative_to(out_dir))
    if configs and not others:
        raise InvalidArgumentError(
            f"{out_dir} is a repository that was not made here; give a new directory with -o, or replace it with "
            "--force"
        )
    what = f"holds {others[0]}, which is no model" if others else "holds files and no model"
    raise InvalidArgumentError(
        f"{out_dir} {what}, so it is not replaced; give a new or an empty directory with -o"
    )


def _changed(out_dir: Path) -> list[str]:
    """Return the files of a repository of ours that are new, changed or gone."""
    try:
        was = json.loads((out_dir / MARKER).read_text(encoding="utf-8"))["files"]
        known = dict(was)
    except (OSError, ValueError, KeyError, TypeError):
        return [MARKER]
    now = {name: _hash(out_dir / name) for name in _files(out_dir) if name != MARKER}
    return sorted(name for name in known.keys() | now.keys() if known.get(name) != now.get(name))


def _files(root: Path) -> list[str]:
    """Return the files below root but Python's caches, sorted."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [one for one in folders if one != "__pycache__"]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in names]
    return sorted(found)


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"


def _marker_text(plan: RepositoryPlan, root: Path, files: list[str]) -> str:
    from ... import __version__

    content: dict[str, Any] = {
        "plansmith_version": __version__,
        "created": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "engine_dir": str(plan.engine_dir),
        "models": dict(plan.names),
        "files": {name: _hash(root / name) for name in files},
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
